"""What is remembered of an index, and the transactions on it: written, taken back, freed, told."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from threading import RLock
from weakref import WeakValueDictionary

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.levels import Holders, Savepoint, Transaction, require, take_back
from kvweave.chunk.record import Record
from kvweave.chunk.rows import ALL, UNSURE, IndexRows
from kvweave.errors import ChunkNotFound, InvalidArgument, StoreError

CACHED_RECORDS = 8192
"""Records kept in memory after reading, some 500 bytes each."""
CACHED_TOKENS = 1 << 20
"""Token ids kept in memory after reading, 4 bytes each."""
UNWRITTEN = 512
"""How many chunks may have newer tiers, sizes and uses than the database; writing 512 takes 20 ms."""


class Transactions:
    """What is remembered of an index's rows, and the transactions that change both."""

    def __init__(self, rows: IndexRows) -> None:
        self.rows = rows
        self.on_free: Callable[[ChunkId], None] | None = None
        self._written: dict[ChunkId, tuple[Record, int]] = {}  # of _dirty, by this transaction
        self.lock = RLock()  # of transactions
        self._reading = RLock()  # of caches; held for single statements only
        self.levels: list[Savepoint] = []
        self._loose: dict[ChunkId, None] = {}
        self.at_once: int | None = None
        self.behind: dict[ChunkId, None] = {}  # let go of by those that did not look at all of it
        self.freed: list[ChunkId] = []
        self._afterwards: list[Callable[[], object]] = []
        self.holders: Holders = {}
        self.live: WeakValueDictionary[ChunkId, Record] = WeakValueDictionary()
        self._recent: OrderedDict[ChunkId, Record] = OrderedDict()
        self._dirty: dict[ChunkId, tuple[Record, int]] = {}
        """Whose tier, size, deps or uses the database does not know yet, and how many uses."""
        self._tokens: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._n_cached, self._closed = 0, False
        self._news: set[ChunkId] = set()  # changed by others, or perhaps by us
        rows.held = self.holders

    def close(self) -> None:
        """Write what is unwritten and close the rows; doing it twice does nothing."""
        with self.lock:
            if self._closed:
                return
            if self.levels:
                raise InvalidArgument("table", "close() inside a transaction")
            try:
                self.settle()
            finally:
                self._closed = True
                self._recent.clear()
                self._tokens.clear()
                self.rows.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("table", "it is closed", "open it again")

    # --- what is remembered ---

    def get(self, id: ChunkId) -> Record:
        """Return the record of ``id``; raise ChunkNotFound."""
        record = self.find(id)
        if record is None:
            raise ChunkNotFound(f"#{id}")
        return record

    def same(self, record: Record) -> Record:
        """Return the record somebody has already, or this one that was just read."""
        with self._reading:
            return self.live.setdefault(record.id, record)

    def find(self, id: ChunkId) -> Record | None:
        """Return the record of ``id``, or None."""
        with self._reading:
            record = self._recent.get(id)
            if record is not None:
                self._recent.move_to_end(id)
                return record
            self._check_open()
            record = self.live.get(id) or self.rows.chunk(id)
            if record is not None:
                self.remember(record)
            return record

    def find_all(self, ids: Iterable[ChunkId]) -> dict[ChunkId, Record]:
        """As `find`, of many at once; without those that are gone."""
        with self._reading:
            self._check_open()
            known = {id: self._recent.get(id) or self.live.get(id) for id in ids}
            found = {id: record for id, record in known.items() if record is not None}
            for record in self.rows.records([id for id in known if id not in found]):
                found[record.id] = record
                self.remember(record)
            return found

    def remember(self, record: Record) -> None:
        """Keep a record, and let go of the one not used for longest."""
        self.live[record.id] = self._recent[record.id] = record
        if len(self._recent) > CACHED_RECORDS:
            self._recent.popitem(last=False)

    def forget(self, id: ChunkId) -> None:
        """Forget a chunk that is gone."""
        with self._reading:
            self._recent.pop(id, None)
            self.live.pop(id, None)
            self._dirty.pop(id, None)
            self._n_cached -= len(self._tokens.pop(id, b"")) // 4
        self.rows.forget(id)

    def token_bytes(self, record: Record) -> bytes:
        """Return a chunk's tokens. Raises CorruptChunk."""
        id = record.id
        with self._reading:
            data = self._tokens.get(id)
            if data is not None:
                self._tokens.move_to_end(id)
                return data
            self._check_open()
            data = self.rows.tokens(id, record.n_tokens)
            self._tokens[id] = data
            self._n_cached += len(data) // 4
            while self._n_cached > CACHED_TOKENS and len(self._tokens) > 1:
                self._n_cached -= len(self._tokens.popitem(last=False)[1]) // 4
            return data

    def is_kept(self, id: ChunkId) -> bool:
        """Return whether a name, a pin, a context or a living chunk keeps this one alive."""
        return id in self.holders or self.rows.is_kept(id)

    def check_memory(self) -> None:
        """Raise AssertionError when what is remembered is not what the rows say."""
        with self.lock:
            for id, held in self.holders.items():
                require(self.rows.chunk(id), f"#{id}, held by {sorted(held)}, is gone")
                require(held and min(held.values()) > 0, f"#{id} is held by nobody")
            for id, record in () if self.rows.is_shared else list(self.live.items()):
                there = self.rows.chunk(id)
                if there is not None and id in self._dirty:
                    below, here = there.fields(), record.fields()
                    there.set_fields((below[0], *here[1:4], below[4], *here[5:]))
                require(repr(there) == repr(record), f"#{id} is {record} in memory, {there} below")

    # --- freeing and transactions ---

    def let_go(self, id: ChunkId) -> None:
        """Free a chunk at the end, unless something keeps it then."""
        self.levels[-1].loose.setdefault(id, id in self._loose or id in self.behind)
        self._loose[id] = None

    def stays(self, id: ChunkId) -> None:
        """Take back `let_go`, also of an earlier transaction."""
        if id in self._loose or id in self.behind:
            self.levels[-1].loose.setdefault(id, True)
            self._loose.pop(id, None)
            self.behind.pop(id, None)

    def sweep(self, most: int | None = None) -> None:
        """Free of the first ``most`` let go of what nothing keeps; bases follow the last on them."""
        while self._loose and most != 0:
            most = None if most is None else most - 1
            id = next(iter(self._loose))
            del self._loose[id]
            self.levels[-1].loose.setdefault(id, True)
            record = self.find(id)
            if record is not None and not self.is_kept(id):
                self._free(record)

    def _free(self, record: Record) -> None:
        self.writing()
        if not self.rows.drop(record.id):
            return
        self.levels[-1].keep(record)
        with self._reading:
            self._recent.pop(record.id, None)
            self.live.pop(record.id, None)
        self.freed.append(record.id)
        if record.base is not None:
            self.let_go(record.base)

    # --- transactions ---

    def transaction(self) -> AbstractContextManager[None]:
        """Make all changes inside happen together, or none when an exception leaves it.

        An inner transaction can fail alone; freeing and writing wait for the outermost to end. Ids
        given inside are final only then: a process killed before may give them again.
        """
        return Transaction(self._begin, self._end)

    def if_undone(self, call: Callable[[], object]) -> None:
        """Have ``call`` made once what is open now was taken back; never, where nothing is open."""
        with self.lock:
            if self.levels:
                self.levels[-1].undone.append(call)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Make a call once nothing is open any more, whatever became of it: now, where nothing is."""
        with self.lock:
            if self.levels:
                self._afterwards.append(call)
                return
        call()

    def _begin(self) -> None:
        self.lock.acquire()
        if self._closed:
            self.lock.release()
            self._check_open()
        if not self.levels:
            try:
                self.catch_up()
            except BaseException:
                self.lock.release()
                raise
        self.levels.append(Savepoint(len(self.freed)))

    def _end(self, failed: bool) -> None:
        with ExitStack() as told:  # when the lock is given away, also where committing fails
            self._leave(failed, told)

    def _leave(self, failed: bool, told: ExitStack) -> None:
        """End the innermost transaction; ``told`` gets the calls that are to be made then."""
        levels = self.levels
        level, n = levels[-1], len(levels)
        done, gone, unsure = False, [], False
        try:
            if not failed and n == 1:
                if self._loose or self.behind:
                    for id in islice(self.behind, max(0, (self.at_once or 0) - len(self._loose))):
                        self.let_go(id)
                    self.sweep(self.at_once)
                if len(self._dirty) >= UNWRITTEN:
                    self.settle()
                self.rows.commit(len(self.freed))
            elif not failed:
                self.rows.release(n)
            done = not failed
        except StoreError as error:
            if unsure := n == 1 and (error.hint or "").startswith(UNSURE):
                self.behind |= self._loose  # to be looked at, whatever became of it
            raise
        finally:
            levels.pop()
            try:
                if not done:
                    self._undo(level, n)
                elif n > 1:
                    level.join(levels[-1])
            finally:
                if n == 1:
                    gone = self._finish(level if done else None)
                    after, self._afterwards = self._afterwards, []
                    for call in reversed(after):
                        told.callback(call)
                if not done:
                    told.callback(take_back, level.undone)
                    # chunks that never were may have got KV meanwhile
                    gone = [id for id, (_, was) in level.records.items() if was is None]
                if unsure:  # they may be: `catch_up` learns it
                    self._news.update(gone)
                    gone = []
                told.callback(self._tell, gone)
                self.lock.release()

    def _undo(self, level: Savepoint, n: int) -> None:
        self._written = {}
        level.undo(self.holders)
        for id, was in level.loose.items():
            if was:
                self._loose[id] = None
            else:
                self._loose.pop(id, None)
        del self.freed[level.n_freed :]
        with self._reading:
            for id, (record, fields) in level.records.items():
                if fields is None:
                    self.forget(id)
                else:
                    self.remember(record)
        self.rows.rollback(n)

    def _finish(self, done: Savepoint | None) -> list[ChunkId]:
        """Forget, now that nothing can fail any more, what is gone and what is written."""
        freed, self.freed = self.freed, []
        for id in done.loose if done is not None else ():
            self.behind.pop(id, None)
        self.behind |= self._loose
        self._loose = {}
        for id, item in self._written.items():
            if self._dirty.get(id) is item:  # else it was changed once more
                del self._dirty[id]
        self._written = {}
        for id in freed:
            self.forget(id)
        return freed if done is not None else []

    def writing(self) -> None:
        """Begin the transactions in the database too."""
        self.rows.open(len(self.levels))

    def fresh(self, record: Record) -> bool:
        """Bring a record up to date and keep others from it; False when it is gone."""
        if not self.rows.is_shared:
            return True
        self.writing()
        self.levels[-1].keep(record)
        found = self.rows.fresh(record)
        if not found:
            self.forget(record.id)
        return found

    def share(self, id: ChunkId) -> bool:
        """Keep other engines from removing a chunk; False when it is gone."""
        if not self.rows.is_shared:
            return True
        self.writing()
        found = self.rows.share(id)
        if not found:
            self.forget(id)
        return found

    def to_change(self, id: ChunkId) -> Record:
        """Return the record of a chunk that is going to be changed; raise ChunkNotFound."""
        record = self.get(id)
        if not self.fresh(record):
            raise ChunkNotFound(f"#{id}")
        self.writing()
        self.levels[-1].keep(record)
        return record

    def stands(self, record: Record) -> None:
        """Have no open transaction take back where a chunk's KV is."""
        for level in self.levels:
            level.pass_on(record)

    def catch_up(self) -> None:
        """Learn what other engines changed, or a commit that came too late, and tell of what is freed."""
        if self.levels or not self.lock.acquire(blocking=False):
            return
        gone: list[ChunkId] = []
        try:
            self._news.update(self.rows.changed())
            if ALL in self._news:
                self._news.update(self.live.keys(), self._dirty)
                self._news.discard(ALL)
            while self._news:  # what cannot be asked now is asked another time
                id = next(iter(self._news))
                there, record = self.rows.chunk(id), self.live.get(id)
                self._news.discard(id)
                if there is None:
                    self.forget(id)
                    gone.append(id)
                elif record is not None:
                    record.pinned, record.names = there.pinned, there.names
        finally:
            self.lock.release()
            self._tell(gone)

    def _tell(self, freed: list[ChunkId]) -> None:
        """Tell the owner of the KV of every freed chunk, even when it fails for one."""
        if self.on_free is None or not freed:
            return
        failure: Exception | None = None
        for id in freed:
            try:
                self.on_free(id)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def note(self, record: Record, n_uses: int) -> None:
        """Have the database know later what may be lost when the process dies."""
        known = self._dirty.get(record.id)
        self._dirty[record.id] = (record, n_uses + (known[1] if known else 0))

    def newer(self) -> dict[ChunkId, Record]:
        """Return the records that the database does not know as they are."""
        return {id: record for id, (record, _) in self._dirty.copy().items()}

    def settle(self) -> None:
        """Have the database know what is only in memory."""
        if self._dirty:
            with self.transaction():
                self.writing()
                self._written = dict(self._dirty)
                self.rows.change_facts(self._written.values())

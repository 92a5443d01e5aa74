"""Transactions on an index: what is written together, taken back, freed and told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.index import Index
from kvweave.chunk.levels import Level, Transaction
from kvweave.chunk.record import Record
from kvweave.chunk.rows import ALL
from kvweave.errors import ChunkNotFound

UNWRITTEN = 512
"""How many chunks may have newer tiers, sizes and uses than the database; writing 512 takes 20 ms."""


class Transactions(Index):
    """An index that is changed in transactions; `Table` has the verbs."""

    on_free: Callable[[ChunkId], None] | None = None
    _is_settled = False
    """Whether this transaction wrote what was unwritten."""

    def _let_go(self, id: ChunkId) -> None:
        self._loose[id] = None

    def _sweep(self) -> None:
        """Free what was let go of and nothing keeps; bases follow the last chunk on them."""
        while self._loose:
            id = next(iter(self._loose))
            del self._loose[id]
            record = self._find(id)
            if record is not None and not self.is_kept(id):
                self._free(record)

    def _free(self, record: Record) -> None:
        self._writing()
        if not self._rows.drop(record.id):
            return
        self._levels[-1].keep(record)
        with self._reading:
            self._recent.pop(record.id, None)
            self._live.pop(record.id, None)
        self._freed.append(record.id)
        if record.base is not None:
            self._let_go(record.base)

    # --- transactions ---

    def transaction(self) -> AbstractContextManager[None]:
        """Make all changes inside happen together, or none when an exception leaves it.

        An inner transaction can fail alone; freeing and writing wait for the outermost to end. Ids
        given inside are final only then: a process killed before may give them again.
        """
        return Transaction(self._begin, self._end)

    def _begin(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            self._check_open()
        if not self._levels:
            try:
                self._catch_up()
            except BaseException:
                self._lock.release()
                raise
        self._levels.append(Level(len(self._freed), dict(self._loose)))

    def _end(self, failed: bool) -> None:
        levels = self._levels
        level, n = levels[-1], len(levels)
        done, freed = False, []
        try:
            if not failed and n == 1:
                if self._loose:
                    self._sweep()
                if len(self._dirty) >= UNWRITTEN:
                    self._settle()
                self._rows.commit(len(self._freed))
            elif not failed:
                self._rows.release(n)
            done = not failed
        finally:
            levels.pop()
            try:
                if not done:
                    self._undo(level, n)
                elif n > 1:
                    level.join(levels[-1])
            finally:
                if n == 1:
                    freed = self._finish(done)
                self._lock.release()
        if freed:
            self._tell(freed)

    def _undo(self, level: Level, n: int) -> None:
        self._is_settled = False
        level.undo(self._holders)
        self._loose = level.loose
        del self._freed[level.n_freed :]
        with self._reading:
            for id, (record, fields) in level.records.items():
                if fields is None:
                    self._forget(id)
                else:
                    self._remember(record)
        self._rows.rollback(n)

    def _finish(self, done: bool) -> list[ChunkId]:
        """Forget, now that nothing can fail any more, what is gone and what is written."""
        freed, self._freed = self._freed, []
        self._loose = {}
        if done and self._is_settled:
            self._dirty.clear()
        self._is_settled = False
        for id in freed:
            self._forget(id)
        return freed if done else []

    def _writing(self) -> None:
        """Begin the transactions in the database too."""
        self._rows.open(len(self._levels))

    def _fresh(self, record: Record) -> bool:
        """Bring a record up to date and keep others from it; False when it is gone."""
        if not self._rows.is_shared:
            return True
        self._writing()
        self._levels[-1].keep(record)
        if self._rows.fresh(record):
            return True
        self._forget(record.id)
        return False

    def _share(self, id: ChunkId) -> bool:
        """Keep other engines from removing a chunk; False when it is gone."""
        if not self._rows.is_shared:
            return True
        self._writing()
        if self._rows.share(id):
            return True
        self._forget(id)
        return False

    def _to_change(self, id: ChunkId) -> Record:
        """Return the record of a chunk that is going to be changed; raise ChunkNotFound."""
        record = self.get(id)
        if not self._fresh(record):
            raise ChunkNotFound(f"#{id}")
        self._writing()
        self._levels[-1].keep(record)
        return record

    def _catch_up(self) -> None:
        """Learn what other engines changed, and tell of what they freed."""
        if not self._rows.is_shared or self._levels or not self._lock.acquire(blocking=False):
            return
        try:
            ids, gone = set(self._rows.changed()), []
            if ALL in ids:
                ids = {*ids, *self._live.keys(), *self._dirty} - {ALL}
            for id in ids:
                there, record = self._rows.chunk(id), self._live.get(id)
                if there is None:
                    self._forget(id)
                    gone.append(id)
                elif record is not None:
                    record.pinned, record.names = there.pinned, there.names
        finally:
            self._lock.release()
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

    def _note(self, record: Record, n_uses: int) -> None:
        """Have the database know later what may be lost when the process dies."""
        known = self._dirty.get(record.id)
        self._dirty[record.id] = (record, n_uses + (known[1] if known else 0))

    def _settle(self) -> None:
        if self._dirty:
            with self.transaction():
                self._writing()
                self._rows.change_facts(list(self._dirty.values()))
                self._is_settled = True

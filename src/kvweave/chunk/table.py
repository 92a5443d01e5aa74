"""The index: every chunk's record, names and holders in memory, with a durable journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypedDict, Unpack

from kvweave.chunk.batch import make_batch
from kvweave.chunk.changes import Changes, Transaction
from kvweave.chunk.identity import (
    DIGEST_BYTES,
    ChunkId,
    Kind,
    TierName,
    check_kind,
    check_n_bytes,
    check_name,
    check_namespace,
    check_tier,
    normal_name,
    token_bytes,
)
from kvweave.chunk.index import Index
from kvweave.chunk.integrity import check_journal, check_memory
from kvweave.chunk.journal import Journal, WriteBatch
from kvweave.chunk.record import Record
from kvweave.errors import (
    ChunkNotFound,
    ChunkPinned,
    CorruptChunk,
    EmptyChunk,
    InvalidArgument,
    InvalidName,
    NameTaken,
)

UNWRITTEN_USES = 512
"""How many chunks may have newer use statistics than the journal; writing 512 takes 20 to 40 ms."""


class Updates(TypedDict, total=False):
    """What ``Table.update`` can change."""

    tier: TierName
    n_bytes: int
    deps: tuple[ChunkId, ...]
    pinned: bool


class Table(Index):
    """Chunks by id, digest and name; who holds them; what each verb changed, durably.

    A chunk lives as long as it has a name, is pinned, is held by a context, or is the base of a
    living chunk. It is freed when a transaction that let go of it ends and nothing else keeps it;
    a new chunk nobody has bound or held yet stays. Then ``on_free(id)`` tells the owner of its KV.

    Each verb is a transaction: it happens, in memory and journal, or it raises and nothing changed.
    Verbs called inside ``transaction()`` happen together. Threads may share a Table.
    """

    on_free: Callable[[ChunkId], None] | None = None
    _ids_were_lost = False
    """Whether an id was given whose chunk never came to be, and the journal does not know."""

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is unwritten and close the journal; doing it twice does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._changes.marks:
                raise InvalidArgument("table", "close() inside a transaction")
            try:
                if self._unwritten_uses or self._ids_were_lost:
                    self.flush()
            finally:
                self._closed = True
                if self._journal is not None:
                    self._journal.close()

    # --- chunks ---

    def add(
        self,
        tokens: Sequence[int],
        *,
        digest: bytes,
        kind: Kind = "document",
        namespace: str = "",
        base: ChunkId | None = None,
        n_bytes: int = 0,
        tier: TierName = "none",
    ) -> tuple[ChunkId, bool]:
        """Return the id of these tokens and whether it is new; equal digest, equal chunk.

        Raises EmptyChunk, InvalidArgument, ChunkNotFound for the base, or CorruptChunk when the
        digest is known with other tokens.
        """
        data = token_bytes(tokens)
        if not data:
            raise EmptyChunk("the chunk")
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument("digest", f"{len(digest)} bytes, wanted {DIGEST_BYTES}")
        check_kind(kind)
        check_tier(tier)
        check_n_bytes(n_bytes)
        namespace = check_namespace(namespace)
        with self.transaction():
            known = self.find_digest(digest)
            if known is not None:
                self._check_same(known, data, namespace, base)
                return known.id, False
            if base is not None:
                self.get(base)
            now = time.time()
            id = ChunkId(self._state.next_id)
            record = Record(
                id, digest, len(data) // 4, kind, namespace, base, (), tier, n_bytes, False,
                now, now, 0,
            )  # fmt: skip
            self._state.next_id += 1
            self._changes.given += 1
            self._insert(record, data)
            return id, True

    def _insert(self, record: Record, data: bytes) -> None:
        changes, id = self._changes, record.id
        changes.set_item(self._state.records, id, record)
        changes.set_item(self._state.by_digest, record.digest, id)
        if record.base is not None:
            self._count_child(record.base, 1)
        changes.chunks.add(id)
        changes.set_item(changes.tokens, id, data)

    def _check_same(self, known: Record, data: bytes, namespace: str, base: ChunkId | None) -> None:
        if known.namespace != namespace:
            raise InvalidArgument("digest", "it was computed for another namespace")
        if known.base != base:
            raise InvalidArgument(
                "base", f"{base}, but #{known.id} of this digest has {known.base}"
            )
        if self._token_bytes(known) != data:
            where = "memory" if self._journal is None else str(self._journal.path)
            reason = f"#{known.id} has digest {known.digest.hex()} but other tokens"
            raise CorruptChunk(where, reason)

    def update(self, id: ChunkId, **changes: Unpack[Updates]) -> None:
        """Change tier, n_bytes, deps or pinned; raise ChunkNotFound or InvalidArgument.

        Unpinning never frees: a chunk that nothing else keeps stays until ``collect``.
        """
        unknown = changes.keys() - Updates.__annotations__.keys()
        if unknown:
            raise InvalidArgument(sorted(unknown)[0], "update() cannot change it")
        if "tier" in changes:
            check_tier(changes["tier"])
        if "deps" in changes:
            changes["deps"] = tuple(ChunkId(int(dep)) for dep in changes["deps"])
        if "pinned" in changes:
            changes["pinned"] = bool(changes["pinned"])
        check_n_bytes(changes.get("n_bytes", 0))
        with self.transaction():
            record = self.get(id)
            for name, value in changes.items():
                self._changes.set_field(record, name, value)
            self._changes.chunks.add(id)

    def touch(self, ids: Iterable[ChunkId], now: float | None = None) -> None:
        """Count one use of each; durable after ``flush``, ``close``, or a few thousand uses."""
        when = time.time() if now is None else now
        with self.transaction():
            for id in ids:
                record = self.get(id)
                self._changes.set_field(record, "last_used", when)
                self._changes.set_field(record, "n_uses", record.n_uses + 1)
                if self._journal is not None:
                    self._unwritten_uses.add(id)

    def flush(self) -> None:
        """Write the use statistics that are only in memory."""
        with self.transaction():
            self._changes.write_uses = True

    def sync(self) -> None:
        """Wait until all that was written would survive a power cut. Raises StoreError."""
        if self._journal is not None:
            self._journal.sync()

    # --- names ---

    def bind(self, name: str, id: ChunkId, *, namespace: str = "", replace: bool = False) -> None:
        """Let ``name`` stand for ``id``; raise NameTaken, InvalidName or ChunkNotFound.

        With ``replace`` the name lets go of what it stood for, which may be freed; raises
        ChunkPinned for the last name of a pinned chunk.
        """
        name = check_name(name)
        with self.transaction():
            record = self.get(id)
            if record.namespace != namespace:
                raise ChunkNotFound(f"#{id}")
            names = self._state.names.setdefault(namespace, {})
            old = names.get(name)
            if old == id:
                return
            if old is not None:
                if not replace:
                    raise NameTaken(name, old)
                if (before := self.get(old)).pinned and before.n_names == 1:
                    raise ChunkPinned(name, old)
                self.unbind(name, namespace)
            changes = self._changes
            changes.set_item(names, name, id)
            changes.on_undo(record.unlink, name)
            record.link(name)
            changes.names.add((namespace, name))

    def unbind(self, name: str, namespace: str = "") -> None:
        """Remove a name; its chunk is freed if nothing else keeps it. Raises ChunkNotFound."""
        with self.transaction():
            record = self.resolve(name, namespace)
            name = normal_name(name)
            if name.startswith("#"):
                raise InvalidName(name, "an id is not a name; it cannot be removed")
            changes = self._changes
            changes.del_item(self._state.names[namespace], name)
            changes.on_undo(record.link, name)
            record.unlink(name)
            changes.names.add((namespace, name))
            self._let_go(record.id)

    # --- contexts ---

    def hold(self, id: ChunkId, context: str) -> None:
        """Keep a chunk alive for ``context``, once more; in memory only. Raises ChunkNotFound."""
        with self.transaction():
            self.get(id)
            if id not in self._state.holders:
                self._changes.set_item(self._state.holders, id, {})
            holders = self._state.holders[id]
            self._changes.set_item(holders, context, holders.get(context, 0) + 1)

    def release(self, id: ChunkId, context: str) -> None:
        """Take back one ``hold``; the chunk is freed if nothing else keeps it."""
        with self.transaction():
            self.get(id)
            holders = self._state.holders.get(id, {})
            if context not in holders:
                raise InvalidArgument("context", f"{context!r} does not hold #{id}")
            if holders[context] > 1:
                self._changes.set_item(holders, context, holders[context] - 1)
                return
            self._changes.del_item(holders, context)
            if not holders:
                self._changes.del_item(self._state.holders, id)
            self._let_go(id)

    # --- freeing ---

    def collect(self, ids: Iterable[ChunkId] | None = None) -> list[ChunkId]:
        """Free the chunks nothing keeps, of ``ids`` or of all, and return their ids.

        These are new chunks never bound or held, and those only a context held when the process
        ended: call it when no put is under way, such as at start.
        """
        with self.transaction():
            before = len(self._changes.freed)
            for id in [record.id for record in self] if ids is None else ids:
                self._let_go(id)
            self._sweep()
            return self._changes.freed[before:]

    def _let_go(self, id: ChunkId) -> None:
        if id not in self._changes.loose:
            self._changes.set_item(self._changes.loose, id, None)

    def _sweep(self) -> None:
        """Free what was let go of and nothing keeps; bases follow the last chunk on them."""
        changes = self._changes
        while changes.loose:
            id = next(iter(changes.loose))
            changes.del_item(changes.loose, id)
            if id in self._state.records and not self.is_kept(id):
                self._free(self._state.records[id])

    def _free(self, record: Record) -> None:
        changes, id = self._changes, record.id
        changes.del_item(self._state.records, id)
        changes.del_item(self._state.by_digest, record.digest)
        changes.chunks.add(id)
        changes.on_undo(changes.freed.pop)
        changes.freed.append(id)
        if record.base is not None:
            self._count_child(record.base, -1)
            self._let_go(record.base)

    def _count_child(self, base: ChunkId, more: int) -> None:
        n = self._state.n_children.get(base, 0) + more
        if n:
            self._changes.set_item(self._state.n_children, base, n)
        else:
            self._changes.del_item(self._state.n_children, base)

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
        self._changes.marks.append(self._changes.mark())

    def _end(self, failed: bool) -> None:
        changes = self._changes
        outermost = len(changes.marks) == 1
        done = False
        try:
            if outermost and not failed:
                if changes.loose:
                    self._sweep()
                self._commit()
            done = not failed
        finally:
            mark = changes.marks.pop()
            if not done:
                changes.undo(mark)
                if outermost and changes.given:
                    self._ids_were_lost = True
            if outermost:
                self._changes = Changes()
            self._lock.release()
        if outermost and done:
            self._tell(changes.freed)

    def _commit(self) -> None:
        """Write what changed; then, nothing can fail any more, forget freed chunks' tokens."""
        changes = self._changes
        if self._journal is not None:
            uses: Collection[ChunkId] = ()
            if changes.write_uses or len(self._unwritten_uses) >= UNWRITTEN_USES:
                uses = self._unwritten_uses
            if changes.chunks or changes.names or uses or self._ids_were_lost:
                self._write(self._journal, make_batch(self._state, changes, uses))
        else:
            for id, data in changes.tokens.items():
                if id in self._state.records:
                    self._cache(id, data)
        for id in changes.freed:
            self._n_cached -= len(self._tokens.pop(id, b"")) // 4
            self._unwritten_uses.discard(id)

    def _write(self, journal: Journal, batch: WriteBatch) -> None:
        state = self._state
        # The highest row may be gone, so the journal must say itself which ids were given.
        may_be_gone = batch.drop_chunks or self._ids_were_lost
        if may_be_gone and state.written_next_id < state.next_id:
            batch.next_id = [(state.next_id,)]
        journal.write(batch)
        if batch.next_id:
            state.written_next_id = state.next_id
            self._ids_were_lost = False
        if batch.uses:
            self._unwritten_uses.clear()

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

    def check_integrity(self) -> None:
        """Raise AssertionError with a sentence when anything contradicts anything."""
        with self._lock:
            check_memory(self._state)
            if self._journal is not None and not self._changes.marks:
                check_journal(self._state, self._journal, self._unwritten_uses)

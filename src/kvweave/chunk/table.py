"""The index: the verbs that change it, each of them whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypedDict, Unpack

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
from kvweave.chunk.record import Record
from kvweave.errors import (
    ChunkNotFound,
    ChunkPinned,
    CorruptChunk,
    EmptyChunk,
    InvalidArgument,
    InvalidName,
    NameTaken,
    StoreError,
)

ATTEMPTS = 5
"""How often a chunk is looked for that other engines add and remove meanwhile."""


class Updates(TypedDict, total=False):
    """What ``Table.update`` can change."""

    tier: TierName
    n_bytes: int
    deps: tuple[ChunkId, ...]


class Table(Index):
    """Chunks by id, digest and name; who holds them; what each verb changed, durably.

    A chunk lives as long as it has a name, is pinned, is held by a context, or is the base of a
    living chunk. It is freed when a transaction that let go of it ends and nothing else keeps it;
    a new chunk nobody has bound or held yet stays. Then ``on_free(id)`` tells the owner of its KV,
    as of a chunk that was new in a transaction that failed.

    Each verb is a transaction: it happens, in memory and database, or it raises and nothing changed.
    Verbs called inside ``transaction()`` happen together. Threads may share a Table.
    """

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is unwritten and close the index; doing it twice does nothing."""
        self._tx.close()

    @property
    def on_free(self) -> Callable[[ChunkId], None] | None:
        """What is told the id of every chunk that was freed."""
        return self._tx.on_free

    @on_free.setter
    def on_free(self, call: Callable[[ChunkId], None] | None) -> None:
        self._tx.on_free = call

    def transaction(self) -> AbstractContextManager[None]:
        """Make all changes inside happen together, or none when an exception leaves it.

        An inner transaction can fail alone; freeing and writing wait for the outermost to end. Ids
        given inside are final only then: a process killed before may give them again.
        """
        return self._tx.transaction()

    @property
    def is_changing(self) -> bool:
        """Whether a transaction of this thread is open."""
        with self._tx.lock:
            return bool(self._tx.levels)

    def if_undone(self, call: Callable[[], object]) -> None:
        """Have ``call`` made once the transaction that is open is taken back, by itself or with one
        around it. What was noted last comes first, and sees the index as it was before all of it; a
        call that has to change something returns what does, for when all others are made."""
        self._tx.if_undone(call)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Make a call when the outermost transaction has ended in whatever way; now, where none is open."""
        self._tx.afterwards(call)

    # --- chunks ---

    def claim(self, model: str) -> None:
        """Say which model's tokens these are from now on. Raises ModelMismatch where an engine of
        another one has the index open."""
        self._rows.claim(model)

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
            if base is not None:
                self.get(base)
            now = time.time()
            record = Record(
                ChunkId(0), digest, len(data) // 4, kind, namespace, base, (), tier, n_bytes, False,
                now, now, 0,
            )  # fmt: skip
            for _ in range(ATTEMPTS):
                known = self.find_digest(digest)
                if known is not None and self._tx.share(known.id):
                    self._check_same(known, data, namespace, base)
                    self._tx.stays(known.id)
                    return known.id, False
                self._tx.writing()
                id = self._rows.add(record, data)
                if id is not None:
                    self._tx.levels[-1].records[id] = (record, None)
                    self._tx.remember(record)
                    return id, True
            raise StoreError(
                "other engines add and remove this chunk all the time", hint="try again"
            )

    def _check_same(self, known: Record, data: bytes, namespace: str, base: ChunkId | None) -> None:
        if known.namespace != namespace:
            raise InvalidArgument("digest", "it was computed for another namespace")
        if known.base != base:
            raise InvalidArgument(
                "base", f"{base}, but #{known.id} of this digest has {known.base}"
            )
        if self._tx.token_bytes(known) != data:
            reason = f"#{known.id} has digest {known.digest.hex()} but other tokens"
            raise CorruptChunk(self._rows.where, reason)

    def update(self, id: ChunkId, **changes: Unpack[Updates]) -> None:
        """Change tier, n_bytes or deps; raise ChunkNotFound or InvalidArgument."""
        unknown = changes.keys() - Updates.__annotations__.keys()
        if unknown:
            raise InvalidArgument(sorted(unknown)[0], "update() cannot change it")
        if "tier" in changes:
            check_tier(changes["tier"])
        if "deps" in changes:
            changes["deps"] = tuple(ChunkId(int(dep)) for dep in changes["deps"])
        check_n_bytes(changes.get("n_bytes", 0))
        with self.transaction():
            record = self.get(id)
            self._tx.levels[-1].keep(record)
            for name, value in changes.items():
                setattr(record, name, value)
            self._tx.note(record, 0)

    def pin(self, ids: Iterable[ChunkId], pinned: bool = True) -> None:
        """Keep chunks alive, or take that back: all of them, or none. Raises ChunkNotFound.

        Unpinning never frees: a chunk that nothing else keeps stays until ``collect``.
        """
        with self.transaction():
            for id in ids:
                record = self._tx.to_change(id)
                record.pinned = pinned
                self._rows.change(record)

    def happened(self, id: ChunkId, **facts: Unpack[Updates]) -> None:
        """As `update`, of what has happened to KV: it stays so where a transaction around it fails."""
        self.update(id, **facts)
        self._tx.stands(self.get(id))

    def touch(self, ids: Iterable[ChunkId], now: float | None = None) -> None:
        """Count one use of each; durable after ``flush``, ``close``, or a few thousand uses."""
        when = time.time() if now is None else now
        with self.transaction():
            for id in ids:
                record = self.get(id)
                self._tx.levels[-1].keep(record)
                record.last_used, record.n_uses = when, record.n_uses + 1
                self._tx.note(record, 1)

    def flush(self) -> None:
        """Write tiers, sizes, deps and uses that are only in memory."""
        with self.transaction():
            self._tx.settle()

    def sync(self) -> None:
        """Wait until all that was written would survive a power cut. Raises StoreError."""
        self.flush()
        self._rows.sync()

    # --- names ---

    def bind(self, name: str, id: ChunkId, *, namespace: str = "", replace: bool = False) -> None:
        """Let ``name`` stand for ``id``; raise NameTaken, InvalidName or ChunkNotFound.

        With ``replace`` the name lets go of what it stood for, which may be freed; raises
        ChunkPinned for the last name of a pinned chunk.
        """
        self.bind_all([(name, id)], namespace, replace)

    def bind_all(
        self, items: Iterable[tuple[str, ChunkId]], namespace: str = "", replace: bool = False
    ) -> None:
        """As `bind`, of several: all of them or none."""
        with self.transaction():
            for name, id in items:
                self._bind(check_name(name), id, namespace, replace)

    def _bind(self, name: str, id: ChunkId, namespace: str, replace: bool) -> None:
        record = self._tx.to_change(id)
        if record.namespace != namespace:
            raise ChunkNotFound(f"#{id}")
        for _ in range(ATTEMPTS):
            old = self.lookup(name, namespace)
            if old is record:
                return
            if old is not None:
                if not replace:
                    raise NameTaken(name, old.id)
                if self._tx.fresh(old) and old.pinned and old.names == (name,):
                    raise ChunkPinned(name, old.id)
                self._take(name, old)
            self._tx.writing()
            if self._rows.bind(namespace, name, id):
                self._tx.levels[-1].keep(record)
                record.names = tuple(sorted((*record.names, name)))
                self._tx.stays(id)
                return
        raise StoreError(f"other engines bind {name!r} all the time", hint="try again")

    def unbind(self, name: str, namespace: str = "") -> None:
        """Remove a name; its chunk is freed if nothing else keeps it. Raises ChunkNotFound."""
        with self.transaction():
            record = self.resolve(name, namespace)
            name = normal_name(name)
            if name.startswith("#"):
                raise InvalidName(name, "an id is not a name; it cannot be removed")
            self.unbind_all([(name, record.id)])

    def unbind_all(self, items: Iterable[tuple[str, ChunkId]]) -> None:
        """Remove names of chunks: all of them, or none. Raises ChunkNotFound."""
        with self.transaction():
            for name, id in items:
                if not self._take(name, self._tx.to_change(id)):
                    raise ChunkNotFound(name)

    def _take(self, name: str, record: Record) -> bool:
        """Take a name from its chunk; False when another engine did."""
        self._tx.writing()
        if name not in record.names or not self._rows.unbind(record.namespace, name):
            return False
        self._tx.levels[-1].keep(record)
        record.names = tuple(each for each in record.names if each != name)
        self._tx.let_go(record.id)
        return True

    # --- contexts ---

    def hold(self, id: ChunkId, context: str) -> None:
        """Keep a chunk alive for ``context``, once more, while this engine lives."""
        with self.transaction():
            self.get(id)
            self._tx.levels[-1].keep_holders(self._tx.holders, id)
            holders = self._tx.holders.setdefault(id, {})
            holders[context] = holders.get(context, 0) + 1
            self._hold(id, context, holders[context])

    def release(self, id: ChunkId, context: str) -> None:
        """Take back one ``hold``; the chunk is freed if nothing else keeps it, or is gone already: others
        removed it while this engine was taken for dead, or a commit came too late."""
        with self.transaction():
            holders = self._tx.holders.get(id, {})
            if context not in holders:
                self.get(id)
                raise InvalidArgument("context", f"{context!r} does not hold #{id}")
            self._tx.levels[-1].keep_holders(self._tx.holders, id)
            holders[context] -= 1
            n = holders[context]
            if not n:
                del holders[context]
            if not holders:
                del self._tx.holders[id]
            if self._tx.find(id) is None:
                return
            self._hold(id, context, n)
            if not n:
                self._tx.let_go(id)

    def _hold(self, id: ChunkId, context: str, n: int) -> None:
        if self._rows.is_shared and n <= 1:
            self._tx.writing()
            self._rows.hold(id, context, n)

    # --- freeing ---

    def free_slowly(self, most: int) -> None:
        """Have a transaction look at ``most`` chunks that were let go of, to free them: the others are
        for the next ones, for `free_more`, or for whoever opens the index next."""
        self._tx.at_once = most

    @property
    def n_behind(self) -> int:
        """How many chunks are for the next ones."""
        return len(self._tx.behind)

    def free_more(self) -> int:
        """Free some of these; return how many are left."""
        with self.transaction():
            pass  # it does so at its end
        return self.n_behind

    def collect(self, ids: Iterable[ChunkId] | None = None) -> list[ChunkId]:
        """Free the chunks nothing keeps, of ``ids`` or of all, and return their ids.

        These are new chunks never bound or held, and those only a context held when the process
        ended: call it when no put is under way, such as at start.
        """
        with self.transaction():
            before = len(self._tx.freed)
            for id in self._rows.unkept() if ids is None else ids:
                self._tx.let_go(id)
            self._tx.sweep()
            return self._tx.freed[before:]

    def check_integrity(self) -> None:
        """Raise AssertionError with a sentence when anything contradicts anything, CorruptChunk when
        the database does."""
        self._rows.check()
        self._tx.check_memory()

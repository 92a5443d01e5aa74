"""The index, as far as it can be read: records by id, name and digest, and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import NO_TOKEN, ChunkId, normal_name
from kvweave.chunk.names import RECENT, suggest
from kvweave.chunk.record import Record
from kvweave.chunk.rows import ChunkFacts, GroupSize, IndexRows, size_of
from kvweave.chunk.sqlite import SqliteRows
from kvweave.chunk.transactions import Transactions
from kvweave.errors import ChunkNotFound, InvalidArgument, InvalidName

_REF = re.compile(r"#[0-9]{1,18}")


class Index:
    """What a Table can tell. Threads may share it: each answer is consistent in itself."""

    def __init__(self, path: str | Path | None = None, *, busy_timeout: float = 5.0) -> None:
        """Open or make the index: a file, or the address of a PostgreSQL database, which other
        engines may have open too; None keeps everything in memory only.

        Raises CorruptChunk or FormatTooNew for what it cannot read, InvalidArgument when another
        process has the file open, StoreError when the server does not answer.
        """
        self._rows = _rows(path, busy_timeout)
        self._tx = Transactions(self._rows)
        self.called: dict[str, str] = {}
        """Names of contexts that were renamed, by what they hold chunks as."""
        self.uuid = self._rows.uuid
        """Says whose index it is, 32 hex digits; another one each time when it is in memory only."""
        self.was = self._rows.was
        """The uuids of those that it is a copy of."""

    def __len__(self) -> int:
        return self._rows.count()

    def __iter__(self) -> Iterator[Record]:
        """Yield each record, by id. What is changed meanwhile is seen or not; takes a pass over all."""
        for record in self._rows.chunks():
            yield self._tx.same(record)

    def get(self, id: ChunkId) -> Record:
        """Return the record of ``id``, of any namespace; raise ChunkNotFound."""
        return self._tx.get(id)

    def resolve(self, ref: str, namespace: str = "") -> Record:
        """Return the record ``#17`` or a name stands for; raise ChunkNotFound."""
        record = self.lookup(ref, namespace)
        if record is None:
            raise ChunkNotFound(ref, self.similar_names(ref, namespace))
        return record

    def lookup(self, ref: str, namespace: str = "") -> Record | None:
        """Return the record ``#17`` or a name stands for, or None; cheap when there is none."""
        self._tx.catch_up()
        if ref.startswith("#"):
            if not _REF.fullmatch(ref):
                raise InvalidName(ref, "after '#' stands a number")
            record = self._tx.find(ChunkId(int(ref[1:])))
            return record if record is not None and record.namespace == namespace else None
        name = normal_name(ref)
        id = self._rows.named(namespace, [name]).get(name)
        return None if id is None else self._tx.find(id)

    def lookup_all(self, names: Sequence[str], namespace: str = "") -> list[tuple[str, Record]]:
        """Return those of ``names`` (as `names` has them) that there are, with their records."""
        self._tx.catch_up()
        ids = self._rows.named(namespace, names)
        records = self._tx.find_all(ids.values())
        return [(name, records[ids[name]]) for name in names if ids.get(name) in records]

    def find_digest(self, digest: bytes) -> Record | None:
        """Return the record with this digest, or None."""
        id = self._rows.by_digest(digest)
        return None if id is None else self._tx.find(id)

    def known(self, digests: Iterable[bytes]) -> dict[bytes, ChunkId]:
        """Return the ids of those digests that there are; 3 us each, 30 where pages are not in memory."""
        return self._rows.known(list(digests))

    def facts(self) -> Iterator[ChunkFacts]:
        """Yield id, digest, bytes and tier of each chunk, by id; about 1 us each."""
        self._tx.settle()
        return self._rows.facts()

    def digests(self) -> Iterator[bytes]:
        """Yield the digest of each chunk there is now, those of other engines too; see also `marks`."""
        return self._rows.digests()

    def names(self, namespace: str = "", prefix: str = "") -> list[str]:
        """Return the names of one namespace, sorted, or those that begin with ``prefix``."""
        return self._rows.names(namespace, prefix)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a chunk."""
        return self._rows.namespaces()

    def similar_names(self, ref: str, namespace: str = "") -> tuple[str, ...]:
        """Return a few names that ``ref`` may have meant."""
        if ref.startswith("#"):
            return ()

        def among(names: Sequence[str]) -> list[str]:
            return list(self._rows.named(namespace, names))

        return suggest(ref, among, self._rows.newest_names(namespace, RECENT))

    def names_of(self, id: ChunkId) -> tuple[str, ...]:
        """Return the names of a chunk, sorted; raise ChunkNotFound."""
        return self.get(id).names

    def contexts_of(self, id: ChunkId) -> tuple[str, ...]:
        """Return the contexts that hold a chunk, of all engines; raise ChunkNotFound."""
        self.get(id)
        return self._contexts_of(id, self._rows.contexts([id]))

    def _contexts_of(self, id: ChunkId, others: Mapping[ChunkId, list[str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._tx.holders.get(id, ()), *others.get(id, ())]))

    def refs(self, records: Iterable[Record]) -> dict[ChunkId, int]:
        """Return how many names, contexts of all engines and chunks behind it each chunk has."""
        known = {record.id: record for record in records}
        others, children = self._rows.contexts(list(known)), self._rows.children(list(known))
        return {
            id: record.n_names + len(self._contexts_of(id, others)) + children.get(id, 0)
            for id, record in known.items()
        }

    def n_children(self, id: ChunkId) -> int:
        """Return how many chunks have this one as base."""
        return self._rows.children([id]).get(id, 0)

    def sizes(self, namespace: str = "") -> list[GroupSize]:
        """Return what the chunks of a namespace take, by kind and tier, a group once or more."""
        newer = self._tx.newer()
        found = [size_of(x) for x in newer.values() if x.namespace == namespace]
        return found + self._rows.sizes(namespace, list(newer))

    def is_virtual(self, id: ChunkId) -> bool:
        """Tell whether a chunk's rows were given, not made from tokens. Raises ChunkNotFound."""
        return int(self.tokens(id)[0]) == NO_TOKEN

    def is_kept(self, id: ChunkId) -> bool:
        """Return whether a name, a pin, a context or a living chunk keeps this one alive."""
        return self._tx.is_kept(id)

    def tokens(self, id: ChunkId) -> NDArray[np.uint32]:
        """Return the token ids of a chunk, not writable; raise ChunkNotFound or CorruptChunk."""
        return np.frombuffer(self._tx.token_bytes(self.get(id)), dtype="<u4")


def is_shared(path: str | Path | None) -> bool:
    """Tell whether this is the address of a database, not a file."""
    return isinstance(path, str) and path.startswith(("postgresql://", "postgres://"))


def _rows(path: str | Path | None, busy_timeout: float) -> IndexRows:
    if is_shared(path):
        try:
            from kvweave.chunk.postgres import PostgresRows
        except ImportError as error:
            how = "pip install 'kvweave[postgres]'"
            raise InvalidArgument("index", f"PostgreSQL needs psycopg: {how}") from error
        return PostgresRows(str(path), lock_timeout=busy_timeout)
    return SqliteRows(None if path is None else Path(path), busy_timeout=busy_timeout)

"""The in-memory index, as far as it can be read: records by id, name and digest, and tokens."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import RLock
from typing import Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.changes import Changes
from kvweave.chunk.identity import NO_TOKEN, ChunkId, normal_name
from kvweave.chunk.journal import Journal
from kvweave.chunk.names import suggest
from kvweave.chunk.record import Record
from kvweave.chunk.state import IndexState, load
from kvweave.errors import ChunkNotFound, CorruptChunk, InvalidArgument, InvalidName

CACHED_TOKENS = 1 << 20
"""Token ids kept in memory after reading, 4 bytes each."""

_REF = re.compile(r"#[0-9]{1,18}")


class Index:
    """What a Table can tell. Threads may share it: each answer is consistent in itself."""

    def __init__(self, path: str | Path | None = None, *, busy_timeout: float = 5.0) -> None:
        """Open or make the journal file ``path``; None keeps everything in memory only.

        Raises CorruptChunk or FormatTooNew for a file it cannot read, InvalidArgument when another
        process has it open.
        """
        self._lock = RLock()
        self._changes = Changes()
        self._tokens: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._n_cached = 0
        self._unwritten_uses: set[ChunkId] = set()
        self._closed = False
        self._journal = None if path is None else Journal(Path(path), busy_timeout=busy_timeout)
        self.uuid = uuid4().hex if self._journal is None else self._journal.uuid
        """Says whose index it is, 32 hex digits; another one each time when it is in memory only."""
        try:
            self._state = IndexState() if self._journal is None else load(self._journal)
        except BaseException:
            assert self._journal is not None  # an empty state cannot fail
            self._journal.close()
            raise

    def __len__(self) -> int:
        return len(self._state.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._state.records.values()))

    def get(self, id: ChunkId) -> Record:
        """Return the record of ``id``, of any namespace; raise ChunkNotFound."""
        record = self._state.records.get(id)
        if record is None:
            raise ChunkNotFound(f"#{id}")
        return record

    def resolve(self, ref: str, namespace: str = "") -> Record:
        """Return the record ``#17`` or a name stands for; raise ChunkNotFound."""
        record = self.lookup(ref, namespace)
        if record is None:
            raise ChunkNotFound(ref, self.similar_names(ref, namespace))
        return record

    def lookup(self, ref: str, namespace: str = "") -> Record | None:
        """Return the record ``#17`` or a name stands for, or None; cheap when there is none."""
        if ref.startswith("#"):
            if not _REF.fullmatch(ref):
                raise InvalidName(ref, "after '#' stands a number")
            record = self._state.records.get(ChunkId(int(ref[1:])))
            return record if record is not None and record.namespace == namespace else None
        id = self._state.names.get(namespace, {}).get(normal_name(ref))
        return None if id is None else self._state.records[id]

    def find_digest(self, digest: bytes) -> Record | None:
        """Return the record with this digest, or None."""
        id = self._state.by_digest.get(digest)
        return None if id is None else self._state.records[id]

    def names(self, namespace: str = "") -> list[str]:
        """Return the names of one namespace, in no order."""
        return list(self._state.names.get(namespace, ()))

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a chunk."""
        return sorted({record.namespace for record in self})

    def similar_names(self, ref: str, namespace: str = "") -> tuple[str, ...]:
        """Return a few names that ``ref`` may have meant."""
        if ref.startswith("#"):
            return ()
        return suggest(ref, self._state.names.get(namespace, {}))

    def names_of(self, id: ChunkId) -> tuple[str, ...]:
        """Return the names of a chunk, sorted; raise ChunkNotFound."""
        return self.get(id).names

    def contexts_of(self, id: ChunkId) -> tuple[str, ...]:
        """Return the contexts that hold a chunk; raise ChunkNotFound."""
        self.get(id)
        return tuple(self._state.holders.get(id, ()))

    def n_children(self, id: ChunkId) -> int:
        """Return how many chunks have this one as base."""
        return self._state.n_children.get(id, 0)

    def n_bytes_by(self, key: Literal["tier", "kind", "namespace"]) -> dict[str, int]:
        """Return the bytes of KV for each tier, kind or namespace; takes one pass over all."""
        if key not in ("tier", "kind", "namespace"):
            raise InvalidArgument("key", f"{key!r} is none of tier, kind, namespace")
        totals: dict[str, int] = {}
        for record in self:
            group = getattr(record, key)
            totals[group] = totals.get(group, 0) + record.n_bytes
        return totals

    def is_virtual(self, id: ChunkId) -> bool:
        """Tell whether a chunk's rows were given, not made from tokens. Raises ChunkNotFound."""
        return int(self.tokens(id)[0]) == NO_TOKEN

    def tokens(self, id: ChunkId) -> NDArray[np.uint32]:
        """Return the token ids of a chunk, not writable; raise ChunkNotFound or CorruptChunk."""
        return np.frombuffer(self._token_bytes(self.get(id)), dtype="<u4")

    def _token_bytes(self, record: Record) -> bytes:
        id = record.id
        with self._lock:
            data = self._tokens.get(id) or self._changes.tokens.get(id)
            if data is not None:
                if self._journal is not None and id in self._tokens:
                    self._tokens.move_to_end(id)
                return data
            self._check_open()
            assert self._journal is not None  # without one, all tokens are in _tokens
            data = self._journal.tokens(id)
            if len(data) != 4 * record.n_tokens:
                where = str(self._journal.path)
                raise CorruptChunk(where, f"#{id} has {len(data)} bytes of tokens")
            self._cache(id, data)
            return data

    def _cache(self, id: ChunkId, data: bytes) -> None:
        self._tokens[id] = data
        self._n_cached += len(data) // 4
        if self._journal is not None:
            while self._n_cached > CACHED_TOKENS and len(self._tokens) > 1:
                self._n_cached -= len(self._tokens.popitem(last=False)[1]) // 4

    def is_kept(self, id: ChunkId) -> bool:
        """Return whether a name, a pin, a context or a living chunk keeps this one alive."""
        record = self.get(id)
        return bool(
            record.linked
            or record.pinned
            or id in self._state.holders
            or self._state.n_children.get(id)
        )

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("table", "it is closed")

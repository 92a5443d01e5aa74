"""One chunk as the index knows it, and its row in a database."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from sys import intern
from typing import TypeAlias

from kvweave.chunk.identity import DIGEST_BYTES, KINDS, TIERS, ChunkId, Kind, TierName

Row: TypeAlias = tuple[
    ChunkId, bytes, int, int, str, ChunkId | None, bytes | None, int, int, int, float, float, int
]
"""The columns of table ``chunks``; kind and tier as their number in KINDS and TIERS."""
Fields: TypeAlias = tuple[tuple[str, ...], TierName, int, tuple[ChunkId, ...], bool, float, int]

KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
TIER_CODE = {tier: code for code, tier in enumerate(TIERS)}


@dataclass(slots=True, weakref_slot=True, eq=False)
class Record:
    """What the index knows of a chunk. Read it; only a Table changes it.

    While somebody has it, the table gives the same one for its id, and keeps it up to date.
    """

    id: ChunkId
    digest: bytes
    n_tokens: int
    kind: Kind
    namespace: str
    base: ChunkId | None
    """The chunk its canonical KV was computed after."""
    deps: tuple[ChunkId, ...]
    """The chunks its in-context KV was computed after; () if there is only canonical KV."""
    tier: TierName
    n_bytes: int
    """Bytes of KV in that tier."""
    pinned: bool
    created: float
    """Seconds since 1970, as ``last_used``."""
    last_used: float
    n_uses: int
    names: tuple[str, ...] = ()
    """Its names, sorted."""

    @property
    def linked(self) -> bool:
        """Whether it has a name."""
        return bool(self.names)

    @property
    def n_names(self) -> int:
        return len(self.names)

    def fields(self) -> Fields:
        """Return what may change of it."""
        return (
            self.names, self.tier, self.n_bytes, self.deps, self.pinned, self.last_used, self.n_uses,
        )  # fmt: skip

    def set_fields(self, fields: Fields) -> None:
        """Change it to what ``fields`` returned."""
        (
            self.names, self.tier, self.n_bytes, self.deps, self.pinned, self.last_used, self.n_uses,
        ) = fields  # fmt: skip


def to_row(record: Record) -> Row:
    """Return the record's row."""
    deps = record.deps
    return (
        record.id,
        record.digest,
        record.n_tokens,
        KIND_CODE[record.kind],
        record.namespace,
        record.base,
        struct.pack(f"<{len(deps)}q", *deps) if deps else None,
        TIER_CODE[record.tier],
        record.n_bytes,
        int(record.pinned),
        record.created,
        record.last_used,
        record.n_uses,
    )


def from_row(row: Row, names: tuple[str, ...] = ()) -> Record:
    """Return the row's record; raise an error of Python's when it cannot be one."""
    (
        id, digest, n_tokens, kind, namespace, base, deps, tier, n_bytes, pinned, created,
        last_used, n_uses,
    ) = row  # fmt: skip
    if len(digest) != DIGEST_BYTES or n_tokens < 1 or n_bytes < 0 or kind < 0 or tier < 0:
        raise ValueError(f"#{id} has a column out of range")
    return Record(
        id,
        digest,
        n_tokens,
        KINDS[kind],
        intern(namespace),
        base,
        () if deps is None else struct.unpack(f"<{len(deps) // 8}q", deps),
        TIERS[tier],
        n_bytes,
        pinned == 1,
        created,
        last_used,
        n_uses,
        names,
    )

"""One chunk as the index knows it, and its row in the journal."""

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

KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
TIER_CODE = {tier: code for code, tier in enumerate(TIERS)}


@dataclass(slots=True)
class Record:
    """What the index knows of a chunk. Read it; only a Table changes it."""

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
    linked: str | dict[str, None] | None = None
    """Its names: nearly all chunks have one, and a container for it would cost 200 bytes each."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, sorted."""
        if self.linked is None:
            return ()
        return (self.linked,) if isinstance(self.linked, str) else tuple(sorted(self.linked))

    @property
    def n_names(self) -> int:
        if self.linked is None:
            return 0
        return 1 if isinstance(self.linked, str) else len(self.linked)

    def link(self, name: str) -> None:
        """Add a name it does not have."""
        if self.linked is None:
            self.linked = name
        elif isinstance(self.linked, str):
            self.linked = {self.linked: None, name: None}
        else:
            self.linked[name] = None

    def unlink(self, name: str) -> None:
        """Take a name away; raise KeyError when it does not have it."""
        if isinstance(self.linked, dict):
            del self.linked[name]
            if len(self.linked) == 1:
                self.linked = next(iter(self.linked))
        elif self.linked == name:
            self.linked = None
        else:
            raise KeyError(name)


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


def from_row(row: Row) -> Record:
    """Return the row's record, without names; raise an error of Python's when it cannot be one.

    Called a million times at load, so it trusts what ``Journal`` wrote and checks only ranges.
    """
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
    )

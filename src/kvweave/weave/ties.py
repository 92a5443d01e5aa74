"""What the shelf asks the index about chunks, and what it tells it."""

from __future__ import annotations

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.table import Table
from kvweave.keep.base import Facts
from kvweave.store.ram import Stretches
from kvweave.store.shelf import Shelf

SECONDS_A_TOKEN = 1e-3  # of prefill; policies compare costs only with each other


class Ties:
    """The index of one shelf."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def bind(self, shelf: Shelf) -> None:
        """Have ``shelf`` tell the index, and ask it for facts."""
        self.shelf = shelf
        shelf.facts, shelf.on_tier, shelf.on_in_context = self._facts, self._tier, self._deps

    def key(self, id: int) -> str:
        """Return what a chunk's record is called on tiers."""
        return self.table.get(ChunkId(id)).digest.hex()

    def is_pinned(self, id: int) -> bool:
        """Tell whether a chunk must stay."""
        return self.table.get(ChunkId(id)).pinned

    def mend(self) -> None:
        """After a restart: what was only in memory has no KV now; unnamed chunks are gone.

        Records of digests the index does not know were written by a put that never ended.
        """
        self.table.collect()
        known = {record.digest.hex(): int(record.id) for record in self.table}
        for level in self.shelf.mover.levels:
            if level.place != "remote":  # others may use that one too
                level.keep_only(known)
        self.shelf.mover.find(known.values())
        for record in list(self.table):
            tier = self.shelf.tier(record.id)
            if record.tier != tier or record.deps:
                size = record.n_bytes if record.tier == tier else 0
                self.table.update(record.id, tier=tier, n_bytes=size, deps=())  # type: ignore[arg-type]

    def _facts(self, id: int) -> Facts:
        record = self.table.get(ChunkId(id))
        return Facts(record.n_tokens * SECONDS_A_TOKEN, record.kind, self.shelf.session)

    def _tier(self, id: int, tier: str, size: int) -> None:
        self.table.update(ChunkId(id), tier=tier, n_bytes=size)  # type: ignore[arg-type]

    def _deps(self, id: int, seen: Stretches) -> None:
        deps = dict.fromkeys(ChunkId(dep) for dep, *_ in seen)
        self.table.update(ChunkId(id), deps=tuple(deps))

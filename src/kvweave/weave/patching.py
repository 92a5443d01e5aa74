"""Use and make patches: a chunk with the neighbours it once had gets the difference it had then.

Neighbours are everything before a chunk, the base included, by content and distance: literal text
that is written anew has another id, but the same digest. What a `forget` removed is in no such
list, so a patch made behind it does not fit any more.

Slices of a chunk get none: a patch is of whole chunks.

A patch is made from rows computed behind neighbours that were all `right`: exact, recomputed as a
whole, or patched themselves; behind patched ones it takes on their error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.table import Table
from kvweave.store.kv import KV
from kvweave.store.patches import Patch, PatchKey
from kvweave.store.shelf import Shelf
from kvweave.weave.parts import Placement, Truth, seen_from
from kvweave.weave.repair import Strategy


class Patcher:
    """The patches of one shelf, for the parts of contexts."""

    def __init__(self, shelf: Shelf, table: Table) -> None:
        self.shelf, self.table = shelf, table

    def patched(
        self,
        placed: Sequence[Placement],
        strategy: Strategy,
        loaded: dict[int, KV] | None = None,
    ) -> list[Placement]:
        """Mark the parts the strategy has patches for, and patch their KV in ``loaded``.

        Without ``loaded`` it only says what would be patched.
        """
        rank = strategy.rank
        done: list[Placement] = []
        for p in placed:
            if rank and self._fits(p) and (key := self._key(p, done, rank)) in self.shelf.patches:
                patch = self.shelf.patches.get(key) if loaded is not None else None
                if loaded is not None and patch is not None:
                    loaded[p.part.uid] = patch.applied(loaded[p.part.uid])
                p = replace(p, truth=Truth.PATCHED, seen=seen_from(done, p.position))
            done.append(p)
        return done

    def keep(
        self, p: Placement, before: Sequence[Placement], strategy: Strategy, found: KV
    ) -> None:
        """Store what the recomputed rows ``found`` differ by from a part's canonical KV, if these are
        all its rows, the strategy uses patches, and the canonical KV is still in memory."""
        rank = strategy.rank
        canonical = self.shelf.ram.get(int(p.part.id)) if rank and self._fits(p) else None
        whole = canonical is not None and found.n_tokens == canonical.n_tokens
        if canonical is not None and whole and not canonical.altered:
            patch = Patch.between(canonical, found, rank)
            self.shelf.put_patch(self._key(p, before, rank), patch)

    def _key(self, p: Placement, before: Sequence[Placement], rank: int) -> PatchKey:
        neighbours = tuple(
            (self.table.get(ChunkId(s.id)).digest, s.distance, s.start, s.n)
            for s in seen_from(before, p.position)
        )
        return int(p.part.id), neighbours, rank

    def _fits(self, p: Placement) -> bool:
        """Tell whether a part is a whole chunk placed from canonical KV that is not exact where it
        stands; survivors of an `evict` keep the rows they have."""
        approximate = p.source == "canonical" and not p.exact and not p.part.frozen
        return approximate and p.part.n == self.table.get(p.part.id).n_tokens

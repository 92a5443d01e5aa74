"""Where the KV of a part could come from: in-context KV that is exact here, else canonical KV.
And what of it is placed together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.table import Table
from kvweave.errors import ChunkLost, CorruptChunk
from kvweave.store.kv import KV
from kvweave.store.shelf import Shelf
from kvweave.weave.parts import Available, Part, Placement, Seen, Stretch, chunk_seen, slice_seen

SHORT = 1 << 18  # bytes of one layer; chunks below are placed together


def tokens_of(table: Table, part: Part) -> NDArray[np.uint32]:
    """Return the token ids of a part, not writable."""
    return table.tokens(part.id)[part.start : part.stop]


class Sources:
    """What the shelf has for a part that would stand behind ``seen``; the KV is a view.

    ``known`` are the uids that were woven in this context before. Without ``moves`` KV stands only
    where it was computed.
    """

    def __init__(self, shelf: Shelf, table: Table, moves: bool = True) -> None:
        self.shelf, self.table, self.moves = shelf, table, moves

    def peek(self, part: Part, seen: Seen, known: Collection[int]) -> Available:
        """Say what could be placed, without loading anything."""
        exact = self._exact(part, seen) is not None
        canonical = self._may_reuse(part, seen, known) and self.shelf.tier(part.id) != "none"
        lossy = canonical and (self.shelf.is_lossy(part.id) or self.shelf.thinned(part.id))
        canonical = canonical and not exact
        return Available(canonical, self._canonical_seen(part), exact, lossy, self.moves)

    def begin(self, parts: Iterable[Part], known: Collection[int]) -> None:
        """Begin to load all that may be reused, at once."""
        self.shelf.begin(int(part.id) for part in parts if not part.literal or part.uid in known)

    def load(
        self, part: Part, seen: Seen, known: Collection[int], loaded: dict[int, KV]
    ) -> Available:
        """Put what could be placed into ``loaded`` by uid. Raises CorruptChunk, OverBudget, and
        ChunkLost for rows that nothing can compute again."""
        if part.virtual:
            kv = loaded[part.uid] = self.rows_of(part)
            return Available(True, (), False, kv.altered)
        exact = self._exact(part, seen)
        if exact is not None:
            loaded[part.uid] = exact.rows(part.start, part.stop)
            return Available(False, (), True, moves=self.moves)
        may = self._may_reuse(part, seen, known)
        canonical = self.shelf.get(part.id, wait=False) if may else None
        if canonical is not None:
            wanted = self.table.get(part.id).n_tokens
            if canonical.n_tokens != wanted:
                raise CorruptChunk(part.name, f"{canonical.n_tokens} rows for {wanted} tokens")
            loaded[part.uid] = canonical.rows(part.start, part.stop)
        lossy = canonical is not None and canonical.altered
        seen_there = self._canonical_seen(part)
        return Available(canonical is not None, seen_there, False, lossy, self.moves)

    def rows_of(self, part: Part) -> KV:
        """Return the rows of a virtual part, which no token made. Raises ChunkLost."""
        kv = self.shelf.get(part.id)
        if kv is None:
            raise ChunkLost(part.name)
        return kv.rows(part.start, part.stop)

    def is_whole(self, part: Part) -> bool:
        """Tell whether a part is all of its chunk, so that its KV is the chunk's."""
        return part.n == self.table.get(part.id).n_tokens

    def _exact(self, part: Part, seen: Seen) -> KV | None:
        whole = chunk_seen(part, seen)
        return None if whole is None else self.shelf.in_context(part.id, whole)

    def _may_reuse(self, part: Part, seen: Seen, known: Collection[int]) -> bool:
        """New text is prefilled in its context, even if canonical KV of the same text is known:
        unless that is exact here, or the part was woven here before."""
        return not part.literal or part.uid in known or self._canonical_seen(part) == seen

    def _canonical_seen(self, part: Part) -> Seen:
        base = self.table.get(part.id).base
        if base is None:
            return slice_seen(part, ())
        n = self.table.get(base).n_tokens
        return slice_seen(part, (Stretch(int(base), -n, 0, n),))


def runs(
    moving: Sequence[Placement], own: dict[int, KV], loaded: dict[int, KV]
) -> list[tuple[int, list[KV]]]:
    """Return (slot, KV) to place; short neighbours go together, since each placing has a price."""
    found: list[tuple[int, list[KV]]] = []
    end, short = -1, False
    for p in moving:
        kv = (own if p.source == "own" else loaded)[p.part.uid].rows(0, p.ready)
        # a layer that still arrives is not asked; a thinned chunk stands alone
        was_short, short = short, kv.n_bytes < SHORT * len(kv.k) and kv.kept is None
        if short and was_short and end == p.slot:
            found[-1][1].append(kv)
        else:
            found.append((p.slot, [kv]))
        end = p.slot + p.ready
    return found

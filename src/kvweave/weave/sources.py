"""Where the KV of a part could come from: in-context KV that is exact here, else canonical KV.
And what of it is placed together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.table import Table
from kvweave.errors import ChunkLost, CorruptChunk
from kvweave.run.base import Backend
from kvweave.store.kv import KV
from kvweave.store.shelf import Shelf
from kvweave.weave.bases import OWN, Bases, Standing
from kvweave.weave.parts import Available, Part, Placement, Seen, Stretch, chunk_seen, slice_seen

if TYPE_CHECKING:
    from kvweave.weave.repair import Strategy
    from kvweave.weave.state import State

SHORT = 1 << 18  # bytes of one layer; chunks below are placed together


def tokens_of(table: Table, part: Part) -> NDArray[np.uint32]:
    """Return the token ids of a part, not writable."""
    return table.tokens(part.id)[part.start : part.stop]


@dataclass(frozen=True, slots=True)
class Sought:
    """What a context asks of KV: ``known`` are the uids that were woven in it before, ``stands``
    tells whose KV it is."""

    known: Collection[int] = ()
    stands: Standing = OWN


class Sources:
    """What the shelf has for a part that would stand behind ``seen``; the KV is a view.

    Without ``moves`` KV stands only where it was computed. `Sought` is what a context is like: it is
    asked for once a weave.
    """

    def __init__(self, shelf: Shelf, table: Table, backend: Backend) -> None:
        self.shelf, self.table, self.moves = shelf, table, bool(backend.can_move)
        self.bases = Bases(table, shelf.tier, backend.fingerprint)

    def asked(self, state: State, parts: Sequence[Part], strategy: Strategy) -> Sought:
        """Return what is asked of the KV of these parts in this context."""
        swaps = not state.keeps and not strategy.rank  # else KV is told from other KV by its chunk
        return Sought(state.known, self.bases.standing(parts, state.bases, swaps=swaps))

    def peek(self, part: Part, seen: Seen, asked: Sought) -> Available:
        """Say what could be placed, without loading anything."""
        exact, kv = self._exact(part, seen) is not None, asked.stands.kv(part)
        canonical = self._may_reuse(part, seen, asked) and self.shelf.tier(kv) != "none"
        lossy = canonical and (self.shelf.is_lossy(kv) or self.shelf.thinned(kv))
        canonical = canonical and not exact
        return self._found(part, asked, canonical, exact, lossy)

    def begin(self, parts: Iterable[Part], asked: Sought) -> None:
        """Begin to load all that may be reused, at once."""
        mine = (part for part in parts if asked.stands.may(part))
        self.shelf.begin(
            int(asked.stands.kv(p)) for p in mine if not p.literal or p.uid in asked.known
        )

    def load(self, part: Part, seen: Seen, asked: Sought, loaded: dict[int, KV]) -> Available:
        """Put what could be placed into ``loaded`` by uid. Raises CorruptChunk, OverBudget, and
        ChunkLost for rows that nothing can compute again."""
        if part.virtual:
            kv = loaded[part.uid] = self.rows_of(part)
            return Available(True, (), False, kv.altered)
        get = partial(self.shelf.get, wait=False)
        return self._loaded(part, seen, asked, loaded, get)

    def at_hand(self, part: Part, seen: Seen, asked: Sought, loaded: dict[int, KV]) -> Available:
        """As `load`, of what lies in memory; nobody counts it as used. Raises ChunkNotFound, CorruptChunk."""
        return self._loaded(part, seen, asked, loaded, self.shelf.at_hand)

    def _loaded(
        self,
        part: Part,
        seen: Seen,
        asked: Sought,
        loaded: dict[int, KV],
        get: Callable[[int], KV | None],
    ) -> Available:
        exact = self._exact(part, seen)
        if exact is not None:
            loaded[part.uid] = exact.rows(part.start, part.stop)
            return Available(False, (), True, moves=self.moves)
        may = self._may_reuse(part, seen, asked)
        canonical = get(asked.stands.kv(part)) if may else None
        if canonical is not None:
            wanted = self.table.get(part.id).n_tokens
            if canonical.n_tokens != wanted:
                raise CorruptChunk(part.name, f"{canonical.n_tokens} rows for {wanted} tokens")
            loaded[part.uid] = canonical.rows(part.start, part.stop)
        lossy = canonical is not None and canonical.altered
        return self._found(part, asked, canonical is not None, False, lossy)

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

    def _found(
        self, part: Part, asked: Sought, canonical: bool, exact: bool, lossy: bool
    ) -> Available:
        kv = asked.stands.kv(part)
        seen, lender = self._canonical_seen(part, kv), kv if canonical and kv != part.id else None
        return Available(canonical, seen, exact, lossy, self.moves, lender)

    def _may_reuse(self, part: Part, seen: Seen, asked: Sought) -> bool:
        """New text is prefilled in its context, even if canonical KV of the same text is known:
        unless that is exact here, or the part was woven here before."""
        if not asked.stands.may(part):
            return False
        new = part.literal and part.uid not in asked.known
        return not new or self._canonical_seen(part, asked.stands.kv(part)) == seen

    def _canonical_seen(self, part: Part, kv: ChunkId) -> Seen:
        base = self.table.get(kv).base
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

"""One work of a pass, and how its rows are cut for attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from kvweave.run.base import Ints, Mask, Work
from kvweave.run.layers import At
from kvweave.run.rows import KVRows

STEP, STEPS = 8, 64  # pieces of attention end after so many rows, at so many places at most
# what a piece costs beside rows times slots: its keys come from memory, and a kernel is called
ROWS_EACH, EACH = 4, 1 << 13
SHOWN = 64  # rows whose attention is shown at once: never rows x rows


@dataclass(slots=True)
class Piece:
    """Rows ``[first, last)`` of a part that attend together, to slots ``[begin, stop)``."""

    first: int
    last: int
    begin: int
    stop: int
    causal: bool  # row i sees the first i + 1 of these slots
    watched: bool  # somebody wants the weights
    bias: Tensor | None = None  # 0 and -inf [query, key], made once for all layers
    repeated: dict[int, Tensor] = field(default_factory=dict)  # the same for heads in one block
    skipped: int = 0  # weights of so many first rows are not asked for
    clear: int = 0  # so many slots in front are seen by all rows


class BatchPart:
    """One work of a batch."""

    def __init__(self, work: Work, start: int) -> None:
        assert isinstance(work.rows, KVRows), "rows of another backend"
        self.work, self.rows, self.n = work, work.rows, work.n
        self.span = slice(start, start + work.n)  # of the packed rows
        self.last = -1  # last layer that is written
        self.first, self.stop = int(work.slots[0]), int(work.slots[-1]) + 1
        self.contiguous = self.stop - self.first == work.n
        self.at: At
        self.begins: dict[Mask, Ints | None] = {}  # first slot each row sees; None: 0
        self.pieces: dict[tuple[Mask, int, int, bool], list[Piece]] = {}

    def see(self, mask: Mask) -> Ints | None:
        """Find the first slot that each row sees."""
        first = mask.first(self.work.positions)
        if first is not None:
            positions = self.rows.positions[: self.stop].copy()
            positions[self.work.slots] = self.work.positions
            first = np.searchsorted(positions, first)
        self.begins[mask] = first
        return first

    def keep_raw(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy unrotated rows [row, head, dim] to where the work wants them, if it does."""
        raw, span = self.work.raw, slice(self.work.at, self.work.at + self.n)
        if raw is not None:
            raw.k[layer][span], raw.v[layer][span] = keys, values

    def cut(self, mask: Mask, watched: tuple[int, int], joins: bool = False) -> list[Piece]:
        """Return the pieces of a layer with this mask and these rows watched; ``joins``: what is shown
        costs nothing, so a few rows before them may be in one piece with them."""
        key = (mask, *watched, joins)
        if key not in self.pieces:
            found = self._cut(mask, *watched)
            self.pieces[key] = list(_joined(found)) if joins else found
        return self.pieces[key]

    def _cut(self, mask: Mask, a: int, b: int) -> list[Piece]:
        begins = self.begins[mask]
        # a context from its first row on needs no bias, and the kernel leaves out the keys that
        # come later. Otherwise rows far apart see very different numbers of keys: cut them, so
        # that the early ones do not pay for keys they may not see
        plain = self.contiguous and self.first == 0 and begins is None
        forced = {0, self.n, *range(a, b, SHOWN), b} if a < b else {0, self.n}
        cuts = sorted(forced)
        if not plain:
            cuts = [*(at for i, j in pairwise(cuts) for at in self._cheapest(begins, i, j)), self.n]
        pieces = []
        for first, last in pairwise(cuts):
            begin = 0 if begins is None else int(begins[first])
            stop = int(self.work.slots[last - 1]) + 1
            watch = a <= first < b
            causal = plain and first == 0 and not watch and last > 1
            clear = int(self.work.slots[first]) + 1 if begins is None else 0
            pieces.append(Piece(first, last, begin, stop, causal, watch, clear=clear))
        return pieces

    def _cheapest(self, begins: Ints | None, first: int, last: int) -> list[int]:
        """Return where the pieces of rows ``[first, last)`` begin whose rows times slots are fewest."""
        size = last - first
        step = STEP * -(-size // (STEP * STEPS))
        ends = np.append(np.arange(first, last, step), last)
        if len(ends) == 2:
            return [first]
        stops = self.work.slots[ends[1:] - 1] + 1
        starts = np.zeros(len(ends) - 1, np.int64) if begins is None else begins[ends[:-1]]
        best, before = np.zeros(len(ends)), np.zeros(len(ends), np.int64)
        for j in range(1, len(ends)):
            rows = ends[j] - ends[:j] + ROWS_EACH
            cost = best[:j] + rows * (stops[j - 1] - starts[:j]) + EACH
            before[j] = cost.argmin()
            best[j] = cost[before[j]]
        found, at = [], len(ends) - 1
        while at:
            at = int(before[at])
            found.append(int(ends[at]))
        return found[::-1]


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Have the piece before one that is watched be part of it, where that is less than two kernels."""
    held: Piece | None = None
    for piece in pieces:
        if held is not None and piece.watched and not held.watched and not held.causal:
            n = held.last - held.first
            more = n * (piece.stop - held.stop)
            if piece.last - held.first <= SHOWN and more <= EACH:
                piece = replace(
                    piece, first=held.first, begin=held.begin, skipped=n, clear=held.clear
                )
                held = None
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held

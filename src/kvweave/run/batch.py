"""What one pass does: rows of several contexts, one behind the other.

Everything that decides is host integers, known before the pass; they go up in one copy. Nothing
comes down while the pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import NO_SLOTS, Ints, LayerInfo, Mask, Work
from kvweave.run.layers import At, span_of
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.rows import KVRows

PIECE, PIECES = 64, 8  # rows of the smallest piece of attention, and how many pieces at most


class StopPass(Exception):
    """Ends a pass early; the layers after the one asked for are not needed."""


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


class Part:
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
        self.pieces: dict[tuple[Mask, int, int], list[Piece]] = {}

    def see(self, mask: Mask) -> Ints | None:
        """Find the first slot that each row sees."""
        first = mask.first(self.work.positions)
        if first is not None:
            positions = self.rows.positions[: self.stop].copy()
            positions[self.work.slots] = self.work.positions
            first = np.searchsorted(positions, first)
        self.begins[mask] = first
        return first

    def cut(self, mask: Mask, watched: tuple[int, int]) -> list[Piece]:
        """Return the pieces of a layer with this mask and these rows watched."""
        key = (mask, *watched)
        if key not in self.pieces:
            self.pieces[key] = self._cut(mask, *watched)
        return self.pieces[key]

    def _cut(self, mask: Mask, a: int, b: int) -> list[Piece]:
        begins = self.begins[mask]
        # a context from its first row on needs no bias, and the kernel leaves out the keys that
        # come later. Otherwise rows far apart see very different numbers of keys: cut them, so
        # that the early ones do not pay for keys they may not see
        plain = self.contiguous and self.first == 0 and begins is None
        spread = not plain and self.stop - self.first > self.stop // 4
        size = max(PIECE, self.n // PIECES) if spread else self.n
        cuts = sorted({*range(0, self.n, size), self.n} | ({a, b} if a < b else set()))
        pieces = []
        for first, last in pairwise(cuts):
            begin = 0 if begins is None else int(begins[first])
            stop = int(self.work.slots[last - 1]) + 1
            watch = a <= first < b
            causal = plain and first == 0 and not watch and last > 1
            pieces.append(Piece(first, last, begin, stop, causal, watch))
        return pieces


class Batch:
    """Works of different contexts in one pass; making one changes no rows.

    ``ids`` [1, total] int64 and ``want`` [n] int64, packed rows whose logits are returned, are on
    the device.
    """

    def __init__(
        self, works: Sequence[Work], layers: Sequence[LayerInfo], device: torch.device
    ) -> None:
        self.infos, self.device = layers, device
        self.parts: list[Part] = []
        self.total = 0
        for work in works:
            self.parts.append(Part(work, self.total))
            self.total += work.n
        for part in self.parts:
            part.last = self._last(part.work)
        self.last = max(part.last for part in self.parts)
        self._bounded: dict[Mask, int] = {}  # row of the upload that holds where a mask begins
        for info in layers:
            if info.mask.first(works[0].positions) is not None:
                self._bounded.setdefault(info.mask, 3 + len(self._bounded))
        self._upload()
        self._angles: dict[int, Angles] = {}
        self._offsets: Tensor | None = None

    def _last(self, work: Work) -> int:
        """Return the layer behind whose keys and values nothing is wanted of a work."""
        if work.last is not None:
            return work.last
        n = len(self.infos)
        return n if len(work.want) or work.observer is not None else n - 1

    def _upload(self) -> None:
        """Bring all integers of the pass to the device at once."""
        wants = [part.work.want if part.work.last is None else NO_SLOTS for part in self.parts]
        self._wants = [len(want) for want in wants]
        n_want = sum(self._wants)
        sections = 3 + len(self._bounded)
        host = np.zeros(sections * self.total + n_want, np.int64)
        table = host[: sections * self.total].reshape(sections, self.total)
        packed = [want + part.span.start for want, part in zip(wants, self.parts, strict=True)]
        host[sections * self.total :] = np.concatenate(packed)
        for part in self.parts:
            work = part.work
            if not isinstance(work.tokens, Tensor):
                table[0, part.span] = work.tokens
            table[1, part.span] = work.positions
            table[2, part.span] = work.slots
            for mask in {info.mask for info in self.infos}:
                begins = part.see(mask)
                if begins is not None:
                    table[self._bounded[mask], part.span] = begins
        flat = torch.from_numpy(host)
        if self.device.type == "cuda":
            flat = flat.pin_memory()
        flat = flat.to(self.device, non_blocking=True)
        self.want = flat[sections * self.total :]
        self._table = flat[: sections * self.total].view(sections, self.total)
        self.ids, self._positions = self._table[0][None], self._table[1]
        for part in self.parts:
            work = part.work
            if isinstance(work.tokens, Tensor):
                self.ids[0, part.span] = work.tokens
            span = span_of(work.slots)
            part.at = At(work.slots, self._table[2, part.span] if span is None else span)

    def begin(self) -> None:
        """The pass begins: its rows are there, their positions known."""
        for part in self.parts:
            part.rows.expect(part.work.slots, part.work.positions)
            if part.work.observer is not None:
                part.work.observer.begin()

    def end(self) -> None:
        """The pass went through."""
        for part in self.parts:
            if part.work.observer is not None:
                part.work.observer.end()

    def split(self, logits: Tensor) -> list[Tensor]:
        """Return each work's own of the wanted ``logits`` [want, vocab]."""
        return list(torch.split(logits, self._wants))

    @property
    def offsets(self) -> Tensor:
        """What has to be added to a row's number in the pass to make its position, [total]."""
        if self._offsets is None:
            self._offsets = self._positions - torch.arange(self.total, device=self.device)
        return self._offsets

    def turned(self, layer: int, rows: Tensor) -> Tensor:
        """Return rows [total, head, dim] of a layer turned to their positions."""
        rotation: Rotation = self.infos[layer].rotation
        if id(rotation) not in self._angles:
            self._angles[id(rotation)] = rotation.angles(self._positions)
        return rotation.apply(rows, self._angles[id(rotation)])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's rows; ``keys`` and ``values`` are [total, head, dim], unrotated.

        Raises StopPass after the last layer that is wanted, LoadFailed.
        """
        turned = self.turned(layer, keys)
        for part in self.parts:
            if layer > part.last:
                continue
            part.rows.settle(layer)
            part.rows.write(layer, part.at, turned[part.span], values[part.span])
            raw, at = part.work.raw, part.work.at
            if raw is not None:
                raw.k[layer][at : at + part.n] = keys[part.span]
                raw.v[layer][at : at + part.n] = values[part.span]
        if layer == self.last:
            raise StopPass

    def bias(self, part: Part, piece: Piece, mask: Mask, dtype: torch.dtype) -> Tensor | None:
        """Return which slots a piece's rows see, as 0 and -inf [row, slot]; None when all do."""
        if piece.bias is None and piece.last - piece.first > 1:
            slots = torch.arange(piece.begin, piece.stop, device=self.device)
            piece.bias = self.bias_of(slots, part, piece, mask, dtype)
        return piece.bias

    def bias_of(
        self, slots: Tensor, part: Part, piece: Piece, mask: Mask, dtype: torch.dtype
    ) -> Tensor:
        """Return which of ``slots`` a piece's rows see, as 0 and -inf [row, slot]."""
        rows = slice(part.span.start + piece.first, part.span.start + piece.last)
        unseen = slots > self._table[2, rows, None]
        if mask in self._bounded:
            unseen |= slots < self._table[self._bounded[mask], rows, None]
        bias = torch.zeros(unseen.shape, dtype=dtype, device=self.device)
        return bias.masked_fill_(unseen, float("-inf"))

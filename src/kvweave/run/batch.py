"""What one pass does: rows of several contexts, one behind the other.

Everything that decides is host integers, known before the pass; they go up in one copy. Nothing
comes down while the pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.interrupts import let_in
from kvweave.run.base import NO_SLOTS, Ints, LayerInfo, Mask, Work, fixed_from, readers_of
from kvweave.run.graphs import Form
from kvweave.run.layers import At, span_of
from kvweave.run.part import BatchPart, Piece
from kvweave.run.pool import Pools
from kvweave.run.rotary import Angles, Rotation, Spread
from kvweave.run.sums import power_of_two
from kvweave.run.together import FEW, SHAPED, Beside, Together, filled, pooled
from kvweave.run.upload import Upload, up


class StopPass(Exception):
    """Ends a pass early; the layers after the one asked for are not needed."""


class KeysWritten(Exception):
    """Ends the first call of the last layer of a pass that is narrowed (`run/narrow.py`)."""


class Batch:
    """Works of different contexts in one pass; making one changes no rows.

    ``ids`` [1, total] int64 and ``want`` [n] int64, packed rows whose logits are returned, are on
    the device.
    """

    def __init__(
        self,
        works: Sequence[Work],
        layers: Sequence[LayerInfo],
        device: torch.device,
        pools: Pools | None = None,
    ) -> None:
        self.infos, self.device = layers, device
        self.readers = readers_of(layers)
        self.parts: list[BatchPart] = []
        n = 0
        for work in works:
            self.parts.append(BatchPart(work, n))
            n += work.n
        for part in self.parts:
            part.last = self._last(part.work)
        self.last = max(part.last for part in self.parts)
        self.together: Together | None = None
        self.beside = Beside()
        self._pools = pools if pools is not None and pooled(self.parts, layers) else None
        self.total = n if self._pools is None else filled(n, len(self.parts))
        self._bounded: dict[Mask, int] = {}  # row of the table that holds where a mask begins
        for info in layers:
            if info.mask.first(works[0].positions) is not None:
                self._bounded.setdefault(info.mask, 3 + len(self._bounded))
        self._upload()
        self._angles: dict[int, Angles] = {}  # by id of a rotation
        self._spread: dict[tuple[int, torch.dtype], Spread] = {}
        self._stacks: dict[int, Tensor] = {}
        self._offsets: Tensor | None = None
        self._seen: Tensor | None = None
        self.narrow: Batch | None = None  # of the rows that the last layer is computed for
        self.kept_of: Tensor | None = None  # of such a batch: which rows of the whole one they are
        self.attending = -1  # the layer whose rows were asked for last (`run/handed.py`)

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
        packed = [want + part.span.start for want, part in zip(wants, self.parts, strict=True)]
        table = np.zeros((3 + len(self._bounded), self.total), np.int64)
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
        want = np.concatenate(packed)
        if self._pools is not None and 0 < len(want) <= FEW:
            want = np.concatenate((want, np.zeros(power_of_two(len(want)) - len(want), np.int64)))
        self._bring(table, want)
        for part in self.parts:
            work = part.work
            if isinstance(work.tokens, Tensor):
                self.ids[0, part.span] = work.tokens
            span = span_of(work.slots)
            part.at = At(work.slots, self._table[2, part.span] if span is None else span)

    def _bring(self, table: Ints, want: Ints) -> None:
        """Copy to the device what a pass knows of its rows, and which are wanted."""
        upload = Upload()
        rows, wanted = upload.add(table), upload.add(want)
        if self._pools is not None:
            self.together = Together(self.parts, self.infos, self.total, upload)
        kept = self._pools.kept if self._pools is not None and self.total <= SHAPED else None
        upload.go(self.device, kept)
        self.want, self._table = upload[wanted], upload[rows].view(table.shape)
        self.ids, self._positions = self._table[0][None], self._table[1]

    @property
    def form(self) -> Form | None:
        """What passes have in common that launch the same over the same addresses; None: no other
        pass will."""
        together = self.together
        if together is None or together.sums is None or any(p.rows.pending for p in self.parts):
            return None
        if self.total > SHAPED or len(self.want) > FEW:
            return None
        return self.total, len(self.want), self.last, len(self._bounded), *together.layout

    def forget(self) -> None:
        """Forget what the pass has computed so far."""
        self._angles, self._spread, self._stacks = {}, {}, {}
        self._offsets, self.beside = None, Beside()

    def begin(self) -> None:
        """The pass begins: its rows are there, their positions known."""
        for part in self.parts:
            part.rows.expect(part.work.slots, part.work.positions)
            if part.work.observer is not None:
                part.work.observer.begin()

    def end(self) -> None:
        """The pass went through."""
        if self.together is not None:
            self.together.end(self.beside)
        for part in self.parts:
            if part.work.observer is not None:
                part.work.observer.end()

    def split(self, logits: Tensor) -> list[Tensor]:
        """Return each work's own of the wanted ``logits`` [want, vocab]."""
        return list(torch.split(logits[: sum(self._wants)], self._wants))

    @property
    def position_ids(self) -> Tensor:
        """Return the positions [1, total] that the model is told: 0, where its keys are turned by us."""
        first = fixed_from(self.infos)
        if first is None and all(info.handed is None for info in self.infos):
            return torch.zeros_like(self.ids)
        return self._positions[None] + (first or 0)

    @property
    def offsets(self) -> Tensor:
        """What has to be added to a row's number in the pass to make its position, [total]."""
        if self._offsets is None:
            self._offsets = self._positions - torch.arange(self.total, device=self.device)
        return self._offsets

    def angles(self, layer: int) -> Angles:
        """Return cos and sin of a layer's rotation, [total, width] each."""
        return self._angles_of(self.infos[layer].rotation)

    def _angles_of(self, rotation: Rotation) -> Angles:
        if id(rotation) not in self._angles:
            self._angles[id(rotation)] = rotation.angles(self._positions)
        return self._angles[id(rotation)]

    def _stacked(self, layer: int) -> Tensor:
        """Return the same in one tensor [2, total, width]."""
        key = id(self.infos[layer].rotation)
        if key not in self._stacks:
            self._stacks[key] = torch.stack(self.angles(layer))
        return self._stacks[key]

    def turned(self, layer: int, rows: Tensor) -> Tensor:
        """Return rows [total, head, dim] of a layer turned to their positions."""
        return self._turned(rows, self.infos[layer].rotation)

    def turned_queries(self, layer: int, queries: Tensor) -> Tensor:
        """Return queries [total, head, dim] of a layer turned to their positions."""
        return self._turned(queries, self.infos[layer].query or self.infos[layer].rotation)

    def _turned(self, rows: Tensor, rotation: Rotation) -> Tensor:
        key = id(rotation), rows.dtype
        if key not in self._spread:
            self._spread[key] = rotation.spread(self._angles_of(rotation), rows.dtype)
        return rotation.turn(rows, self._spread[key])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's rows; ``keys`` and ``values`` are [total, head, dim], unrotated.

        Raises StopPass after the last layer that is wanted, LoadFailed; KeysWritten after the last
        one of all in a pass that is narrowed.
        """
        let_in()
        if self.kept_of is not None:
            return
        writing = [part for part in self.parts if layer <= part.last]
        for part in writing:
            part.rows.settle(layer)
        if self.together is not None:
            self.together.write(layer, keys, values, self._stacked(layer))
            self.beside.add(layer, keys, values)
        else:
            turned = self.turned(layer, keys)
            for part in writing:
                k, v, plain = turned, values, keys
                if len(self.parts) > 1:
                    k, v, plain = k[part.span], v[part.span], plain[part.span]
                part.rows.write(layer, part.at, k, v, plain)
                part.keep_raw(layer, plain, v)
        if layer == self.last:
            raise StopPass
        if self.narrow is not None and layer == len(self.infos) - 1:
            raise KeysWritten

    def write_turned(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's rows of the only part, whose keys stand at their positions. Raises
        LoadFailed."""
        let_in()
        (part,) = self.parts
        if layer > part.last:
            return
        part.rows.settle(layer)
        rotation = self.infos[layer].rotation
        plain = rotation.apply(keys, rotation.back(self.angles(layer)))
        part.rows.write(layer, part.at, keys, values, plain)
        part.keep_raw(layer, plain, values)

    @property
    def gapless(self) -> bool:
        """Whether the rows of the only part stand at positions 0, 1, ..."""
        (part,) = self.parts
        return int(part.work.positions[-1]) == part.stop - 1

    @property
    def positions_seen(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows of the only part, and of the slots up to the last."""
        (part,) = self.parts
        if self._seen is None:
            self._seen = up(part.rows.positions[: part.stop], self.device)
        return self._positions, self._seen

    def bias(self, part: BatchPart, piece: Piece, mask: Mask, dtype: torch.dtype) -> Tensor | None:
        """Return which slots a piece's rows see, as 0 and -inf [row, slot]; None when all do."""
        if piece.bias is None and piece.last - piece.first > 1:
            slots = torch.arange(piece.begin, piece.stop, device=self.device)
            piece.bias = self.bias_of(slots, part, piece, mask, dtype)
        return piece.bias

    def bias_of(
        self, slots: Tensor, part: BatchPart, piece: Piece, mask: Mask, dtype: torch.dtype
    ) -> Tensor:
        """Return which of ``slots`` a piece's rows see, as 0 and -inf [row, slot]."""
        rows = slice(part.span.start + piece.first, part.span.start + piece.last)
        unseen = slots > self._table[2, rows, None]
        if mask in self._bounded:
            unseen |= slots < self._table[self._bounded[mask], rows, None]
        bias = torch.zeros(unseen.shape, dtype=dtype, device=self.device)
        return bias.masked_fill_(unseen, float("-inf"))

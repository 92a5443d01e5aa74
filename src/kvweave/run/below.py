"""Rows on the tier below: out of memory, seen by no query, and back when a policy wants them.

On a CPU the tier below its memory is a file without a name in the system's directory for temporary
files, whose room is taken before anything is written; on other devices it is the host's memory. It
lives as long as the rows: like swap, it is no place to find anything again. Files are read, not
mapped: what a device cannot give back is an error of the answer that wants it, where a page that
cannot be read would end the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.packed import less
from kvweave.run.spill import HostRows, SpilledRows, SpillFile

BELOW = "below"
SPARE = 4  # a new sheet has room for a quarter more than is asked for


@dataclass(slots=True)
class Sheet:
    """Room for rows of one layer; what is written is not written over, since copies may read it."""

    k: HostRows | SpilledRows  # [head, slot, dim]
    v: HostRows | SpilledRows
    used: NDArray[np.bool_]  # [head, slot]

    @classmethod
    def new(cls, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, filed: bool) -> Sheet:
        """Return room for keys and values of these shapes, in a file if ``filed``. Raises NoSpace,
        StoreError."""
        made: list[HostRows | SpilledRows]
        if filed:
            made = list(SpillFile.of().rows(shapes, dtype))
        else:
            made = [HostRows.of(shape, dtype) for shape in shapes]
        return cls(made[0], made[1], np.zeros(shapes[0][:2], bool))


class BelowRows:
    """Rows of one layer on the tier below; of each head those where ``there`` [head, slot] is true.

    Nothing is changed in place: what changes them returns others, which share what is written.
    """

    def __init__(self, sheet: Sheet, there: NDArray[np.bool_], device: torch.device) -> None:
        self.sheet, self.there, self.device = sheet, there, device

    @classmethod
    def empty(
        cls, like: tuple[Tensor, Tensor], heads: int, capacity: int, device: torch.device
    ) -> BelowRows:
        """Return room for rows as ``like`` [row, dim] of a device. Raises NoSpace, StoreError."""
        k, v = like
        shapes = [(heads, capacity, t.shape[1]) for t in (k, v)]
        sheet = Sheet.new(shapes, k.dtype, device.type == "cpu")
        return cls(sheet, np.zeros((heads, capacity), bool), device)

    @property
    def n(self) -> int:
        """Rows, of all heads."""
        return int(self.there.sum())

    def slots(self, head: int) -> Ints:
        """Return the slots of one head's rows, increasing."""
        return np.flatnonzero(self.there[head])

    def take(self, head: int, slots: Ints) -> tuple[Tensor, Tensor]:
        """Return keys and values [slot, dim] of some rows of a head, where they are computed with.
        Raises StoreError."""
        assert self.there[head, slots].all(), "rows that are not below"
        k, v = self.sheet.k.read(head, slots), self.sheet.v.read(head, slots)
        return k.to(self.device), v.to(self.device)

    def without(self, slots: Sequence[Ints]) -> BelowRows:
        """Return the rows of each head but those of its ``slots``."""
        there = self.there.copy()
        for head, some in enumerate(slots):
            there[head, some[some < there.shape[1]]] = False
        return BelowRows(self.sheet, there, self.device)

    def only(self, slots: Sequence[Ints]) -> BelowRows:
        """Return of the rows of each head those of its ``slots``."""
        return self.without([less(self.slots(h), some) for h, some in enumerate(slots)])

    def grown(self, capacity: int, n: int) -> BelowRows:
        """Return the rows of the first ``n`` slots, with room for ``capacity``. Raises NoSpace, StoreError."""
        n = min(n, self.there.shape[1])
        there = np.zeros((len(self.there), capacity), bool)
        there[:, :n] = self.there[:, :n]
        made = BelowRows(self.sheet, there, self.device)
        return made if capacity <= self._room else made._copy(capacity + capacity // SPARE)

    def _copy(self, room: int) -> BelowRows:
        """Return the same on a sheet with ``room`` for slots. Raises NoSpace, StoreError."""
        sheet, heads = self.sheet, len(self.there)
        shapes = [(heads, room, rows.dim) for rows in (sheet.k, sheet.v)]
        sheet = Sheet.new(shapes, sheet.k.dtype, self.device.type == "cpu")
        made = BelowRows(sheet, np.zeros((heads, self.there.shape[1]), bool), self.device)
        for head in range(heads):
            slots = self.slots(head)
            k, v = (rows.read(head, slots) for rows in (self.sheet.k, self.sheet.v))
            made._write(head, slots, k, v)
        return made

    @property
    def _room(self) -> int:
        """Slots that the sheet has room for."""
        return int(self.sheet.used.shape[1])

    def put(self, slots: Sequence[Ints], rows: Sequence[tuple[Tensor, Tensor]]) -> BelowRows:
        """Return these rows and keys and values [slot, dim] of each head's ``slots``, new or written over. Raises
        NoSpace, StoreError."""
        made = self.without(slots)
        if not all(
            self._as_written(h, *each) for h, each in enumerate(zip(slots, rows, strict=True))
        ):
            made = made._copy(self._room)
        for head, (some, both) in enumerate(zip(slots, rows, strict=True)):
            made._write(head, some, *both)
        return made

    def _as_written(self, head: int, slots: Ints, both: tuple[Tensor, Tensor]) -> bool:
        """Tell whether what was written to some of a head's ``slots`` before is what they are now: a row
        that came back has not changed."""
        again = np.flatnonzero(self.sheet.used[head, slots])
        if not len(again):
            return True
        given = torch.from_numpy(again)
        pairs = zip(both, (self.sheet.k, self.sheet.v), strict=True)
        return all(torch.equal(t.cpu()[given], old.read(head, slots[again])) for t, old in pairs)

    @torch.inference_mode()
    def _write(self, head: int, slots: Ints, keys: Tensor, values: Tensor) -> None:
        self.sheet.k.write(head, slots, keys.cpu())
        self.sheet.v.write(head, slots, values.cpu())
        self.there[head, slots] = self.sheet.used[head, slots] = True

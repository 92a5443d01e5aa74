"""Rows on the tier below: out of memory, seen by no query, and back when a policy wants them.

On a CPU the tier below its memory is a file without a name in the system's directory for temporary
files, whose room is taken before anything is written; on other devices it is the host's memory. It
lives as long as the rows: like swap, it is no place to find anything again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import of_system
from kvweave.run.base import Ints

BELOW = "below"
SPARE = 4  # a new sheet has room for a quarter more than is asked for


@dataclass(slots=True)
class Sheet:
    """Room for rows of one layer; what is written is not written over, since copies may read it."""

    k: Tensor  # [head, slot, dim] on the host
    v: Tensor
    used: NDArray[np.bool_]  # [head, slot]

    @classmethod
    def new(cls, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, mapped: bool) -> Sheet:
        """Return room for keys and values of these shapes, in a file if ``mapped``. Raises NoSpace,
        StoreError."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = _mapped(sum(sizes), dtype) if mapped else torch.empty(sum(sizes), dtype=dtype)
        k, v = flat[: sizes[0]].view(shapes[0]), flat[sizes[0] : sum(sizes)].view(shapes[1])
        return cls(k, v, np.zeros(k.shape[:2], bool))


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
        """Return keys and values [slot, dim] of some rows of a head, where they are computed with."""
        assert self.there[head, slots].all(), "rows that are not below"
        rows = torch.from_numpy(slots)
        k, v = self.sheet.k[head, rows], self.sheet.v[head, rows]
        return k.to(self.device), v.to(self.device)

    def without(self, slots: Sequence[Ints]) -> BelowRows:
        """Return the rows of each head but those of its ``slots``."""
        there = self.there.copy()
        for head, some in enumerate(slots):
            there[head, some[some < there.shape[1]]] = False
        return BelowRows(self.sheet, there, self.device)

    def only(self, slots: Sequence[Ints]) -> BelowRows:
        """Return of the rows of each head those of its ``slots``."""
        return self.without([np.setdiff1d(self.slots(h), some) for h, some in enumerate(slots)])

    def grown(self, capacity: int, n: int) -> BelowRows:
        """Return the rows of the first ``n`` slots, with room for ``capacity``. Raises NoSpace, StoreError."""
        n = min(n, self.there.shape[1])
        there = np.zeros((len(self.there), capacity), bool)
        there[:, :n] = self.there[:, :n]
        made = BelowRows(self.sheet, there, self.device)
        return (
            made if capacity <= self.sheet.k.shape[1] else made._copy(capacity + capacity // SPARE)
        )

    def _copy(self, room: int) -> BelowRows:
        """Return the same on a sheet with ``room`` for slots. Raises NoSpace, StoreError."""
        one = self.sheet.k[0], self.sheet.v[0]
        made = BelowRows.empty(one, len(self.there), room, self.device)
        made.there = self.there.copy()
        for head in range(len(self.there)):
            rows = torch.from_numpy(self.slots(head))
            made._write(head, rows.numpy(), self.sheet.k[head, rows], self.sheet.v[head, rows])
        return made

    def put(self, slots: Sequence[Ints], rows: Sequence[tuple[Tensor, Tensor]]) -> BelowRows:
        """Return these rows and keys and values [slot, dim] of each head's ``slots``, new or written over. Raises
        NoSpace, StoreError."""
        made = self.without(slots)
        if not all(
            self._as_written(h, *each) for h, each in enumerate(zip(slots, rows, strict=True))
        ):
            made = made._copy(self.sheet.k.shape[1])
        for head, (some, both) in enumerate(zip(slots, rows, strict=True)):
            made._write(head, some, *both)
        return made

    def _as_written(self, head: int, slots: Ints, both: tuple[Tensor, Tensor]) -> bool:
        """Tell whether what was written to some of a head's ``slots`` before is what they are now: a row
        that came back has not changed."""
        again = np.flatnonzero(self.sheet.used[head, slots])
        if not len(again):
            return True
        given, rows = torch.from_numpy(again), torch.from_numpy(slots[again])
        pairs = zip(both, (self.sheet.k, self.sheet.v), strict=True)
        return all(torch.equal(t.cpu()[given], old[head, rows]) for t, old in pairs)

    @torch.inference_mode()
    def _write(self, head: int, slots: Ints, keys: Tensor, values: Tensor) -> None:
        rows = torch.from_numpy(slots)
        self.sheet.k[head, rows], self.sheet.v[head, rows] = keys.cpu(), values.cpu()
        self.there[head, slots] = self.sheet.used[head, slots] = True


def _mapped(n: int, dtype: torch.dtype) -> Tensor:
    """Return ``n`` numbers of a file that has no name. Raises NoSpace, StoreError."""
    directory = Path(tempfile.gettempdir())
    n = max(1, n)
    try:
        number, name = tempfile.mkstemp(prefix="kvweave-below-")
        try:
            os.posix_fallocate(number, 0, n * dtype.itemsize)
            return torch.from_file(name, shared=True, size=n, dtype=dtype)
        finally:
            os.close(number)
            os.unlink(name)
    except OSError as error:
        raise of_system(error, "put rows below memory in", directory) from error

"""What one layer of a context stores: rows of keys and values by slot.

Keys are rotated to their position. In memory the heads come first: attention reads one head's rows
one after the other, and a decoded token reads all of them (half the time at 4k tokens, two CPU
cores).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import NO_SLOTS, Ints
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.upload import up
from kvweave.store.kv import LayerShape


@dataclass(frozen=True, slots=True)
class At:
    """Slots to write or read."""

    slots: Ints  # [n] strictly increasing, on the host
    where: slice | Tensor  # the same for tensors: a slice where they follow each other

    @classmethod
    def of(cls, slots: Ints, device: torch.device) -> At:
        """Return where ``slots`` are; scattered ones go up to the device."""
        span = span_of(slots)
        return cls(slots, up(slots, device) if span is None else span)


def span_of(slots: Ints) -> slice | None:
    """Return the slice that is ``slots``, None when there are gaps between them."""
    if not len(slots):
        return slice(0, 0)
    start, stop = int(slots[0]), int(slots[-1]) + 1
    return slice(start, stop) if stop - start == len(slots) else None


class LayerRows(ABC):
    """Rows of one layer with room for ``capacity`` slots; derive to keep them another way.

    What makes room or frees returns new rows and leaves these as they are: contexts may share them.
    """

    lossy = False  # what is read is not quite what was written
    capacity: int

    @property
    def n_freed(self) -> int:
        """Rows freed, summed over heads."""
        return 0

    def gone(self) -> Ints:
        """Return the slots that no head keeps, increasing."""
        return NO_SLOTS

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes allocated."""

    @abstractmethod
    def bytes_at(self, capacity: int) -> int:
        """Return the bytes that `grown` to ``capacity`` will have allocated."""

    @abstractmethod
    def grown(self, capacity: int, n: int) -> LayerRows:
        """Copy the first ``n`` slots to rows with room for ``capacity``."""

    @abstractmethod
    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        """Write rotated rows [row, head, dim]; those freed before stay freed."""

    @abstractmethod
    def seen(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, slot, dim] of some slots; do not write there."""

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        """Write unrotated rows [row, head, dim], turned by ``angles``; those freed come back."""
        at = At(np.arange(span.start, span.stop), span)
        self.write(at, rotation.apply(keys, angles), values)

    def cut(self, n: int) -> LayerRows:
        """Return the first ``n`` slots."""
        return self

    def check(self, n: int) -> None:
        """Raise AssertionError unless ``n`` slots in use fit what is stored."""
        assert n <= self.capacity, f"{n} rows in {self.capacity} slots"


class RawRows(LayerRows):
    """Rows as the model gives them, [head, capacity, dim]."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.capacity = k.shape[1]

    @classmethod
    def empty(cls, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> RawRows:
        """Return rows without room."""
        return cls(
            torch.empty(shape.k_heads, 0, shape.k_dim, dtype=dtype, device=device),
            torch.empty(shape.v_heads, 0, shape.v_dim, dtype=dtype, device=device),
        )

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def bytes_at(self, capacity: int) -> int:
        sizes = [t.shape[0] * t.shape[2] * t.element_size() for t in (self.k, self.v)]
        return capacity * sum(sizes)

    def grown(self, capacity: int, n: int) -> RawRows:
        made = []
        for old in (self.k, self.v):
            made.append(old.new_empty(old.shape[0], capacity, old.shape[2]))
            made[-1][:, :n] = old[:, :n]
        return RawRows(*made)

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        for tensor, rows in ((self.k, keys), (self.v, values)):
            if isinstance(at.where, slice):
                tensor[:, at.where] = rows.transpose(0, 1)
            else:
                tensor.index_copy_(1, at.where, rows.transpose(0, 1))

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        rotation.apply(keys, angles, out=self.k[:, span].transpose(0, 1))
        self.v[:, span] = values.transpose(0, 1)

    def seen(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.k[:, at], self.v[:, at]

    def check(self, n: int) -> None:
        super().check(n)
        assert self.v.shape[1] == self.capacity, "keys and values of different capacity"

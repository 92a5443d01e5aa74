"""What one layer of a context stores: rows of keys and values by slot.

Keys are rotated to their position. In memory the heads come first: attention reads one head's rows
one after the other, and a decoded token reads all of them (half the time at 4k tokens, two CPU
cores).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import NO_SLOTS, Ints
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.upload import up
from kvweave.store.kv import KV, LayerShape


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

    def originals(self, at: At, keys: Tensor) -> None:  # noqa: B027
        """Take the unrotated keys [row, head, dim] of rows that were written, where they are kept."""

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
        return RawRows(*(_grown(old, capacity, n) for old in (self.k, self.v)))

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        _write(self.k, at, keys)
        _write(self.v, at, values)

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


class MovableRows(RawRows):
    """Raw rows that keep their unrotated keys besides, so that they can be moved."""

    def __init__(self, k: Tensor, v: Tensor, original: Tensor | None = None) -> None:
        super().__init__(k, v)
        self.original = torch.empty_like(k) if original is None else original

    @property
    def n_bytes(self) -> int:
        return super().n_bytes + self.original.nbytes

    def bytes_at(self, capacity: int) -> int:
        heads, _, dim = self.k.shape
        return super().bytes_at(capacity) + capacity * heads * dim * self.k.element_size()

    def grown(self, capacity: int, n: int) -> MovableRows:
        k, v, original = (_grown(old, capacity, n) for old in (self.k, self.v, self.original))
        return MovableRows(k, v, original)

    def originals(self, at: At, keys: Tensor) -> None:
        _write(self.original, at, keys)

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        super().place(span, rotation, keys, angles, values)
        self.original[:, span] = keys.transpose(0, 1)

    def move(self, kept: Tensor, rotation: Rotation, angles: Angles) -> None:
        """Leave slots ``kept`` only, as 0, 1, ..., their keys turned by ``angles``."""
        span = slice(0, len(kept))
        keys, values = self.original[:, kept], self.v[:, kept]
        self.place(span, rotation, keys.transpose(0, 1), angles, values.transpose(0, 1))


def _grown(old: Tensor, capacity: int, n: int) -> Tensor:
    """Return [head, capacity, dim] that begins with the first ``n`` slots."""
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :n] = old[:, :n]
    return new


def _write(to: Tensor, at: At, rows: Tensor) -> None:
    if isinstance(at.where, slice):
        to[:, at.where] = rows.transpose(0, 1)
    else:
        to.index_copy_(1, at.where, rows.transpose(0, 1))


def joined_rows(kvs: Sequence[KV], layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of one layer, [token, head, dim] each; zeros where they are freed."""
    k = [_dense(kv, kv.k, layer) for kv in kvs]
    v = [_dense(kv, kv.v, layer) for kv in kvs]
    return (k[0], v[0]) if len(kvs) == 1 else (torch.cat(k), torch.cat(v))


def _dense(kv: KV, tensors: Sequence[Tensor], layer: int) -> Tensor:
    """Return a chunk's rows [token, head, dim] of one layer, also those that were freed."""
    rows = tensors[layer]
    if kv.kept is None:
        return rows
    offsets = kv.kept[layer]
    made = rows.new_zeros(kv.n_tokens + 1, *rows.shape[1:])  # the last takes the padding
    to = up(np.where(offsets < 0, kv.n_tokens, offsets).T.copy(), rows.device)
    made.scatter_(0, to[..., None].expand_as(rows), rows)
    return made[:-1]

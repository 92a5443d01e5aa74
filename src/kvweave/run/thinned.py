"""Rows of a layer of which each kv head keeps its own: what is freed takes no memory.

::

    slot             0    1    2    3    4 |  5    6   ...
    head 0 keeps     0    .    2    .    4 |  room for what comes next, in every head
    head 1 keeps     .    .    .    3    4 |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.layers import At, LayerRows, RawRows, span_of
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.upload import up


@dataclass(slots=True)
class HeadRows:
    """The rows that one head keeps, one after the other."""

    slots: Ints  # increasing
    k: Tensor  # [at least so many, dim]
    v: Tensor

    def kept(self, which: Ints, room: int) -> HeadRows:
        """Copy some rows, with room for so many more."""
        slots, made = self.slots[which], []
        for old in (self.k, self.v):
            new = old.new_empty(len(slots) + room, old.shape[1])
            new[: len(slots)] = old[_where(which, old.device)]
            made.append(new)
        return HeadRows(slots, *made)

    def write(self, slots: Ints, keys: Tensor, values: Tensor) -> None:
        """Write rows [slot, dim] of slots that are kept; leave out the others."""
        rows = np.searchsorted(self.slots, slots)
        there = rows < len(self.slots)
        there[there] = self.slots[rows[there]] == slots[there]
        to = _where(rows[there], keys.device)
        if not there.all():
            some = _where(np.flatnonzero(there), keys.device)
            keys, values = keys[some], values[some]
        self.k[to], self.v[to] = keys, values

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def row_bytes(self) -> int:
        return sum(t.shape[1] * t.element_size() for t in (self.k, self.v))


class ThinnedRows(LayerRows):
    """Rows of one layer, each head's own; slots ``[n, capacity)`` have not been written."""

    def __init__(self, heads: list[HeadRows], n: int, capacity: int) -> None:
        self.heads, self.n, self.capacity = heads, n, capacity

    @classmethod
    def of(cls, rows: RawRows, n: int) -> ThinnedRows:
        """Copy the ``n`` rows of a layer; nothing is freed yet."""
        every = np.arange(n)
        heads = [HeadRows(every, k, v) for k, v in zip(rows.k, rows.v, strict=True)]
        room = rows.capacity - n
        return cls([head.kept(every, room) for head in heads], n, rows.capacity)

    @property
    def n_freed(self) -> int:
        return sum(self.n - len(head.slots) for head in self.heads)

    def gone(self) -> Ints:
        kept = np.zeros(self.n, bool)
        for head in self.heads:
            kept[head.slots] = True
        return np.flatnonzero(~kept)

    @property
    def n_bytes(self) -> int:
        return sum(head.n_bytes for head in self.heads)

    def bytes_at(self, capacity: int) -> int:
        room = capacity - self.n
        return sum((len(head.slots) + room) * head.row_bytes for head in self.heads)

    def less(self, head: int, slots: Ints) -> ThinnedRows:
        """Return these rows without some of one head."""
        old, heads = self.heads[head], list(self.heads)
        left = np.flatnonzero(~np.isin(old.slots, slots))
        heads[head] = old.kept(left, self.capacity - self.n)
        return ThinnedRows(heads, self.n, self.capacity)

    def grown(self, capacity: int, n: int) -> ThinnedRows:
        n = min(n, self.n)
        heads = [
            head.kept(np.arange(np.searchsorted(head.slots, n)), capacity - n)
            for head in self.heads
        ]
        return ThinnedRows(heads, n, capacity)

    def cut(self, n: int) -> ThinnedRows:
        return self if n >= self.n else self.grown(self.capacity, n)

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        self._extend(int(at.slots[-1]) + 1)
        for i, head in enumerate(self.heads):
            head.write(at.slots, keys[:, i], values[:, i])

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        self._extend(span.stop)
        for i, head in enumerate(self.heads):
            slots = np.union1d(head.slots, np.arange(span.start, span.stop))
            if len(slots) > len(head.slots):  # freed rows come back
                self.heads[i] = back = head.kept(np.arange(0), len(slots) + self.capacity - self.n)
                back.slots = slots
                n = len(head.slots)
                back.write(head.slots, head.k[:n], head.v[:n])
        super().place(span, rotation, keys, angles, values)

    def _extend(self, stop: int) -> None:
        """Slots up to ``stop`` are in use, in all heads."""
        if stop > self.n:
            for head in self.heads:
                head.slots = np.concatenate((head.slots, np.arange(self.n, stop)))
            self.n = stop

    def seen(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, slot, dim] of some slots, zeros where they are freed."""
        slots = np.arange(at.start, at.stop) if isinstance(at, slice) else at.cpu().numpy()
        made = []
        for name in ("k", "v"):
            tensors: list[Tensor] = [getattr(head, name) for head in self.heads]
            found = tensors[0].new_zeros(len(self.heads), len(slots), tensors[0].shape[1])
            for head, tensor, out in zip(self.heads, tensors, found, strict=True):
                _, rows, to = np.intersect1d(head.slots, slots, True, return_indices=True)
                out[_where(to, out.device)] = tensor[_where(rows, out.device)]
            made.append(found)
        return made[0], made[1]

    def seen_by(self, head: int, begin: int, stop: int) -> tuple[Ints, Tensor, Tensor]:
        """Return which of slots ``[begin, stop)`` a head keeps, its keys and values [1, row, dim]."""
        one = self.heads[head]
        first, last = np.searchsorted(one.slots, (begin, stop))
        rows = slice(int(first), int(last))
        return one.slots[rows], one.k[None, rows], one.v[None, rows]

    def check(self, n: int) -> None:
        super().check(n)
        assert self.n <= n, f"{self.n} slots in use of {n} rows"
        for head in self.heads:
            assert bool((np.diff(head.slots) > 0).all()), "slots do not increase"
            assert not len(head.slots) or head.slots[-1] < self.n, "slots that are not in use"
            wanted = len(head.slots) + self.capacity - self.n
            assert len(head.k) == len(head.v) == wanted, f"not room for {wanted} rows"


def _where(rows: Ints, device: torch.device) -> slice | Tensor:
    """Return an index of ``rows``, a slice where they follow each other."""
    span = span_of(rows)
    return up(rows, device) if span is None else span

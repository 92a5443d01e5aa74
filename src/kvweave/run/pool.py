"""Rows of all contexts in one buffer a layer: a pass over many of them is one write, one attention.

Used on devices where a launch costs more than the work of one context; on a CPU each context has
buffers of its own (`layers.RawRows`), which is faster there::

    slot      0        1 ... 40     41 ... 72   73 ... 104   ...
              nobody   context A    free        context B
              what fills a pass up to its size is written to slot 0, and seen by no one

There is no list of what is free: it is what lies between the rows that are alive. When there is no
room the rows are packed into a new buffer; the host's numbers follow, so no pass may be under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from kvweave.run.base import LayerInfo
from kvweave.run.graphs import Graphs
from kvweave.run.kernel import write_rows
from kvweave.run.layers import RawRows
from kvweave.run.rotary import Angles, Rotation
from kvweave.store.kv import LayerShape

FIRST = 1  # slot 0 is nobody's
SPARE = 8  # a new buffer has room for an eighth more than is asked for
WASTE = 1.5  # a buffer of more than so many times what is alive is made smaller
SMALL = 1024  # slots below which it is not worth it


class LayerPool:
    """Slots of one layer; ``k`` and ``v`` are [head, slot, dim]."""

    @torch.inference_mode(False)  # whoever asks first or needs more: others write here out of it
    def __init__(self, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(shape.k_heads, FIRST, shape.k_dim, dtype=dtype, device=device)
        self.v = torch.zeros(shape.v_heads, FIRST, shape.v_dim, dtype=dtype, device=device)
        self.n_moves = 0  # how often rows have moved
        self._alive: WeakSet[PooledRows] = WeakSet()

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def turns(self) -> bool:
        """Whether the kernel that turns and writes rows can: keys and values have as many heads."""
        return self.k.shape[0] == self.v.shape[0]

    def take(self, rows: PooledRows) -> None:
        """Give ``rows`` the slots for their capacity, zeros in them."""
        alive = self._sorted()
        wanted = FIRST + rows.capacity + sum(each.capacity for each in alive)
        start = self._gap(alive, rows.capacity)
        if start is None or self._wastes(wanted):
            start = self._pack(alive, wanted + wanted // SPARE)
        rows.start = start
        self._alive.add(rows)
        for tensor in (rows.k, rows.v):
            tensor.zero_()  # what an earlier context left there may be no number at all

    def shrink(self) -> None:
        """Give memory back where rows went elsewhere."""
        alive = self._sorted()
        wanted = FIRST + sum(each.capacity for each in alive)
        if self._wastes(wanted):
            self._pack(alive, wanted + wanted // SPARE)

    def _sorted(self) -> list[PooledRows]:
        return sorted(self._alive, key=lambda each: each.start)

    def _wastes(self, wanted: int) -> bool:
        return self.capacity > max(SMALL, WASTE * wanted)

    def _gap(self, alive: Sequence[PooledRows], n: int) -> int | None:
        """Return the first free slot with ``n`` behind it."""
        start = FIRST
        for each in alive:
            if each.start - start >= n:
                return start
            start = each.start + each.capacity
        return start if self.capacity - start >= n else None

    @torch.inference_mode(False)
    def _pack(self, alive: Sequence[PooledRows], capacity: int) -> int:
        """Move all rows to the beginning of a new buffer; return the first slot behind them."""
        k, v = (t.new_zeros(t.shape[0], capacity, t.shape[2]) for t in (self.k, self.v))
        start = FIRST
        for each in alive:
            span = slice(start, start + each.capacity)
            k[:, span], v[:, span] = each.k, each.v
            start = span.stop
        self.k, self.v = k, v
        start = FIRST
        for each in alive:
            each.start = start
            start += each.capacity
        self.n_moves += 1
        return start

    def check(self) -> None:
        """Raise AssertionError when two contexts have one slot, or one has slots beyond the end."""
        stop = FIRST
        for each in sorted(self._alive, key=lambda each: each.start):
            assert each.start >= stop, f"slot {each.start} is two contexts'"
            stop = each.start + each.capacity
        assert stop <= self.capacity, f"slot {stop - 1} of {self.capacity}"


class PooledRows(RawRows):
    """Rows of one layer of a context at ``[start, start + capacity)`` of a pool."""

    def __init__(self, pool: LayerPool, capacity: int = 0) -> None:
        self.pool, self.capacity, self.start = pool, capacity, FIRST
        if capacity:
            pool.take(self)

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        return self.pool.k[:, self.start : self.start + self.capacity]

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        return self.pool.v[:, self.start : self.start + self.capacity]

    def grown(self, capacity: int, n: int) -> PooledRows:
        made = PooledRows(self.pool, capacity)
        made.k[:, :n], made.v[:, :n] = self.k[:, :n], self.v[:, :n]
        return made

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        if self.pool.turns:  # the same bits as `place_at`
            first = self.start + span.start
            slots = torch.arange(first, first + len(keys), device=keys.device)
            self.place_at(slots, rotation, keys, torch.stack(angles), values)
        else:
            super().place(span, rotation, keys, angles, values)

    def place_at(
        self, slots: Tensor, rotation: Rotation, keys: Tensor, angles: Tensor, values: Tensor
    ) -> None:
        """Write unrotated rows [row, head, dim] to ``slots`` [row] of the pool, turned by ``angles``
        [2, row, width]."""
        write_rows(keys, values, self.pool.k, self.pool.v, slots, angles, rotation.interleaved)

    def check(self, n: int) -> None:
        super().check(n)
        self.pool.check()


class Pools:
    """The pools of all layers of a model, and what passes over them keep for the next."""

    def __init__(
        self, infos: Sequence[LayerInfo], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = [LayerPool(info.shape, dtype, device) for info in infos]
        self.kept: dict[int, Tensor] = {}  # size -> what numbers of a pass are uploaded to
        self.graphs = Graphs(device) if device.type == "cuda" else None

    def new_rows(self) -> list[PooledRows]:
        """Return rows without room, one of each layer."""
        return [PooledRows(pool) for pool in self.layers]

    @property
    def n_moves(self) -> int:
        """How often rows of any layer have moved."""
        return sum(pool.n_moves for pool in self.layers)

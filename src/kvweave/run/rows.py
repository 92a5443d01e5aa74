"""The KV rows of one context, ready for attention.

Rows are kept sorted by position, without holes, so that decoding reads one contiguous slice and
needs no mask::

    slot       0    1    2    3    4    5   ...  n-1 |  free up to capacity
    position   0    1    2    7    8    9   ...      |  ("keep" leaves gaps in positions only)
    k[layer]   rotated to its position               |
    v[layer]   as computed                           |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.run.rotary import Angles, Rotation
from kvweave.store.arriving import Arriving
from kvweave.store.kv import KV, LayerShape

SLACK = 32  # one row more for so many asked for: growing is not a copy each turn


@dataclass(slots=True)
class _Pending:
    """Chunks to place at slots ``[start, stop)`` of some layers."""

    start: int
    stop: int
    kvs: list[KV]
    angles: dict[int, Angles]
    layers: set[int]


class KVRows:
    """Rows of every layer; ``k[layer]`` and ``v[layer]`` are [capacity, kv_head, dim].

    In memory the heads come first: attention reads one head's rows one after the other, and a
    decoded token reads all of them (half the time at 4k tokens, two CPU cores).
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rotations: Sequence[Rotation],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = list(shapes)
        self.rotations = list(rotations)
        self.n = 0
        self.capacity = 0
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        empty = KV.empty(self.shapes, 0, dtype, device)
        self.k, self.v = empty.k, empty.v
        self.dtype, self.device = dtype, device
        self.row_bytes = sum(s.width for s in shapes) * dtype.itemsize
        self._pending: list[_Pending] = []

    @property
    def n_bytes(self) -> int:
        """Bytes allocated, free slots included."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def capacity_for(self, n: int) -> int:
        """Return the rows that will be allocated once ``n`` are reserved."""
        return self.capacity if n <= self.capacity else n + n // SLACK

    def bytes_for(self, n: int) -> int:
        """Return the bytes that will be allocated once ``n`` rows are reserved."""
        return self.capacity_for(n) * self.row_bytes

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows in all; keeps the rows there are."""
        if n <= self.capacity:
            return
        self.settle()
        capacity = self.capacity_for(n)
        for tensors in (self.k, self.v):
            for layer, old in enumerate(tensors):
                # one layer at a time: the peak is one layer, not a copy
                tensors[layer] = self._grown(old, capacity)
        positions = self.positions.new_empty(capacity)
        positions[: self.n] = self.positions[: self.n]
        self.positions, self.capacity = positions, capacity

    def truncate(self, n: int) -> None:
        """Forget rows ``[n, ...)``; they are overwritten by what comes next."""
        self._pending = [each for each in self._pending if each.start < n]
        self.n = min(self.n, n)

    def angles(self, positions: Tensor) -> dict[int, Angles]:
        """Return cos and sin per layer, computed once per distinct rotation."""
        found: dict[object, Angles] = {}
        by_layer: dict[int, Angles] = {}
        for layer, rotation in enumerate(self.rotations):
            key = id(rotation)
            if key not in found:
                found[key] = rotation.angles(positions)
            by_layer[layer] = found[key]
        return by_layer

    def place(
        self, start: int, kvs: Sequence[KV], positions: Tensor, angles: dict[int, Angles]
    ) -> None:
        """Write chunks from slot ``start`` on, one after the other, keys turned to ``positions``.

        ``angles`` are those of ``positions``. The slots must have been reserved. Chunks that are
        still arriving are placed layer by layer, when a pass comes to a layer.
        """
        stop = start + positions.numel()
        self.positions[start:stop] = positions
        self.n = max(self.n, stop)
        new = _Pending(start, stop, list(kvs), angles, set(range(len(self.rotations))))
        self._pending.append(new)
        if not any(isinstance(kv, Arriving) for kv in kvs):
            self.settle()

    @property
    def pending(self) -> bool:
        """Whether rows of some layer wait for `settle`."""
        return bool(self._pending)

    def settle(self, layer: int | None = None) -> None:
        """Write what is still to be placed in a layer, by default in all. Raises LoadFailed."""
        for each in self._pending:
            for i in [layer] if layer is not None else sorted(each.layers):
                if i in each.layers:
                    span = slice(each.start, each.stop)
                    keys = _joined([kv.k[i] for kv in each.kvs])
                    self._set_keys(i, span, keys, each.angles[i])
                    self.v[i][span] = _joined([kv.v[i] for kv in each.kvs])
                    each.layers.remove(i)
        self._pending = [each for each in self._pending if each.layers]

    def clone(self, layers: int | None = None) -> KVRows:
        """Copy the rows there are; with ``layers``, share all layers from that one on."""
        self.settle()
        twin = self._empty()
        upto = len(self.k) if layers is None else layers
        twin.n, twin.capacity = self.n, self.capacity
        twin.positions = self.positions.clone()
        twin.k = [t.clone() if i < upto else t for i, t in enumerate(self.k)]
        twin.v = [t.clone() if i < upto else t for i, t in enumerate(self.v)]
        return twin

    def _empty(self) -> KVRows:
        return KVRows(self.shapes, self.rotations, self.dtype, self.device)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        heads, width = old.shape[1:]
        new = old.new_empty(heads, capacity, width).transpose(0, 1)
        new[: self.n] = old[: self.n]
        return new

    def _set_keys(self, layer: int, span: slice, keys: Tensor, angles: Angles) -> None:
        self.rotations[layer].apply(keys, angles, out=self.k[layer][span])

    def check_integrity(self) -> None:
        """Raise AssertionError unless positions increase strictly and sizes agree."""
        assert self.n <= self.capacity, f"{self.n} rows in {self.capacity} slots"
        used = self.positions[: self.n]
        assert bool((used[1:] > used[:-1]).all()), "positions do not increase"
        for tensor in (*self.k, *self.v):
            assert tensor.shape[0] == self.capacity, "layers of different capacity"


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

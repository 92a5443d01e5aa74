"""The KV rows of one context, ready for attention.

Rows are kept sorted by position, without holes, so that what a query sees is an interval of slots,
and decoding reads one contiguous slice and needs no mask::

    slot       0    1    2    3    4    5   ...  n-1 |  free up to capacity
    position   0    1    2    7    8    9   ...      |  ("keep" leaves gaps in positions only)
    layer      keys rotated to their position, values as computed: `run/layers.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.base import NO_SLOTS, Ints, LayerInfo
from kvweave.run.layers import At, LayerRows, RawRows
from kvweave.run.pool import PooledRows
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.thinned import ThinnedRows
from kvweave.run.upload import up
from kvweave.store.arriving import Arriving
from kvweave.store.kv import KV

SLACK = 32  # one row more for so many asked for: growing is not a copy each turn


@dataclass(slots=True)
class _Run:
    """Chunks to place at ``[start, stop)`` of the layers still to be written."""

    start: int
    stop: int
    kvs: list[KV]
    angles: dict[int, Angles]  # by id of a rotation
    layers: set[int]

    @property
    def arrived(self) -> bool:
        return all(kv.load.ended for kv in self.kvs if isinstance(kv, Arriving))

    @property
    def complete(self) -> bool:
        return all(kv.load.complete for kv in self.kvs if isinstance(kv, Arriving))

    def cut(self, stop: int) -> None:
        """Leave out what stands from slot ``stop`` on: it is not waited for."""
        kept, at = [], self.start
        for kv in self.kvs:
            if at < stop:
                kept.append(kv.rows(0, min(kv.n_tokens, stop - at)))
            at += kv.n_tokens
        n = stop - self.start
        self.kvs, self.stop = kept, stop
        self.angles = {id: (cos[:n], sin[:n]) for id, (cos, sin) in self.angles.items()}


class KVRows:
    """Rows of every layer, as `base.Rows` asks; ``layers`` have no room yet."""

    def __init__(
        self, infos: Sequence[LayerInfo], layers: Sequence[LayerRows], device: torch.device
    ) -> None:
        self.infos = list(infos)
        self.layers = list(layers)
        self.lossy = any(layer.lossy for layer in layers)
        self.device = device
        self.n = 0
        self.capacity = 0
        self.positions: Ints = NO_SLOTS
        self._pending: list[_Run] = []

    @property
    def n_bytes(self) -> int:
        """Bytes allocated, free slots included."""
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def n_freed(self) -> int:
        """Rows freed, summed over layers and heads."""
        return sum(layer.n_freed for layer in self.layers)

    def gone(self) -> Ints:
        """Return the slots that no head of any layer keeps."""
        left = None
        for layer in self.layers if self.n_freed else ():
            freed = layer.gone()
            left = freed if left is None else np.intersect1d(left, freed)
        return NO_SLOTS if left is None else left

    def bytes_for(self, n: int) -> int:
        """Return the bytes that will be allocated once ``n`` rows are reserved."""
        capacity = self._capacity_for(n)
        return sum(layer.bytes_at(max(capacity, layer.capacity)) for layer in self.layers)

    def _capacity_for(self, n: int) -> int:
        return self.capacity if n <= self.capacity else n + n // SLACK

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows in all; keeps the rows there are. Raises LoadFailed."""
        if n <= self.capacity:
            return
        self.settle()
        capacity = self._capacity_for(n)
        for i, layer in enumerate(self.layers):
            # one layer at a time: the peak is one layer, not a copy. Those that have more room
            # already grew in a call that failed behind them
            if layer.capacity < capacity:
                self.layers[i] = layer.grown(capacity, self.n)
        positions = np.zeros(capacity, np.int64)
        positions[: self.n] = self.positions[: self.n]
        self.positions, self.capacity = positions, capacity

    def truncate(self, n: int) -> None:
        """Forget rows ``[n, ...)``; they are overwritten by what comes next."""
        self._pending = [run for run in self._pending if run.start < n]
        for run in self._pending:
            if n < run.stop:
                run.cut(n)
        self.layers = [layer.cut(n) for layer in self.layers]
        self.n = min(self.n, n)

    def expect(self, slots: Ints, positions: Ints) -> None:
        """A pass begins that writes these rows."""
        self.positions[slots] = positions
        self.n = max(self.n, int(slots[-1]) + 1)

    def write(self, layer: int, at: At, keys: Tensor, values: Tensor) -> None:
        """Write rotated rows [row, head, dim] of a layer whose pending chunks are settled."""
        self.layers[layer].write(at, keys, values)

    def place(self, runs: Sequence[tuple[int, Sequence[KV]]], positions: Ints) -> None:
        """Write chunks one after the other from each run's first slot on; keys are turned to
        ``positions`` [slot, from 0].

        The slots must have been reserved. Chunks that are still arriving are placed layer by
        layer, when a pass comes to a layer.
        """
        if not runs:
            return
        made = [
            _Run(start, start + sum(kv.n_tokens for kv in kvs), list(kvs), {}, set())
            for start, kvs in runs
        ]
        self.positions[: len(positions)] = positions
        self.n = max(self.n, made[-1].stop)
        at = 0
        slots = np.concatenate([np.arange(run.start, run.stop) for run in made])
        angles = self._angles(positions[slots])
        if all(run.complete for run in made) and self._place_together(made, slots, angles):
            return
        for run in made:
            span = slice(at, at := at + run.stop - run.start)
            run.angles = {id: (cos[span], sin[span]) for id, (cos, sin) in angles.items()}
            run.layers = set(range(len(self.layers)))
            if run.complete:
                self._write(run)
            else:
                self._pending.append(run)

    def _place_together(self, runs: Sequence[_Run], slots: Ints, angles: dict[int, Angles]) -> bool:
        """Write all ``runs`` of a layer at once, where rows are kept so that this is possible."""
        pooled = [layer for layer in self.layers if isinstance(layer, PooledRows)]
        if len(pooled) < len(self.layers) or not all(layer.pool.turns for layer in pooled):
            return False
        there, kvs = up(slots, self.device), [kv for run in runs for kv in run.kvs]
        stacked = {id: torch.stack(both) for id, both in angles.items()}
        at = {start: there + start for start in {layer.start for layer in pooled}}
        for i, (layer, info) in enumerate(zip(pooled, self.infos, strict=True)):
            keys, values = _joined([kv.k[i] for kv in kvs]), _joined([kv.v[i] for kv in kvs])
            rotation = info.rotation
            layer.place_at(at[layer.start], rotation, keys, stacked[id(rotation)], values)
        return True

    def put(self, slots: Ints, kv: KV) -> None:
        """Write unrotated rows [slot] to slots whose positions are known. Raises LoadFailed."""
        self.settle()
        angles = self._angles(self.positions[slots])
        at = At.of(slots, self.device)
        for i, info in enumerate(self.infos):
            keys = info.rotation.apply(kv.k[i], angles[id(info.rotation)])
            self.write(i, at, keys, kv.v[i])

    def _angles(self, positions: Ints) -> dict[int, Angles]:
        """Return cos and sin by the id of each distinct rotation."""
        rotations: dict[int, Rotation] = {id(x.rotation): x.rotation for x in self.infos}
        there = up(positions, self.device)
        return {key: rotation.angles(there) for key, rotation in rotations.items()}

    @property
    def pending(self) -> bool:
        """Whether rows of some layer wait for `settle`."""
        return bool(self._pending)

    @property
    def arrived(self) -> bool:
        """Whether `settle` would wait for nothing."""
        return all(run.arrived for run in self._pending)

    def settle(self, layer: int | None = None) -> None:
        """Write what is still to be placed in a layer, by default in all. Raises LoadFailed."""
        if not self._pending:
            return
        for run in self._pending:
            self._write(run, layer)
        self._pending = [run for run in self._pending if run.layers]

    def _write(self, run: _Run, layer: int | None = None) -> None:
        span = slice(run.start, run.stop)
        for i in sorted(run.layers) if layer is None else {layer} & run.layers:
            keys = _joined([kv.k[i] for kv in run.kvs])
            values = _joined([kv.v[i] for kv in run.kvs])
            rotation = self.infos[i].rotation
            self.layers[i].place(span, rotation, keys, run.angles[id(rotation)], values)
            run.layers.remove(i)

    def read(self, layer: int, slots: Ints | None = None) -> tuple[Tensor, Tensor]:
        """Return copies of keys as rotated and of values [slot, head, dim] of a layer, as attention
        reads them: of ``slots``, by default of all rows. Raises LoadFailed."""
        self.settle(layer)
        at = At.of(np.arange(self.n) if slots is None else slots, self.device)
        keys, values = self.layers[layer].seen(at.where)
        return keys.transpose(0, 1).clone(), values.transpose(0, 1).clone()

    def clone(self, layers: int | None = None) -> KVRows:
        """Copy the rows there are; with ``layers``, share those of all layers from that one on.
        Raises LoadFailed."""
        self.settle()
        upto = len(self.layers) if layers is None else layers
        copied = [layer.grown(self.capacity, self.n) for layer in self.layers[:upto]]
        twin = KVRows(self.infos, copied + self.layers[upto:], self.device)
        twin.n, twin.capacity = self.n, self.capacity
        twin.positions = self.positions.copy()
        return twin

    def free(self, layer: int, head: int, slots: Ints) -> None:
        """Free the memory of rows of one layer and kv head: no query sees them from now on.

        Raises InvalidArgument for rows of 8 bits, LoadFailed.
        """
        self.settle(layer)
        rows = self.layers[layer]
        if isinstance(rows, RawRows):
            rows = ThinnedRows.of(rows, self.n)
        if not isinstance(rows, ThinnedRows):
            raise InvalidArgument("rows", "rows of 8 bits cannot be freed one by one", "raw")
        self.layers[layer] = rows.less(head, slots)

    def check_integrity(self) -> None:
        """Raise AssertionError unless positions increase strictly and sizes agree."""
        assert len(self.positions) == self.capacity, "positions of another capacity"
        used = self.positions[: self.n]
        assert bool((used[1:] > used[:-1]).all()), "positions do not increase"
        for layer in self.layers:
            assert layer.capacity >= self.capacity, "a layer with less room than is said"
            layer.check(self.n)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

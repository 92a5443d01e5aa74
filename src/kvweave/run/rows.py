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
from kvweave.run.below import BELOW
from kvweave.run.handing import HANDED_WHOLE
from kvweave.run.layers import At, LayerRows, MovableRows, RawRows, joined_rows
from kvweave.run.pool import PooledRows
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.states import StateRows, hold_chunks
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
    exact: int | None  # from this slot on states may be rounded; None: nowhere

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

    @property
    def forms(self) -> dict[str, int]:
        """Forms in which rows rest that are not as they were computed, and how many do, summed over
        layers and heads."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for form, n in layer.forms.items() if isinstance(layer, ThinnedRows) else ():
                found[form] = found.get(form, 0) + n
        return found

    def gone(self) -> Ints:
        """Return the slots that no head of any layer keeps."""
        left = None
        for layer in self.layers if self.n_freed else ():
            freed = layer.gone()
            left = freed if left is None else np.intersect1d(left, freed)
        return NO_SLOTS if left is None else left

    def bytes_for(self, n: int, exact: bool = False) -> int:
        """Return the bytes that will be allocated while ``n`` rows are reserved, with ``exact`` no
        more."""
        capacity = n if exact else self._capacity_for(n)
        return sum(layer.bytes_at(max(capacity, layer.capacity)) for layer in self.layers)

    def bytes_back(self, stay: int) -> int:
        """Return the bytes that freed rows take again where rows from slot ``stay`` on are to be others."""
        back = 0
        for layer in self.layers:
            for head in layer.heads if isinstance(layer, ThinnedRows) else ():
                here = len(head.slots) - int(np.searchsorted(head.slots, stay))
                back += (layer.capacity - stay - here) * head.row_bytes
        return back

    def _capacity_for(self, n: int) -> int:
        if n <= self.capacity:
            return self.capacity
        thinned = any(isinstance(layer, ThinnedRows) for layer in self.layers)
        return n + (min(n // SLACK, SLACK) if thinned else n // SLACK)

    def reserve(self, n: int, exact: bool = False) -> None:
        """Make room for ``n`` rows in all, with ``exact`` for no more; keeps the rows there are.
        Raises LoadFailed."""
        more = exact and any(layer.capacity > n for layer in self.layers)
        if (n == self.capacity and not more) or (n < self.capacity and not exact):
            return
        self.settle()
        capacity = max(n, self.n) if exact else self._capacity_for(n)
        for i, layer in enumerate(self.layers):
            # one layer at a time: the peak is one layer, not a copy. Those that have more room
            # already grew in a call that failed behind them
            if layer.capacity < capacity or (exact and layer.capacity > capacity):
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

    def write(self, layer: int, at: At, keys: Tensor, values: Tensor, original: Tensor) -> None:
        """Write rotated rows [row, head, dim] of a layer whose pending chunks are settled, and
        their unrotated keys where they are kept."""
        self.layers[layer].write(at, keys, values)
        self.layers[layer].originals(at, original)

    def place(
        self, runs: Sequence[tuple[int, Sequence[KV]]], positions: Ints, exact: int | None = None
    ) -> None:
        """Write chunks one after the other from each run's first slot on; keys are turned to
        ``positions`` [slot, from 0]. From slot ``exact`` on what they leave behind may be rounded.

        The slots must have been reserved. Chunks that are still arriving are placed layer by
        layer, when a pass comes to a layer.
        """
        if not runs:
            return
        made = [
            _Run(start, start + sum(kv.n_tokens for kv in kvs), list(kvs), {}, set(), exact)
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
            keys, values = joined_rows(kvs, i)
            rotation = info.rotation
            layer.place_at(at[layer.start], rotation, keys, stacked[id(rotation)], values)
            for run in runs:
                self._thin(i, run)
        return True

    def put(self, slots: Ints, kv: KV) -> None:
        """Write unrotated rows [slot] to slots whose positions are known. Raises LoadFailed."""
        self.settle()
        angles = self._angles(self.positions[slots])
        at = At.of(slots, self.device)
        for i, info in enumerate(self.infos):
            keys = info.rotation.apply(kv.k[i], angles[id(info.rotation)])
            self.write(i, at, keys, kv.v[i], kv.k[i])

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
            keys, values = joined_rows(run.kvs, i)
            rotation = self.infos[i].rotation
            self.layers[i].place(span, rotation, keys, run.angles[id(rotation)], values)
            hold_chunks(self.layers[i], i, run.start, run.kvs, run.exact)
            self._thin(i, run)
            run.layers.remove(i)

    def _thin(self, layer: int, run: _Run) -> None:
        """Free what thinned chunks of a run do not have in a layer."""
        lost, at = [NO_SLOTS] * self.infos[layer].shape.k_heads, run.start
        for kv in run.kvs:
            if kv.kept is not None:
                every = np.arange(kv.n_tokens)
                gone = [np.setdiff1d(every, offsets) + at for offsets in kv.kept[layer]]
                lost = [np.concatenate(both) for both in zip(lost, gone, strict=True)]
            at += kv.n_tokens
        if any(map(len, lost)):
            kept = zip(self.kept(layer), lost, strict=True)
            self._keep(layer, [np.setdiff1d(slots, gone) for slots, gone in kept])

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
        kept = self.kept(layer)
        kept[head] = np.setdiff1d(kept[head], slots)
        self.keep(layer, kept)

    def kept(self, layer: int) -> list[Ints]:
        """Return the slots that each kv head of a layer keeps, increasing."""
        rows = self.layers[layer]
        if isinstance(rows, ThinnedRows):
            return [slots[: np.searchsorted(slots, self.n)] for slots in rows.kept()]
        return [np.arange(self.n)] * self.infos[layer].shape.k_heads

    def packed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, row, dim] of what each head keeps, in the order of `kept`;
        behind a head's last row is padding. Raises LoadFailed."""
        self.settle(layer)
        rows = self.layers[layer]
        return rows.packed() if isinstance(rows, ThinnedRows) else rows.seen(slice(0, self.n))

    def keep(self, layer: int, slots: Sequence[Ints], ahead: int = 0) -> None:
        """Free all rows of a layer but each kv head's ``slots``, of those that it keeps; of what that frees
        room for ``ahead`` rows may stay, which `reserve` wants next.

        Raises InvalidArgument for rows of 8 bits, LoadFailed.
        """
        self.settle(layer)
        pool = getattr(self.layers[layer], "pool", None)
        self._keep(layer, slots, ahead)
        if pool is not None:
            pool.shrink()

    def _keep(self, layer: int, slots: Sequence[Ints], ahead: int = 0) -> None:
        rows = self.layers[layer]
        if isinstance(rows, ThinnedRows):
            self._set(layer, rows.only(slots, ahead))
        elif self.infos[layer].handed is not None:
            raise InvalidArgument("rows", HANDED_WHOLE)
        elif isinstance(rows, RawRows) and not isinstance(rows, MovableRows | StateRows):
            self.layers[layer] = ThinnedRows.of(rows, self.n, slots)
        else:
            reason = "rows of 8 bits, or made to be moved, cannot be freed one by one"
            raise InvalidArgument("rows", reason, "raw")

    def code(self, layer: int, form: str, slots: Sequence[Ints], ahead: int = 0) -> None:
        """Have each kv head's ``slots``, of those that it keeps, rest in fewer bits, as ``form`` says;
        `below`: these rest below memory, and all others in it. ``ahead`` as for `keep`.

        Raises InvalidArgument for rows of 8 bits, LoadFailed, NoSpace, StoreError.
        """
        if any(map(len, slots)) or form in self.forms:
            self.settle(layer)
            if not isinstance(self.layers[layer], ThinnedRows):
                self._keep(layer, self.kept(layer))
            rows = self.layers[layer]
            assert isinstance(rows, ThinnedRows)
            coded = rows.parted(slots) if form == BELOW else rows.coded(form, slots, ahead)
            self._set(layer, coded)

    def _set(self, layer: int, rows: ThinnedRows) -> None:
        """Have a layer kept so, which may have less room now."""
        self.layers[layer] = rows
        if rows.capacity < self.capacity:
            self.positions, self.capacity = self.positions[: rows.capacity], rows.capacity

    def below(self, layer: int) -> list[Ints]:
        """Return each kv head's slots that rest below memory, increasing."""
        rows, heads = self.layers[layer], range(self.infos[layer].shape.k_heads)
        under = rows.below if isinstance(rows, ThinnedRows) else None
        return [NO_SLOTS if under is None else under.slots(head) for head in heads]

    def move(self, kept: Ints, positions: Ints) -> None:
        """Forget all rows but those of slots ``kept``, which become slots 0, 1, ... and stand at
        ``positions``. Raises InvalidArgument for rows not made to be moved, LoadFailed."""
        moving = [layer for layer in self.layers if isinstance(layer, MovableRows)]
        if len(moving) < len(self.layers):
            raise InvalidArgument("rows", "these rows do not keep what moving them takes")
        self.settle()
        angles, there = self._angles(positions), up(kept, self.device)
        for layer, info in zip(moving, self.infos, strict=True):
            layer.move(there, info.rotation, angles[id(info.rotation)])
        self.n = n = len(kept)
        if self.capacity > 2 * n + SLACK:  # what moved away is memory freed
            self.layers = [layer.grown(n, n) for layer in moving]
            self.positions, self.capacity = np.empty(n, np.int64), n
        self.positions[:n] = positions

    def unrotated(self, layer: int) -> Tensor | None:
        """Return unrotated keys [head, slot, dim] of the rows there are, None where none are
        kept; do not write there."""
        rows = self.layers[layer]
        return rows.original[:, : self.n] if isinstance(rows, MovableRows) else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless positions increase strictly and sizes agree."""
        assert len(self.positions) == self.capacity, "positions of another capacity"
        assert bool((np.diff(self.positions[: self.n]) > 0).all()), "positions do not increase"
        for layer in self.layers:
            assert layer.capacity >= self.capacity, "a layer with less room than is said"
            layer.check(self.n)

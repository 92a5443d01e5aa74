"""What a context keeps of a mixer (`run/mixer.py`): its input rows, and states in front of some slots.

A state is good as long as no row before it is written again. As many are kept as take about the
bytes of the rows, one at least, spread over the context: an edit replays from the last one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvweave.run.base import Ints
from kvweave.run.carry import RoundedMap, StateMap
from kvweave.run.layers import At, LayerRows, RawRows
from kvweave.run.mixer import EMPTY, Mixer, MixerState
from kvweave.run.rotary import Angles, Rotation
from kvweave.store.kv import KV

MARKS = 8  # states of a context and mixer at most


@dataclass(slots=True, weakref_slot=True)
class MapHolder:
    """Where the map of a chunk in one layer is kept as long as the chunk's rows are."""

    map: StateMap | RoundedMap | None = None


class MapCache:
    """The maps of chunks in memory: of those made or asked for last, up to ``limit`` bytes.

    Where they would be more, the oldest rest in 8 bits, and go when that is too much. On a trained
    hybrid 8 bits cost 2 % of the drift without repair, 4 bits 160 % (docs/LOG.md).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._holders: Any = WeakIdKeyDictionary()
        self._used: dict[int, ReferenceType[MapHolder]] = {}  # by id, the last one used last
        self._lock = Lock()  # engines of several threads share it

    def holder(self, rows: Tensor) -> MapHolder:
        """Return the holder for the chunk that has ``rows`` in a layer: the same for this tensor."""
        with self._lock:
            found: MapHolder | None = self._holders.get(rows)
            if found is None:
                found = self._holders[rows] = MapHolder()
            return found

    def keep(self, holder: MapHolder, made: StateMap) -> None:
        """Keep a map, and let go of those that were not asked for since others were."""
        with self._lock:
            holder.map = made
            self._used = {key: known for key, known in self._used.items() if known() is not None}
            self._to_the_end(holder)
            n, others = self.n_bytes, [known() for known in list(self._used.values())[:-1]]
            for each in others:
                if n > self.limit and each is not None and isinstance(each.map, StateMap):
                    n -= each.map.n_bytes
                    each.map = RoundedMap.of(each.map)
                    n += each.map.n_bytes
            for each in others:
                if n > self.limit and each is not None and each.map is not None:
                    n -= each.map.n_bytes
                    each.map = None

    def used(self, holder: MapHolder) -> None:
        """Note that a map was asked for."""
        with self._lock:
            self._to_the_end(holder)

    def _to_the_end(self, holder: MapHolder) -> None:
        self._used.pop(id(holder), None)
        self._used[id(holder)] = ref(holder)

    @property
    def n_bytes(self) -> int:
        """Bytes of all maps."""
        every = [known() for known in list(self._used.values())]
        return sum(each.map.n_bytes for each in every if each is not None and each.map is not None)


MAPS = MapCache(512 << 20)


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Slots ``[start, stop)`` that hold all rows of a chunk as they were placed."""

    start: int
    stop: int
    holder: MapHolder
    exact: bool = True  # so that what it does to a state may not be rounded


class StateRows(RawRows):
    """Input rows of a mixer, and its state in front of some slots."""

    def __init__(self, k: Tensor, v: Tensor, mixer: Mixer) -> None:
        super().__init__(k, v)
        self.mixer = mixer
        self.marks: dict[int, MixerState] = {}
        self.spans: list[PlacedSpan] = []

    @classmethod
    def of(cls, mixer: Mixer, dtype: torch.dtype, device: torch.device) -> StateRows:
        """Return rows without room."""
        empty = RawRows.empty(mixer.shape, dtype, device)
        return cls(empty.k, empty.v, mixer)

    @property
    def n_bytes(self) -> int:
        return self.bytes_at(self.capacity)

    def bytes_at(self, capacity: int) -> int:
        return super().bytes_at(capacity) + self._room(capacity) * self.mixer.n_bytes

    def _room(self, capacity: int) -> int:
        """Return how many states are kept of so many rows."""
        if capacity == 0:
            return 0
        if not self.mixer.sums:
            return 0  # made of the last rows whenever it is asked for
        return max(1, min(MARKS, super().bytes_at(capacity) // max(1, self.mixer.n_bytes)))

    def grown(self, capacity: int, n: int) -> StateRows:
        raw = super().grown(capacity, n)
        new = StateRows(raw.k, raw.v, self.mixer)
        new.marks = {slot: state for slot, state in self.marks.items() if slot <= n}
        new.spans = [span for span in self.spans if span.stop <= n]
        new._trim()
        return new

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        super().write(at, keys, values)
        if len(at.slots):
            self._changed(at.slots)

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        super().place(span, rotation, keys, angles, values)
        self._changed(np.arange(span.start, span.stop))

    def holds(self, span: PlacedSpan) -> None:
        """Remember which rows are those of a chunk."""
        self.spans.append(span)
        self.spans.sort(key=lambda span: span.start)

    def cut(self, n: int) -> StateRows:
        new = StateRows(self.k, self.v, self.mixer)
        new.marks = {slot: state for slot, state in self.marks.items() if slot <= n}
        new.spans = [span for span in self.spans if span.stop <= n]
        return new

    def _changed(self, slots: Ints) -> None:
        self.marks = {slot: state for slot, state in self.marks.items() if slot <= slots[0]}
        whole = [
            np.searchsorted(slots, s.start) == np.searchsorted(slots, s.stop) for s in self.spans
        ]
        self.spans = [span for span, same in zip(self.spans, whole, strict=True) if same]

    def latest(self, slot: int) -> tuple[int, MixerState]:
        """Return the last slot up to ``slot`` in front of which the state is known, and that."""
        at = max((mark for mark in self.marks if mark <= slot), default=0)
        return at, self.marks.get(at, EMPTY)

    def mark(self, slot: int, state: MixerState) -> None:
        """Keep the state in front of a slot."""
        self.marks[slot] = state
        self._trim()

    def _trim(self) -> None:
        """Let go of states that are too many: those that stand closest to others, not the last."""
        while len(self.marks) > self._room(self.capacity):
            slots = sorted(self.marks)
            if len(slots) == 1:
                self.marks = {}
                return
            before = [0, *slots[:-2]]
            gaps = [b - a for a, b in zip(before, slots[1:], strict=True)]
            del self.marks[slots[gaps.index(min(gaps))]]

    def inputs(self, start: int, stop: int) -> Tensor:
        """Return input rows [1, row, width] of slots ``[start, stop)``."""
        return torch.cat((self.k[:, start:stop], self.v[:, start:stop]), -1)

    def picked(self, slots: Tensor) -> Tensor:
        """Return input rows [row, width] of some slots."""
        return torch.cat((self.k[0, slots], self.v[0, slots]), -1)

    def check(self, n: int) -> None:
        super().check(n)
        assert all(0 < slot <= n for slot in self.marks), "a state behind the rows"
        assert all(span.stop <= n for span in self.spans), "a chunk behind the rows"


def hold_chunks(
    rows: LayerRows, layer: int, start: int, chunks: Sequence[KV], exact: int | None
) -> None:
    """Note which slots of a layer are ``chunks``, one behind the other from ``start`` on, where it
    keeps the rows of a mixer; ``exact``: see `base.Rows.place`."""
    if isinstance(rows, StateRows):
        for kv in chunks:
            stop, holder = start + kv.n_tokens, MAPS.holder(kv.k[layer])
            rows.holds(PlacedSpan(start, stop, holder, exact is None or start < exact))
            start = stop

"""KV on its way to memory, layer by layer: who asks for a layer waits until it is there.

::

    load      layer 0 of every chunk, layer 1 of every chunk, ...   in a thread
    pass      layer 0: wait, place, compute; layer 1: wait, ...     overlaps with it
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from kvweave.errors import LoadFailed
from kvweave.store.kv import KV, LayerShape

GRACE = 0.2  # seconds in which a reader that is late says so itself


class Load:
    """What has arrived of one chunk; filled by a thread, waited for by others."""

    def __init__(
        self,
        key: int,
        shapes: Sequence[LayerShape],
        n_tokens: int,
        itemsize: int,
        lossy: bool = False,
        ends: float = math.inf,
    ) -> None:
        """``ends``: of `time.monotonic`; nobody waits for a layer longer than shortly after it."""
        self.key, self.shapes, self.n_tokens, self.itemsize = key, shapes, n_tokens, itemsize
        self.kv = KV([], [], lossy)
        self._ends = ends
        self._fences: list[Callable[[], None]] = []  # of each layer
        self._failed = ""
        self._arrived = threading.Condition()

    def add(self, k: Tensor, v: Tensor, fence: Callable[[], None] = lambda: None) -> None:
        """Unless it was given up, hand over the next layer. Its copy may be under way: who waits for the layer calls
        ``fence``, behind which the device uses it."""
        with self._arrived:
            if self._failed:
                return
            self._fences.append(fence)
            self.kv.k.append(k)
            self.kv.v.append(v)
            self._arrived.notify_all()

    def fail(self, why: str) -> None:
        """Nothing more will come."""
        with self._arrived:
            self._failed = self._failed or why
            self._arrived.notify_all()

    def wait(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, for the current stream. Raises LoadFailed."""
        if layer >= len(self.kv.v):
            with self._arrived:
                left = None if math.isinf(self._ends) else self._ends - time.monotonic() + GRACE
                self._arrived.wait_for(lambda: layer < len(self.kv.v) or self._failed, left)
                if layer >= len(self.kv.v):
                    self._failed = self._failed or "late: nothing came by the deadline"
                if layer >= len(self.kv.v):
                    raise LoadFailed(self.key, self._failed)
        self._fences[layer]()
        return self.kv.k[layer], self.kv.v[layer]

    @property
    def complete(self) -> bool:
        return len(self.kv.v) == len(self.shapes)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.complete or bool(self._failed)


class Arriving(KV):
    """Rows ``[start, stop)`` of a chunk that is being loaded; otherwise as any KV."""

    __slots__ = ("load", "start", "stop")

    def __init__(self, load: Load, start: int = 0, stop: int | None = None) -> None:
        self.load, self.start = load, start
        self.stop = load.n_tokens if stop is None else stop
        super().__init__(_Waiting(self, 0), _Waiting(self, 1), load.kv.lossy)

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def n_bytes(self) -> int:
        return self.n_tokens * self.load.itemsize * sum(s.width for s in self.load.shapes)

    def rows(self, start: int, stop: int) -> KV:
        """Return a view of rows ``[start, stop)``, which may be arriving as well."""
        if self.load.complete:
            for layer in range(len(self.load.shapes)):
                self.load.wait(layer)
            return self.load.kv.rows(self.start + start, self.start + stop)
        return Arriving(self.load, self.start + start, self.start + stop)


class _Waiting(list[Tensor]):
    """The keys, or the values, of every layer; asking for one waits for it."""

    def __init__(self, kv: Arriving, which: int) -> None:
        self._kv, self._which = kv, which

    def __getitem__(self, layer: int) -> Tensor:  # type: ignore[override]
        found = self._kv.load.wait(layer)[self._which]
        return found[self._kv.start : self._kv.stop]

    def __len__(self) -> int:
        return len(self._kv.load.shapes)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[layer] for layer in range(len(self)))

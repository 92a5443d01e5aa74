"""KV on its way to memory, layer by layer: who asks for a layer waits until it is there.

::

    load      layer 0 of every chunk, layer 1 of every chunk, ...   in a thread
    pass      layer 0: wait, place, compute; layer 1: wait, ...     overlaps with it
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import LoadFailed
from kvweave.store.kv import KV, Offsets
from kvweave.store.record.transfer import Expected

GRACE = 0.2  # seconds in which a reader that is late says so itself


class Load:
    """What has arrived of one chunk; filled by a thread, waited for by others."""

    def __init__(
        self,
        key: int,
        about: Expected,
        lossy: bool = False,
        ends: float = math.inf,
    ) -> None:
        """``ends``: of `time.monotonic`; nobody waits for a layer longer than shortly after it."""
        self.key, self.about = key, about
        self.kv = KV([], [], lossy, span=about.n_tokens)  # its `kept` comes with the last layer
        self.kept: list[Offsets] = []  # of the layers of a thinned chunk
        self._ends = ends
        self._fences: list[Callable[[], None]] = []  # of each layer
        self._failed = ""
        self._arrived = threading.Condition()

    def add(
        self,
        k: Tensor,
        v: Tensor,
        fence: Callable[[], None] = lambda: None,
        kept: Offsets | None = None,
    ) -> None:
        """Unless it was given up, hand over the next layer; of a thinned chunk with what was
        ``kept`` [kv_head, row] there. Its copy may be under way: who waits for the layer calls
        ``fence``, behind which the device uses it."""
        with self._arrived:
            if self._failed:
                return
            if kept is not None:
                self.kept.append(kept)
                if len(self.kept) == len(self.about.shapes):
                    self.kv.kept = np.stack(self.kept)
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
                    raise LoadFailed(self.key, self._failed)
        self._fences[layer]()
        return self.kv.k[layer], self.kv.v[layer]

    @property
    def complete(self) -> bool:
        return len(self.kv.v) == len(self.about.shapes)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        late = time.monotonic() > self._ends + GRACE
        return self.complete or bool(self._failed) or late


class Arriving(KV):
    """Rows ``[start, stop)`` of a chunk that is being loaded; otherwise as any KV."""

    __slots__ = ("load", "start", "stop")

    def __init__(self, load: Load, start: int = 0, stop: int | None = None) -> None:
        self.load, self.start = load, start
        self.stop = load.about.n_tokens if stop is None else stop
        span = start, self.stop
        kept: Any = None if load.about.n_rows is None else _Waiting(load, span, 2)
        k, v = _Waiting(load, span, 0), _Waiting(load, span, 1)
        super().__init__(k, v, load.kv.lossy, kept, self.stop - start)

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def n_bytes(self) -> int:
        return self.load.about._replace(n_tokens=self.n_tokens).n_bytes

    def rows(self, start: int, stop: int) -> KV:
        """Return a view of rows ``[start, stop)``, which may be arriving as well."""
        cut = Arriving(self.load, self.start + start, self.start + stop)
        return cut.whole() if self.load.complete else cut

    def whole(self) -> KV:
        """Wait for every layer. Raises LoadFailed."""
        for layer in range(len(self.load.about.shapes)):
            self.load.wait(layer)
        return self.load.kv.rows(self.start, self.stop)

    def clone(self, device: torch.device | None = None) -> KV:
        """Wait for every layer, and copy it. Raises LoadFailed."""
        return self.whole().clone(device)


class _Waiting(list[Any]):
    """The keys, the values, or what was kept of every layer; asking for one waits for it.

    It does not know its `Arriving`: in a circle both, and all rows, would live until Python looks.
    """

    def __init__(self, load: Load, span: tuple[int, int], which: int) -> None:
        self._load, self._span, self._which = load, span, which

    def __getitem__(self, layer: int) -> Any:  # type: ignore[override]
        load, (k, v) = self._load, self._load.wait(layer)
        kept = load.kept[layer][None] if load.kept else None
        cut = KV([k], [v], kept=kept, span=load.about.n_tokens).rows(*self._span)
        found: tuple[Any, ...] = cut.k, cut.v, cut.kept
        return found[self._which][0]

    def __len__(self) -> int:
        return len(self._load.about.shapes)

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))

"""KV between the host and the device it is used on, with nobody waiting for the copies.

::

    reader's thread   read layer 0 | copy it, event 0; read layer 1 | copy it, event 1; ...
    stream of copies                        |--- layer 0 ---|           |--- layer 1 ---|
    stream of passes  ...                          wait for event 0, place, compute | wait for 1 ...

The memory copied to is that of the stream of passes, from before the first copy to after the last:
nothing of it is given to anybody else while a copy is under way, whoever loses interest in it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvweave.store.kv import KV, LayerShape
from kvweave.store.pages import buffer

PAGEABLE = ("cpu", "mps")  # no memory is pinned for these, and they have no streams

Layer = tuple[Tensor, Tensor]  # keys and values
Fence = Callable[[], None]  # what the current stream does from then on is behind the copy


def _nothing() -> None:
    """Wait for nothing."""


class Staging:
    """Where KV is used on the host there is nothing to copy; `Side` does it for other devices."""

    def buffer(self, n: int) -> memoryview:
        """Return ``n`` bytes to read to, aligned for direct reads."""
        return buffer(n)

    def room(self, shapes: Sequence[LayerShape], n: int, dtype: torch.dtype) -> KV | None:
        """Return memory for `up` to copy ``n`` rows to, if it copies; called by who will use it."""
        return None

    def up(self, rows: Layer, room: KV | None, layer: int) -> tuple[Tensor, Tensor, Fence]:
        """Bring keys and values of a layer to ``room``; return them there, to be used behind the
        fence. The rows must not change before `settle`."""
        return *rows, _nothing

    def settle(self) -> None:
        """Wait until what went up is there."""

    def down(self, kv: KV) -> Callable[[], KV]:
        """Begin to bring KV to the host; what is returned waits for it, in any thread."""
        return lambda: kv


HOST = Staging()


class Side(Staging):
    """Copies through pinned memory on streams of their own, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._up, self._down = (self._module.Stream(device) for _ in range(2))
        self._under_way: deque[tuple[Any, list[Tensor]]] = deque()  # copies and their sources
        self._lock = threading.Lock()

    def buffer(self, n: int) -> memoryview:
        """Return pinned memory."""
        with self._module.stream(self._up):
            pinned = torch.empty(max(n, 1), dtype=torch.uint8, pin_memory=True)
        return pinned.numpy().data[:n]

    def room(self, shapes: Sequence[LayerShape], n: int, dtype: torch.dtype) -> KV | None:
        """Return memory on the device; what was done with it before is over when a copy begins."""
        room = KV.empty(shapes, n, dtype, self.device)
        self._up.wait_stream(self._module.current_stream(self.device))
        return room

    def up(self, rows: Layer, room: KV | None, layer: int) -> tuple[Tensor, Tensor, Fence]:
        """Copy on the stream for it; decoded rows are in no pinned memory and are copied to some."""
        assert room is not None, "no room was made"
        with self._module.stream(self._up):
            sources = [t if t.is_pinned() else t.pin_memory() for t in rows]
            targets = room.k[layer], room.v[layer]
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = self._up.record_event()
        self._hold(copied, sources)

        def fence() -> None:
            self._module.current_stream(self.device).wait_event(copied)

        return *targets, fence

    def _hold(self, copied: Any, sources: list[Tensor]) -> None:
        """Keep what a copy reads until it is over, and let go of what others have read."""
        with self._lock:
            self._under_way.append((copied, sources))
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()

    def settle(self) -> None:
        """Wait for the copies; pinned memory may be used again from then on."""
        with self._lock:
            begun, self._under_way = self._under_way, deque()
        self._up.synchronize()
        begun.clear()

    def down(self, kv: KV) -> Callable[[], KV]:
        """Copy on the stream for it, behind what is computed now."""
        self._down.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._down):
            k, v = ([self._on_host(t) for t in tensors] for tensors in (kv.k, kv.v))
            copied = self._down.record_event()

        def landed(source: KV = kv) -> KV:  # which lives until the copy is over
            copied.synchronize()
            return KV(k, v, source.lossy, source.kept, source.span)

        return landed

    def _on_host(self, there: Tensor) -> Tensor:
        host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        return host.copy_(there, non_blocking=True)


def staging(device: torch.device) -> Staging:
    """Return what brings KV to ``device`` and back."""
    return HOST if device.type in PAGEABLE else Side(device)

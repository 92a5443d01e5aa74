"""Calls that may hang, done aside: each in a slot with a thread and memory of its own.

A caller that cannot wait longer leaves, and takes nothing back: what comes late goes into the
slot's memory, and the slot is free again when the call ends, if it ever does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvweave.chunk.background import Background, Calls, answer
from kvweave.store.tier.limit import Limit, TimeUp

T = TypeVar("T")
SMALLEST = 1 << 20  # bytes of a slot's memory
KEPT = 64 << 20  # bytes of memory that a slot keeps between calls
TOGETHER = 64, 16 << 20  # values, and bytes, in one call
ALIGN = 64  # bytes: where values begin in a slot's memory


class Slot:
    """A thread, and ``memory`` that begins at ``address``."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")
        self.address = 0
        self._work: Calls = queue.SimpleQueue()
        self._future: Future[Any] | None = None
        Background(partial(answer, self._work))

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Do ``call`` in the thread of the slot, after what is under way there."""
        future: Future[T] = Future()
        self._future = future
        self._work.put((call, future))
        return future

    def run(self, limit: Limit, call: Callable[[], T]) -> T:
        """Return what ``call`` returns or raise what it raises; TimeUp while it still runs."""
        future = self.start(call)
        try:
            return future.result(limit.left())
        except TimeoutError as error:
            if not future.done():
                raise TimeUp from error
        return future.result()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` when nothing runs in the slot any more: now, or from its thread."""
        if self._future is None:
            then()
        else:
            self._future.add_done_callback(lambda _: then())

    def stop(self) -> None:
        """Let the thread end."""
        self._work.put(None)


class Slots:
    """``n`` slots; ``register`` and ``unregister`` are told their memory as (address, bytes)."""

    def __init__(
        self,
        n: int,
        register: Callable[[int, int], None] = lambda address, n: None,
        unregister: Callable[[int], object] = lambda address: None,
    ) -> None:
        self._register, self._unregister = register, unregister
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()
        self._n = n
        for _ in range(n):
            self._free.put(Slot())

    @contextlib.contextmanager
    def take(self, limit: Limit, n_bytes: int = 0) -> Iterator[Slot]:
        """Lend a slot with at least ``n_bytes`` of memory; raise TimeUp when all stay busy."""
        try:
            slot = self._free.get(timeout=limit.left())
        except queue.Empty as error:
            raise TimeUp from error
        try:
            if n_bytes > slot.memory.nbytes:
                self._grow(slot, n_bytes)
            yield slot
        finally:
            slot.when_done(lambda: self._take_back(slot))

    def close(self, limit: Limit) -> bool:
        """Wait for all slots and end them; say whether nothing is running any more."""
        for _ in range(self._n):
            try:
                slot = self._free.get(timeout=limit.left())
            except (queue.Empty, TimeUp):
                return False
            self._n -= 1
            self._forget(slot)
            slot.stop()
        return True

    def _take_back(self, slot: Slot) -> None:
        if slot.memory.nbytes > KEPT:
            self._forget(slot)
        self._free.put(slot)

    def _grow(self, slot: Slot, n_bytes: int) -> None:
        self._forget(slot)
        n = max(SMALLEST, 1 << (n_bytes - 1).bit_length())
        whole = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        self._register(address, n)
        slot.memory, slot.address = memoryview(whole), address

    def _forget(self, slot: Slot) -> None:
        if slot.address:
            self._unregister(slot.address)
        slot.memory, slot.address = memoryview(b""), 0


_Item = TypeVar("_Item")


def batches(
    items: Sequence[_Item], sizes: Iterable[int], most: int = TOGETHER[1]
) -> Iterator[list[_Item]]:
    """Yield neighbours that go together, up to ``most`` bytes; what is larger goes alone."""
    batch: list[_Item] = []
    n_bytes = 0
    for item, n in zip(items, sizes, strict=True):
        if batch and (len(batch) == TOGETHER[0] or n_bytes + n > most):
            yield batch
            batch, n_bytes = [], 0
        batch.append(item)
        n_bytes += n
    if batch:
        yield batch


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where values of these sizes begin in a slot, and the bytes of all."""
    starts, end = [], 0
    for n in sizes:
        starts.append(end)
        end += -(-n // ALIGN) * ALIGN
    return starts, end

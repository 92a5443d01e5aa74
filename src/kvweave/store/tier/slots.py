"""Calls that may hang, done aside: each in a slot with a thread and memory of its own.

A caller that cannot wait longer leaves, and takes nothing back: what comes late goes into the
slot's memory, and the slot is free again when the call ends, if it ever does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.limit import Limit, TimeUp

T = TypeVar("T")
SMALLEST = 1 << 20  # bytes of a slot's memory
TOGETHER = 64, 16 << 20  # values and bytes in one call
ALIGN = 64  # bytes: where values begin in a slot's memory


class Slot:
    """A thread, and ``memory`` that begins at ``address``."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")
        self.address = 0
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._future: Future[Any] | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, limit: Limit, call: Callable[[], T]) -> T:
        """Return what ``call`` returns or raise what it raises; TimeUp while it still runs."""
        future: Future[T] = Future()
        self._future = future
        self._work.put((call, future))
        try:
            return future.result(limit.left())
        except TimeoutError as error:
            raise TimeUp from error

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` when nothing runs in the slot any more: now, or from its thread."""
        if self._future is None:
            then()
        else:
            self._future.add_done_callback(lambda _: then())

    @property
    def result(self) -> Any:
        """What the last call returned, None if it raised or still runs."""
        future = self._future
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def stop(self) -> None:
        """Let the thread end."""
        self._work.put((_stop, Future()))

    def _serve(self) -> None:
        while True:
            call, future = self._work.get()
            if call is _stop:
                return
            try:
                made = call()
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            else:
                future.set_result(made)


def _stop() -> None:
    raise AssertionError("a mark, not called")


class Slots:
    """``n`` slots; ``register`` and ``unregister`` are told their memory as (address, bytes)."""

    def __init__(
        self, n: int, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        self._register, self._unregister = register, unregister
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()
        self._all = [Slot() for _ in range(n)]
        for slot in self._all:
            self._free.put(slot)

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
            slot.when_done(lambda: self._free.put(slot))

    def _grow(self, slot: Slot, n_bytes: int) -> None:
        self._forget(slot)
        n = max(SMALLEST, 1 << (n_bytes - 1).bit_length())
        whole = mmap.mmap(-1, n)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        self._register(address, n)
        slot.memory, slot.address = memoryview(whole), address

    def _forget(self, slot: Slot) -> None:
        if slot.address:
            self._unregister(slot.address)
        slot.memory, slot.address = memoryview(b""), 0

    def close(self, limit: Limit) -> bool:
        """Wait for all slots and end them; say whether nothing is running any more."""
        for _ in self._all:
            try:
                slot = self._free.get(timeout=limit.left())
            except (queue.Empty, TimeUp):
                return False
            self._forget(slot)
            slot.stop()
        return True


class Turns:
    """Who writes a key is alone with it. Waiting ends with TimeUp."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[str] = Counter()
        self._writers: set[str] = set()

    @contextlib.contextmanager
    def reading(self, keys: Iterable[str], limit: Limit) -> Iterator[None]:
        """While inside, nobody writes these keys."""
        wanted = set(keys)
        with self._changed:
            while wanted & self._writers:
                self._changed.wait(limit.left())
            self._readers.update(wanted)
        try:
            yield
        finally:
            with self._changed:
                self._readers.subtract(wanted)
                self._readers += Counter()  # drops those at zero
                self._changed.notify_all()

    def write(self, keys: Iterable[str], limit: Limit) -> None:
        """Wait until nobody reads or writes these keys, and keep others away until `wrote`."""
        wanted = set(keys)
        with self._changed:
            while wanted & self._writers:
                self._changed.wait(limit.left())
            self._writers |= wanted  # from here on no reader comes in
            try:
                while wanted & self._readers.keys():
                    self._changed.wait(limit.left())
            except TimeUp:
                self._writers -= wanted
                self._changed.notify_all()
                raise

    def wrote(self, keys: Iterable[str]) -> None:
        """Let others to these keys again."""
        with self._changed:
            self._writers -= set(keys)
            self._changed.notify_all()


_Item = TypeVar("_Item", Put, Get)


def batches(items: Sequence[_Item], sizes: Sequence[int]) -> Iterator[list[_Item]]:
    """Yield neighbours that go together; what is empty or larger than a batch goes alone."""
    batch: list[_Item] = []
    keys: set[str] = set()
    n_bytes = 0
    for item, n in zip(items, sizes, strict=True):
        alone = not 0 < n <= TOGETHER[1]
        full = len(batch) == TOGETHER[0] or n_bytes + n > TOGETHER[1]
        if batch and (alone or full or item.key in keys or n_bytes == 0):
            yield batch
            batch, keys, n_bytes = [], set(), 0
        batch.append(item)
        keys.add(item.key)
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


def scatter(memory: memoryview, buffers: Sequence[memoryview], *, into: bool) -> None:
    """Copy from ``memory`` into the buffers one after the other, or the other way round."""
    start = 0
    for view in (buffer.cast("B") for buffer in buffers if buffer.nbytes):
        piece = memory[start : start + view.nbytes]
        if into:
            view[:] = piece
        else:
            piece[:] = view
        start += view.nbytes

"""A tier whose calls end at their deadline, whatever the device below it does.

::

    caller   hand over, wait until the deadline  -> outcomes, or late
    thread   the call, with the caller's buffers -> goes on, if it must, with nobody waiting

A thread that a device holds is left to it; there are `THREADS`, so as many calls may hang, and those
after them are late too, until one comes back. Large batches of reads are divided among threads, so
that the device has several requests at a time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvweave.chunk.background import Background, silent, within
from kvweave.errors import of_system
from kvweave.store.tier.base import LATE, Get, Outcome, Put, Tier
from kvweave.store.tier.keys import n_bytes_of

THREADS = 8
APART = 1 << 18  # bytes of reads that are worth a thread of their own
AT_ONCE = 4  # threads that one batch is divided among
QUIET = 4.0  # seconds without a sign of life after which nothing is opened
LISTED = 1024  # keys listed at a time
PATIENCE = 30.0  # seconds of a call without a deadline, and as long again for each 256 MiB
T = TypeVar("T")


class Guarded:
    """``tier`` behind threads; closed with it."""

    def __init__(self, tier: Tier) -> None:
        self.tier, self.name, self.shared = tier, tier.name, tier.shared
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_threads = self._n_busy = 0

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        ends = _ends(deadline, sum(n_bytes_of(put.data) for put in puts))
        call = partial(self.tier.put, puts, durable=durable, deadline=ends)
        return self._wait(self._begin(call), ends, [_over(deadline)] * len(puts))

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        sizes = [n_bytes_of(get.into) for get in gets]
        ends = _ends(deadline, sum(sizes))
        groups = list(_groups(gets, sizes))
        begun = [self._begin(partial(self.tier.get, group, deadline=ends)) for group in groups]
        late = _over(deadline)
        return [
            outcome
            for group, future in zip(groups, begun, strict=True)
            for outcome in self._wait(future, ends, [late] * len(group))
        ]

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        ends = _ends(deadline, 0)
        late: list[int | Outcome] = [_over(deadline)] * len(keys)
        return self._wait(self._begin(partial(self.tier.look, keys, deadline=ends)), ends, late)

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        ends = _ends(deadline, 0)
        late = [_over(deadline)] * len(keys)
        return self._wait(self._begin(partial(self.tier.discard, keys, deadline=ends)), ends, late)

    def keys(self) -> Iterator[str]:
        """Yield keys. Raises StoreError, also when for `QUIET` seconds none came."""
        rest = self._soon(lambda: iter(self.tier.keys()))
        while some := self._soon(lambda: list(islice(rest, LISTED))):
            yield from some

    @property
    def n_bytes(self) -> int:
        return self.tier.n_bytes

    def check_integrity(self) -> None:
        self.tier.check_integrity()

    def close(self) -> None:
        self.tier.close()
        with self._lock:
            for _ in range(self._n_threads):
                self._calls.put((_stop, Future()))
            self._n_threads = 0

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._n_busy += 1
            if self._n_busy > self._n_threads < THREADS:
                self._n_threads += 1
                Background(self._serve, "kvweave-tier")
        self._calls.put((call, future))
        return future

    def _soon(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns. Raises StoreError when it takes longer than `QUIET`."""
        try:
            return self._begin(call).result(QUIET)
        except TimeoutError as error:
            raise silent(self.name) from error

    def _wait(self, future: Future[T], ends: float, late: T) -> T:
        try:
            return future.result(max(0.0, ends - time.monotonic()))
        except TimeoutError:
            future.cancel()  # if it has not begun it never does
            return late

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            if call is _stop:
                return
            if future.set_running_or_notify_cancel():
                try:
                    made = call()
                except BaseException as error:  # it is the caller's
                    future.set_exception(error)
                else:
                    future.set_result(made)
                    del made
            del call, future  # buffers of callers among them
            with self._lock:
                self._n_busy -= 1


def in_time(call: Callable[[], T], directory: Path, undo: Callable[[T], object]) -> T:
    """Return what ``call`` returns; raise StoreError for an OSError, or after `QUIET` seconds.

    What it returns later is given to ``undo``.
    """
    try:
        return within(QUIET, call, directory, undo)
    except OSError as error:
        raise of_system(error, "open", directory) from error


def listed(tier: Tier) -> Iterator[tuple[str, int | Outcome]]:
    """Yield what is on a tier, and its bytes. Raises StoreError, also when it is silent."""
    keys = tier.keys()
    while some := list(islice(keys, LISTED)):
        sizes = tier.look(some, deadline=time.monotonic() + QUIET)
        if LATE in sizes:
            raise silent(tier.name)
        yield from zip(some, sizes, strict=True)


def _stop() -> None:
    raise AssertionError("a mark, not called")


def _ends(deadline: float | None, n_bytes: int) -> float:
    return time.monotonic() + PATIENCE * (1 + n_bytes / 2**28) if deadline is None else deadline


def _over(deadline: float | None) -> Outcome:
    return Outcome("failed", "the device does not answer") if deadline is None else LATE


def _groups(gets: Sequence[Get], sizes: Sequence[int]) -> Iterator[Sequence[Get]]:
    """Divide a batch into at most `AT_ONCE` runs of about as many bytes."""
    most = max(APART, -(-sum(sizes) // AT_ONCE))
    start, n = 0, 0
    for i, size in enumerate(sizes):
        if n and n + size > most:
            yield gets[start:i]
            start, n = i, 0
        n += size
    if start < len(gets):
        yield gets[start:]

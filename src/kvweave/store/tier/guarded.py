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
from typing import TypeVar

from kvweave.chunk.background import Background, Calls, NoThread, answer, silent, within
from kvweave.errors import of_system
from kvweave.store.tier.base import LATE, Get, Outcome, Put, Tier
from kvweave.store.tier.keys import n_bytes_of
from kvweave.store.tier.limit import Limit

THREADS = 8
APART = 1 << 18  # bytes of reads that are worth a thread, where one is made after the other
AT_ONCE = 4  # threads that one batch is divided among
QUIET = 4.0  # seconds without a sign of life after which nothing is opened
LISTED = 1024  # keys listed at a time
PATIENCE = 60.0  # seconds of a call without a deadline, beside those of its bytes
T = TypeVar("T")


class Guarded:
    """``tier`` behind threads; closed with it. ``apart``: bytes of reads worth a thread of their own."""

    def __init__(self, tier: Tier, apart: int = APART) -> None:
        self.tier, self.name, self.shared, self._apart = tier, tier.name, tier.shared, apart
        self._calls: Calls = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_threads = self._n_busy = 0

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        limit = Limit(deadline, PATIENCE, sum(n_bytes_of(put.data) for put in puts))
        call = partial(self.tier.put, puts, durable=durable, deadline=limit.ends)
        return _wait(self._begin(call), limit, len(puts))

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        sizes = [n_bytes_of(get.into) for get in gets]
        limit = Limit(deadline, PATIENCE, sum(sizes))
        groups = list(_groups(gets, sizes, self._apart))
        call = partial(self.tier.get, deadline=limit.ends)
        begun = [self._begin(partial(call, group)) for group in groups]
        return [
            outcome
            for group, future in zip(groups, begun, strict=True)
            for outcome in _wait(future, limit, len(group))
        ]

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        limit = Limit(deadline, PATIENCE)
        call = partial(self.tier.look, keys, deadline=limit.ends)
        return _wait(self._begin(call), limit, len(keys))

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        limit = Limit(deadline, PATIENCE)
        call = partial(self.tier.discard, keys, deadline=limit.ends)
        return _wait(self._begin(call), limit, len(keys))

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
                self._calls.put(None)
            self._n_threads = 0

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._n_busy >= self._n_threads < THREADS:
                try:
                    Background(partial(answer, self._calls, self._done), "kvweave-tier")
                    self._n_threads += 1
                except NoThread as error:
                    if not self._n_threads:  # else those that are there do it
                        future.set_exception(error)
                        return future
            self._n_busy += 1
        self._calls.put((call, future))
        return future

    def _soon(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns. Raises StoreError when it takes longer than `QUIET`."""
        try:
            return self._begin(call).result(QUIET)
        except TimeoutError as error:
            raise silent(self.name) from error

    def _done(self) -> None:
        with self._lock:
            self._n_busy -= 1


def _wait(future: Future[list[T]], limit: Limit, n: int) -> list[T | Outcome]:
    try:
        return [*future.result(max(0.0, limit.ends - time.monotonic()))]
    except TimeoutError:
        future.cancel()  # if it has not begun it never does
        return [limit.outcome()] * n
    except NoThread as error:
        return [Outcome("failed", str(error))] * n


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


def _groups(gets: Sequence[Get], sizes: Sequence[int], apart: int) -> Iterator[Sequence[Get]]:
    """Divide a batch into at most `AT_ONCE` runs of about as many bytes."""
    most = max(apart, -(-sum(sizes) // AT_ONCE))
    start, n = 0, 0
    for i, size in enumerate(sizes):
        if n and n + size > most:
            yield gets[start:i]
            start, n = i, 0
        n += size
    if start < len(gets):
        yield gets[start:]

"""Threads whose beginning nobody waits for.

`threading.Thread.start` waits without end for a thread that dies before its first line, as it does
where the system has no memory for it. What a thread is to do here has a deadline of its own.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from kvweave.errors import StoreError

T = TypeVar("T")
Calls: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"


class NoThread(StoreError):
    """The system gives no thread; what was to be done in it has not begun."""

    def __init__(self, why: str) -> None:
        hint = "raise its limits (ulimit -u, vm.max_map_count, memory) or end other work, then try again"
        super().__init__(f"the system gives no thread: {why}", hint=hint)


class Background:
    """``run`` in a daemon thread; where that dies before it begins, nothing is done.

    Raises NoThread.
    """

    def __init__(self, run: Callable[[], object], name: str | None = None) -> None:
        self._ended = threading.Event()

        def whole() -> None:
            try:
                if name is not None:
                    threading.current_thread().name = name
                run()
            finally:
                self._ended.set()

        try:
            _thread.start_new_thread(whole, ())
        except RuntimeError as error:
            raise NoThread(str(error)) from error

    def join(self, timeout: float) -> None:
        """Wait until it has ended, ``timeout`` seconds at most."""
        self._ended.wait(timeout)


def answer(calls: Calls, done: Callable[[], object] = lambda: None) -> None:
    """Make the calls of a queue, up to None; ``done`` is called behind each. Those whose future was
    cancelled are not made."""
    while (both := calls.get()) is not None:
        call, future = both
        if future.set_running_or_notify_cancel():
            try:
                made = call()
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            else:
                future.set_result(made)
                del made
        del both, call, future  # buffers of callers among them
        done()


def within(
    seconds: float,
    call: Callable[[], T],
    what: object,
    undo: Callable[[T], object] = lambda made: None,
) -> T:
    """Return what ``call`` returns, or raise what it raises; StoreError when ``what`` is silent for so
    long. Then the call keeps its thread, and what it returns one day is given to ``undo``."""
    future: Future[T] = Future()

    def serve() -> None:
        try:
            made = call()
        except BaseException as error:
            with suppress(InvalidStateError):  # nobody waits any more
                future.set_exception(error)
            return
        try:
            future.set_result(made)
        except InvalidStateError:
            undo(made)

    Background(serve)
    wait([future], seconds)
    if future.cancel():
        raise silent(what)
    return future.result()


def silent(what: object) -> StoreError:
    """Return the error for a device that does not answer."""
    hint = "look at the device, then try again; nothing was changed"
    return StoreError(f"{what} does not answer", hint=hint)

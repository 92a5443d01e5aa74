"""Threads whose beginning nobody waits for.

`threading.Thread.start` waits without end for a thread that dies before its first line, as it does
where the system has no memory for it. What a thread is to do here has a deadline of its own.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from kvweave.errors import StoreError

T = TypeVar("T")
UNCHANGED = "look at the device, then try again; nothing was changed"
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

    def join(self, timeout: float) -> bool:
        """Wait until it has ended, ``timeout`` seconds at most; return whether it has."""
        return self._ended.wait(timeout)


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
    hint: str = UNCHANGED,
) -> T:
    """Return what ``call`` returns, or raise what it raises; StoreError when ``what`` is silent for so
    long, with the ``hint``. Then the call keeps its thread, and what it returns one day is given to ``undo``."""
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
    try:
        wait([future], seconds)
    except BaseException:  # Ctrl-C: nobody takes what it returns
        if not future.cancel() and future.exception() is None:
            undo(future.result())
        raise
    if future.cancel():
        raise silent(what, hint)
    return future.result()


class Opener:
    """The process that opened something; a fork of that shares its connections, and has none of its threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        return os.getpid() == self._pid

    def require(self, what: object) -> None:
        """Raise StoreError in a fork."""
        if not self:
            hint = "open it in this process, after the other one has closed it"
            raise StoreError(f"{what} was opened in process {self._pid}", hint=hint)


class OneThread:
    """Makes calls in a thread of its own, one after the other; who asks waits for so long only.

    A call that takes longer goes on with nobody waiting, and no other begins meanwhile: ``is_late``.
    When it ends after all, ``back`` is called in the thread before anybody else's turn. Raises NoThread.
    """

    def __init__(self, back: Callable[[], object]) -> None:
        self._back, self._lock, self.opener = back, threading.Lock(), Opener()
        self._calls: Calls = queue.SimpleQueue()
        self.is_late = False
        Background(lambda: answer(self._calls, self._done), "kvweave-index")

    def ask(self, call: Callable[[], T], seconds: float, what: object, hint: str = UNCHANGED) -> T:
        """Return what ``call`` returns, or raise what it raises. Raises StoreError when ``what`` is
        silent for so long, with a ``hint`` if the call has begun; or in a fork, which has no thread."""
        self.opener.require(what)
        if self.is_late:
            raise silent(what)
        future: Future[T] = Future()
        self._calls.put((call, future))
        try:
            return future.result(seconds)
        except BaseException as error:  # Ctrl-C too
            with self._lock:
                late = self.is_late = not future.done()
            if late and isinstance(error, TimeoutError):
                raise silent(what, hint) from None
            if late or not isinstance(error, TimeoutError):
                raise
        return future.result()  # it came in time after all

    def end(self, call: Callable[[], object], seconds: float, what: object) -> None:
        """Make a last call; behind one that is late, when that ends. Raises what `ask` raises."""
        future: Future[object] = Future()
        self._calls.put((call, future))
        self._calls.put(None)
        wait([future], 0.0 if self.is_late else seconds)
        if not future.done():
            raise silent(what, "it is closed, and its lock let go, when the device answers")
        future.result()

    def _done(self) -> None:
        with self._lock:
            was_late = self.is_late
        if was_late:
            try:
                self._back()
            finally:
                self.is_late = False


def silent(what: object, hint: str = UNCHANGED) -> StoreError:
    """Return the error for a device that does not answer."""
    return StoreError(f"{what} does not answer", hint=hint)

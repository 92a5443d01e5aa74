"""Ctrl-C, taken where nothing stands half done.

A verb changes rows, index and memory one after the other. KeyboardInterrupt comes between any two
lines, also between these, and what it leaves then no ``except`` can know. So a verb holds it, and lets
it in before each step, pass and layer of the model, and at its end::

    with HELD:  # a verb: Ctrl-C is noted
        ...
        let_in()  # whatever was done up to here is whole, or is taken back: noted ones are raised
        ...

Only the main thread gets signals, so in others nothing of this does anything. One that comes `PATIENCE`
seconds after another that still waits is taken at once: what is waited for may hang.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

PATIENCE = 1.0  # seconds; `kvweave` itself takes SIGINTs nearer than that as one


class _Held:
    """What ``with`` wants, as often inside itself as one likes; there is one of it, as of the signal."""

    def __init__(self) -> None:
        self.depth = 0
        self._first: float | None = None  # when the one came that waits
        self._before: Any = None  # the handler that it is for

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        if not self.depth:
            before = signal.getsignal(signal.SIGINT)
            self._before = before if callable(before) else None
            if self._before is not None:
                signal.signal(signal.SIGINT, self._note)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != main_thread().ident:
            return
        self.depth = max(0, self.depth - 1)  # `outside` may be interrupted where it counts
        if self.depth:
            return
        if self._before is not None:
            now = signal.signal(signal.SIGINT, self._before)
            if now != self._note:  # somebody has another one since
                signal.signal(signal.SIGINT, now)
        self.let_in()

    def let_in(self) -> None:
        """Take what waits."""
        if self._first is not None and get_ident() == main_thread().ident:
            self._first = None
            self._before(signal.SIGINT, sys._getframe())

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first >= PATIENCE:
            self.let_in()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let it in at any line of a block that is the caller's own, in the midst of a verb."""
        if get_ident() != main_thread().ident or not self.depth:
            yield
            return
        depth, self.depth = self.depth, 1
        try:
            self.__exit__()
            yield
        finally:
            self.__enter__()
            self.depth = depth


HELD = _Held()
let_in: Callable[[], None] = HELD.let_in

"""Threads whose beginning nobody waits for.

`threading.Thread.start` waits without end for a thread that dies before its first line, as it does
where the system has no memory for it. What a thread is to do here has a deadline of its own.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


class Background:
    """``run`` in a daemon thread; where that dies before it begins, nothing is done.

    Raises RuntimeError where the system gives no thread.
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

        _thread.start_new_thread(whole, ())

    def join(self, timeout: float) -> None:
        """Wait until it has ended, ``timeout`` seconds at most."""
        self._ended.wait(timeout)

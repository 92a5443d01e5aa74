"""Signals that end a command: SIGINT, and SIGTERM and SIGHUP where nobody else takes them.

Each is raised in the verb as KeyboardInterrupt, where nothing stands half done
(`kvweave.interrupts`), so that contexts are closed in a server and names of a conversation removed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer, main_thread
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

TOGETHER = 0.2  # seconds; nobody presses Ctrl-C twice in so short a time
# seconds that cleaning up may take behind one of OTHERS; then what waits is broken off
GRACE = 10.0
NEXT = 1.5  # seconds later, that which waits then; a verb holds them for one
OTHERS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal behind which nothing goes on, as a chat does behind Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit status, as a shell has it of who dies of the signal."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


def interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """Return the signal that was being cleaned up behind as an error came: it is what the command ends of,
    not that a server, say, has gone too."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__context__
    return found


class _Taken:
    """The handlers, as long as a verb runs."""

    def __init__(self) -> None:
        self.over = False
        self._ended: int | None = None  # by which signal but SIGINT
        self._last: tuple[float, int | None] = (-TOGETHER, None)
        self._is_due = False  # one that was dropped comes once more
        self._show, self._dropped = sys.unraisablehook, Timer(TOGETHER, self._once_more)
        self._late = Timer(GRACE, self._again)
        self._late.daemon = True
        self._ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def interrupt(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT's. Those that come together are one: who signals a process and its group sends two,
        and the second would break off the cleaning up after the first."""
        if self.over or (self._ignored and self._ended is None):
            return
        (before, why), now = self._last, time.monotonic()
        self._last, due, self._is_due = (now, self._ended), self._is_due, False
        if due or why != self._ended or now - before >= TOGETHER:
            self.stop()

    def end(self, sig: int, frame: FrameType | None) -> None:
        """The others': as SIGINT, which a verb may be holding; or as SIGTERM, if a server has that."""
        servers, mine = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        if sig != signal.SIGTERM and callable(servers) and servers != self.end:
            servers(signal.SIGTERM, frame)
        elif callable(mine):
            first, self._ended = self._ended is None, sig
            if first:  # another may come while it starts
                self._late.start()
            mine(signal.SIGINT, frame)

    def _again(self) -> None:
        """Send it until nothing waits any more: where a server is silent, say."""
        while not self.over:
            _interrupt_main()
            time.sleep(NEXT)

    def stop(self) -> None:
        """Raise what it was."""
        raise KeyboardInterrupt if self._ended is None else Ended(self._ended)

    def unraisable(self, ignored: UnraisableHookArgs) -> None:
        """Send SIGINT once more: what is raised in a destructor or a callback Python drops."""
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            self._show(ignored)
        elif not self._dropped.is_alive():
            self._dropped = Timer(TOGETHER, self._once_more)
            self._dropped.daemon = True
            self._dropped.start()

    def _once_more(self) -> None:
        self._is_due = True
        _interrupt_main()

    def settle(self) -> None:
        """Raise one that is about to be sent once more."""
        if self._dropped.is_alive():
            self.stop()

    def close(self) -> None:
        """Have nothing sent any more."""
        self.over = True
        self._dropped.cancel()
        self._late.cancel()
        sys.unraisablehook = self._show


@contextmanager
def taken() -> Iterator[None]:
    """Take the signals of which the process would die, and none as none."""
    at_first = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, *OTHERS)}
    if callable(at_first[signal.SIGINT]) and (
        at_first[signal.SIGINT] is not signal.default_int_handler
    ):
        yield
        return
    here = _Taken()
    try:
        signal.signal(signal.SIGINT, here.interrupt)
    except ValueError:  # not in the main thread, so no signal comes here
        yield
        return
    sys.unraisablehook = here.unraisable
    mine = [sig for sig in OTHERS if at_first[sig] is signal.SIG_DFL]
    try:
        for sig in mine:
            signal.signal(sig, here.end)
        yield
        here.settle()
    finally:
        here.close()
        for sig in (*mine, signal.SIGINT):
            signal.signal(sig, at_first[sig])


def _interrupt_main() -> None:
    main = main_thread().ident
    if main is not None:
        with suppress(ProcessLookupError):
            signal.pthread_kill(main, signal.SIGINT)  # wakes it from what it waits for

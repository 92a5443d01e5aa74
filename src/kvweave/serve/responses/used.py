"""When something was used: ages go by a clock that nobody sets.

The clock on the wall jumps where a machine finds a server of time after it has begun, and by it what was
said a minute ago is a year old. So it is asked once, and from there on seconds are counted; what a file
says of this process's uses is moved where that clock was set since.
"""

from __future__ import annotations

import time

MOVED = 60.0  # seconds from which on a clock was set, not slewed
# which counts while a machine sleeps, too
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _counted() -> float:
    return time.clock_gettime(_CLOCK)


BEGAN = time.time()
_from = BEGAN - _counted()


def now() -> float:
    """Return the seconds of the epoch, by the wall's clock as it was when the process began."""
    return _from + _counted()


def before(seconds: float) -> float:
    """Return what was used before is not used for so many seconds, by whichever clock is behind."""
    return min(now(), time.time()) - seconds


def moved() -> float:
    """Return the seconds by which the wall's clock was set since; 0 where it was slewed."""
    by = time.time() - now()
    return by if abs(by) >= MOVED else 0.0


def written(used: float) -> float:
    """Return a use as a file says it: by the wall's clock of now, if it was one of this process."""
    return used + moved() if BEGAN <= used <= now() else used


class NotedUses:
    """Which uses were written down."""

    def __init__(self) -> None:
        self._at, self._moved = now(), moved()

    def again(self) -> float:
        """Return since when uses are to be written down: all of this process where the clock was set."""
        at, by = self._at, self._moved
        self._at, self._moved = now(), moved()
        return at if abs(self._moved - by) < 1 else BEGAN

"""How long a call to a remote tier may take, and how long a server that failed is left alone."""

from __future__ import annotations

import threading
import time

from kvweave.store.tier.base import LATE, Outcome

SLOWEST = 1 << 23  # bytes per second below which a link counts as broken
PAUSES = (0.05, 5.0)  # seconds a lost server is left alone: at first, and at most


class TimeUp(Exception):
    """Nothing more may be done for this call."""


class Limit:
    """The end of one call: its deadline, or what is patient enough for its bytes if that is sooner.

    ``deadline`` is of `time.monotonic`, ``patience`` in seconds, for calls without bytes.
    """

    def __init__(self, deadline: float | None, patience: float, n_bytes: int = 0) -> None:
        self.patience = patience + n_bytes / SLOWEST
        self.ends = time.monotonic() + self.patience
        self.is_deadline = deadline is not None and deadline <= self.ends
        if deadline is not None:
            self.ends = min(self.ends, deadline)

    def left(self) -> float:
        """Return the seconds that are left; raise TimeUp when there are none."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeUp
        return left

    def outcome(self) -> Outcome:
        """Return what a call is told that reached the end: ``late``, or ``failed`` without one."""
        if self.is_deadline:
            return LATE
        return Outcome("failed", f"no answer within {self.patience:.1f} s")


class Absence:
    """Whether a server may be gone, and how long it is left alone: twice as long after each failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause = 0.0
        self._ends = 0.0
        self.is_doubted = False
        """Somebody waited in vain: it is to be asked for a sign of life before anything else."""

    def doubt(self) -> None:
        """An answer did not come in time, for whatever reason."""
        self.is_doubted = True

    def note(self) -> None:
        """It is not there. Failures of one time count once."""
        with self._lock:
            self.is_doubted = True
            if time.monotonic() >= self._ends:
                self._pause = min(max(PAUSES[0], 2 * self._pause), PAUSES[1])
                self._ends = time.monotonic() + self._pause

    def over(self) -> None:
        """It answered."""
        self.is_doubted = False
        self._pause = 0.0

    def left(self) -> float:
        """Return the seconds until the next try, 0 if it may be asked."""
        return max(0.0, self._ends - time.monotonic())

    def wait(self, deadline: float | None) -> float:
        """Wait for the next try if half of the time is left then; else return as `left` does."""
        left = self.left()
        if deadline is None or 2 * left <= deadline - time.monotonic():
            time.sleep(left)
            left = 0.0
        return left

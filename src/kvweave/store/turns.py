"""One at a time for each key."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Turns:
    """Who has a key is alone with it."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def alone(self, key: str, deadline: float | None) -> Iterator[bool]:
        """Keep others away from a key meanwhile; False when it does not become free by then."""
        with self._changed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            free = self._changed.wait_for(lambda: key not in self._taken, left)
            if free:
                self._taken.add(key)
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._taken.discard(key)
                    self._changed.notify_all()

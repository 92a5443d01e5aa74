"""Connections to one server, shared by threads; a lost server is left alone for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvweave.store.tier.limit import Absence, Limit, TimeUp
from kvweave.store.tier.wire import AccessDenied, LostConnection, ServerAddress, Wire


class ConnectionPool:
    """At most ``n`` connections, made when needed and kept."""

    def __init__(self, server: ServerAddress, n: int) -> None:
        self.server = server
        self._free = threading.BoundedSemaphore(n)
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._absence = Absence()
        self._closed = False

    @contextlib.contextmanager
    def take(self, limit: Limit) -> Iterator[Wire]:
        """Lend a connection; it is kept unless an exception passes.

        Raises LostConnection, Refused and TimeUp. While a lost server is left alone this fails at once.
        """
        if not self._free.acquire(timeout=limit.left()):
            raise TimeUp
        try:
            wire = self._idle_one() or self._new(limit)
            try:
                yield wire
            except BaseException:
                wire.close()
                raise
            with self._lock:
                if not self._closed:
                    self._idle.append(wire)
                    return
            wire.close()
        finally:
            self._free.release()

    def leave_alone(self) -> None:
        """Note that the server does not answer: drop what is open, and wait before the next try."""
        self._absence.note()
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close(self) -> None:
        """Close what is idle now, and what is lent when it comes back."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def _idle_one(self) -> Wire | None:
        with self._lock:
            while self._idle:
                wire = self._idle.pop()
                if wire.is_idle():
                    return wire
                wire.close()
        return None

    def _new(self, limit: Limit) -> Wire:
        if self._closed:
            raise LostConnection("the tier is closed")
        if wait := self._absence.left():
            raise LostConnection(f"{self.server} is lost; next try in {wait:.2f} s")
        try:
            made = Wire(self.server, limit)
        except (LostConnection, AccessDenied):
            self.leave_alone()
            raise
        self._absence.over()
        return made

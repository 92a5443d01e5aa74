"""Writes that nobody waits for: chunks go to the first level in a thread, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvweave.store.background import Background
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.record.transfer import Expected

MOST = 256 << 20  # bytes that may wait to be written
PATIENCE = 60.0  # seconds that such a write may take
log = logging.getLogger("kvweave.store")


class ToWrite(NamedTuple):
    """A chunk that waits; ``landed`` waits until its KV is on the host."""

    id: int
    about: Expected
    n_bytes: int
    landed: Callable[[], KV]


class WriteBehind:
    """Writes to ``level``; ``counts`` are the mover's."""

    def __init__(self, level: Level | None, counts: dict[str, int]) -> None:
        self.level, self.counts = level, counts
        self._waiting: queue.Queue[ToWrite | None] = queue.Queue()
        self._wanted: dict[int, bool] = {}  # chunk that waits or is written -> whether it still is
        self._changed = threading.Condition()  # guards it, and tells of its changes
        self._n_bytes = 0
        self._thread: Background | None = None

    def add(
        self, id: int, about: Expected, n_bytes: int, down: Callable[[], Callable[[], KV]]
    ) -> bool:
        """Have a chunk written, brought ``down`` now; False when it waits already, or too much does."""
        with self._changed:
            if self._n_bytes + n_bytes > MOST or id in self._wanted:
                return False
            self._n_bytes += n_bytes
            self._wanted[id] = True
        if self._thread is None:
            self._thread = Background(self._run)
        self._waiting.put(ToWrite(id, about, n_bytes, down()))
        return True

    def over(self, id: int, ends: float) -> bool:
        """Wait until no write of a chunk is under way, at most until ``ends``; False: one still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: id not in self._wanted, max(0.0, ends - time.monotonic())
            )

    def unwanted(self, id: int) -> None:
        """Have what is written of a chunk dropped again."""
        with self._changed:
            if id in self._wanted:
                self._wanted[id] = False

    def settle(self) -> None:
        """Wait until everything is written."""
        self._waiting.join()

    def close(self) -> None:
        """Write what waits, and stop."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(PATIENCE)
            self._thread = None

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            id, n_bytes = item.id, item.n_bytes
            try:
                self._write(item)
            except Exception:
                log.exception("#%s could not be written", id)
            del item  # its KV is memory that somebody counts on
            with self._changed:
                wanted = self._wanted.pop(id, False)
                self._n_bytes -= n_bytes
                self._changed.notify_all()
            if not wanted and self.level is not None:  # dropped meanwhile
                self.level.drop([id], time.monotonic() + PATIENCE)
            self._waiting.task_done()
        self._waiting.task_done()

    def _write(self, item: ToWrite) -> None:
        kv = item.landed()
        if self.level is None or not self._wanted.get(item.id):
            return
        outcome = self.level.put(item.id, item.about, kv, deadline=time.monotonic() + PATIENCE)
        if outcome.ok:
            self.counts["bytes_written"] += self.level.held[item.id].n_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes are counted of what does not wait."""
        assert self._n_bytes == 0, f"{self._n_bytes} bytes wait for nobody"

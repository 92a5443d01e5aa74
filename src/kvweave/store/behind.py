"""Writes that nobody waits for: chunks go to the first level in a thread, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvweave.chunk.background import Background, NoThread
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.record.transfer import Expected

MOST = 256 << 20  # bytes that may wait to be written
PATIENCE = 60.0  # seconds that such a write may take
log = logging.getLogger("kvweave.store")


@dataclass(slots=True)
class ToWrite:
    """A chunk that waits or is written; ``landed`` waits until its KV is on the host."""

    about: Expected
    n_bytes: int  # alive for it, whoever else lets go of the chunk
    landed: Callable[[], KV] | None  # None: it is being written, or was dropped before
    wanted: bool = True


class WriteBehind:
    """Writes to ``level``; ``counts`` are the mover's."""

    def __init__(self, level: Level | None, counts: dict[str, int]) -> None:
        self.level, self.counts = level, counts
        self._waiting: queue.Queue[int | None] = queue.Queue()
        self._chunks: dict[int, ToWrite] = {}
        self._changed = threading.Condition()  # guards it, and tells of its changes
        self._thread: Background | None = None

    def add(
        self, id: int, about: Expected, n_bytes: int, down: Callable[[], Callable[[], KV]]
    ) -> bool:
        """Have a chunk written, brought ``down`` now; False when it waits already, or too much does."""
        with self._changed:
            waiting = sum(each.n_bytes for each in self._chunks.values())
            if waiting + n_bytes > MOST or id in self._chunks:
                return False
            if self._thread is None:
                try:
                    self._thread = Background(self._run)
                except NoThread as error:  # it stays in memory
                    log.warning("#%s is not written behind: %s", id, error)
                    return False
            self._chunks[id] = ToWrite(about, n_bytes, down())
        self._waiting.put(id)
        return True

    def beside(self, ids: Container[int]) -> int:
        """Return the bytes alive for chunks that are not among ``ids``, those in memory."""
        if not self._chunks:
            return 0
        with self._changed:
            return sum(each.n_bytes for id, each in self._chunks.items() if id not in ids)

    def let_go(self, ids: Container[int], ends: float) -> bool:
        """Wait until nothing is `beside` any more, at most until ``ends``; False: something is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(id in ids for id in self._chunks), max(0.0, ends - time.monotonic())
            )

    def over(self, id: int, ends: float) -> bool:
        """Wait until no write of a chunk is under way, at most until ``ends``; False: one still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: id not in self._chunks, max(0.0, ends - time.monotonic())
            )

    def unwanted(self, id: int) -> None:
        """Have what is written of a chunk dropped again."""
        with self._changed:
            if (chunk := self._chunks.get(id)) is not None:
                chunk.wanted = False
                if chunk.landed is not None:  # its turn has not come
                    chunk.landed, chunk.n_bytes = None, 0

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
        while (id := self._waiting.get()) is not None:
            chunk = self._chunks[id]
            with self._logged(id):
                self._write(id, chunk)
            with self._changed:
                del self._chunks[id]
                self._changed.notify_all()
            if not chunk.wanted and self.level is not None:  # dropped meanwhile
                with self._logged(id):
                    self.level.drop([id], time.monotonic() + PATIENCE)
            self._waiting.task_done()
        self._waiting.task_done()

    @contextmanager
    def _logged(self, id: int) -> Iterator[None]:
        """Go on behind what nobody foresaw: there is no other thread that writes."""
        try:
            yield
        except Exception:
            log.exception("#%s could not be written, or dropped", id)

    def _write(self, id: int, chunk: ToWrite) -> None:
        with self._changed:
            landed, chunk.landed = chunk.landed, None
        if landed is None or self.level is None:
            return
        kv = landed()
        if not chunk.wanted:
            return
        outcome = self.level.put(id, chunk.about, kv, deadline=time.monotonic() + PATIENCE)
        if outcome.ok:
            self.counts["bytes_written"] += self.level.held[id].n_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when there is something that does not wait."""
        assert not self._chunks, f"{list(self._chunks)} wait for nobody"

"""Moves chunks between memory and the tiers below it.

::

    memory   --- clean: copies are written behind, while memory fills -------->  first level
             --- save:  now, because room is needed or somebody asked -------->  (first with room)
             <-- load:  all chunks of a weave at once, layer by layer ---------
    a level over its budget moves its coldest chunks one level down; behind the last they are lost,
    pinned ones excepted, and are computed again when they are wanted
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvweave.errors import OverBudget, StoreError
from kvweave.store.arriving import Arriving, Load
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.record.layout import Head, record_bytes
from kvweave.store.staging import HOST, Staging, staging
from kvweave.store.tier.base import Outcome

BEHIND = 256 << 20  # bytes that may wait to be written
TOGETHER = 1 << 20  # bytes of one request to a tier; layers of small chunks are read together
log = logging.getLogger("kvweave.store")


@dataclass(slots=True)
class _Wanted:
    """A chunk that is being read, and from where."""

    level: Level
    head: Head
    load: Load
    room: KV | None  # where it goes on the device


class Mover:
    """Knows which level has which chunk, and moves their KV.

    ``key_of`` names a chunk's record: a digest of everything its KV depends on. ``seconds`` is what
    a load may take; one that is late is given up, and the chunk is computed. ``is_pinned`` chunks
    never leave the last level they are on.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        key_of: Callable[[int], str],
        *,
        is_pinned: Callable[[int], bool] = lambda id: False,
        device: torch.device | None = None,
        seconds: float = 10.0,
    ) -> None:
        self.levels, self.key_of, self.is_pinned = list(levels), key_of, is_pinned
        self.staging, self.seconds = staging(device or torch.device("cpu")), seconds
        self.on_tier: Callable[[int, str, int], None] = lambda id, tier, n_bytes: None
        self.counts = {"loads": 0, "late": 0, "lost": 0, "bytes_read": 0, "bytes_written": 0}
        self._behind: queue.Queue[tuple[int, str, int, Callable[[], KV]] | None] = queue.Queue()
        self._writing: dict[int, bool] = {}  # chunk -> whether it is still wanted
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None

    def level_of(self, id: int) -> Level | None:
        """Return the fastest level that is known to have a chunk."""
        return next((level for level in self.levels if id in level), None)

    def find(self, ids: Iterable[int]) -> None:
        """Ask the levels for chunks that are not known to be on any."""
        for id in ids:
            if self.level_of(id) is None:
                key = self.key_of(id)
                any(level.find(id, key) for level in self.levels)

    # ---- down

    def save(
        self,
        id: int,
        kv: KV,
        *,
        on: Level | None = None,
        durable: bool = False,
        choice: CodecSpec | None = None,
    ) -> Level:
        """Write a chunk now and return where it is. Raises OverBudget when no level takes it.

        Content never changes: what is there already is not written again, unless ``durable`` or
        another codec than the level's is asked for.
        """
        known = self.level_of(id) if on is None else (on if id in on else None)
        if known is not None and not durable and choice is None:
            return known
        self._forget_waiting(id)
        kv = self.staging.down(kv)()
        last = Outcome("full", "there is no level")
        for level in self.levels if on is None else [on]:
            self._make_room(level, record_bytes(kv))
            last = level.put(id, self.key_of(id), kv, durable=durable, choice=choice)
            if last.state == "full" and self._make_room(level, record_bytes(kv), True):
                last = level.put(id, self.key_of(id), kv, durable=durable, choice=choice)
            if last.ok:
                self.counts["bytes_written"] += level.held[id].n_bytes
                return level
            log.warning("%s did not take #%s: %s", level.name, id, last.why)
        budget = sum(level.budget or 0 for level in self.levels)
        raise OverBudget(kv.n_bytes, budget, 0) from OSError(last.why)

    def clean(self, id: int, kv: KV) -> bool:
        """Have a chunk written behind; False when too much waits already, or it is there."""
        if not self.levels or self.level_of(id) is not None or id in self._writing:
            return False
        with self._lock:
            n = record_bytes(kv)
            if self._waiting_bytes + kv.n_bytes > BEHIND or not self.levels[0].has_room(n):
                return False
            self._waiting_bytes += kv.n_bytes
            self._writing[id] = True
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="kvweave-writer", daemon=True)
            self._writer.start()
        self._behind.put((id, self.key_of(id), kv.n_bytes, self.staging.down(kv)))
        return True

    def settle(self) -> None:
        """Wait until everything that was to be written behind is written."""
        self._behind.join()

    def _write(self) -> None:
        while (item := self._behind.get()) is not None:
            id, key, n_bytes, landed = item
            level = self.levels[0]
            try:
                kv = landed()
                if self._writing.get(id):
                    outcome = level.put(id, key, kv)
                    if outcome.ok:
                        self.counts["bytes_written"] += level.held[id].n_bytes
            except Exception:
                log.exception("#%s could not be written", id)
            with self._lock:
                wanted = self._writing.pop(id, False)
                self._waiting_bytes -= n_bytes
            if not wanted:  # dropped meanwhile
                level.drop([id])
            self._behind.task_done()
        self._behind.task_done()

    def _forget_waiting(self, id: int) -> None:
        """Let a write that waits be over before the same chunk is written again."""
        if id in self._writing:
            self._behind.join()

    def _make_room(self, level: Level, n_bytes: int, force: bool = False) -> bool:
        """Move the coldest chunks of a level down, or drop them; tell whether any went."""
        short = level.over(n_bytes) or (n_bytes if force else 0)
        below = self.levels[self.levels.index(level) + 1 :]
        gone = []
        for id in level.victims() if short > 0 else ():
            if short <= 0:
                break
            size = level.held[id].n_bytes
            if not self._sink(id, level, below):
                continue
            gone.append(id)
            short -= size
        level.drop(gone)
        for id in gone:
            there = self.level_of(id)
            n = 0 if there is None else there.held[id].n_bytes
            self.on_tier(id, "none" if there is None else there.place, n)
        return bool(gone)

    def _sink(self, id: int, level: Level, below: Sequence[Level]) -> bool:
        """Have a chunk one level down, if there is one; tell whether it may leave this one."""
        if any(id in lower for lower in below):
            return True
        if below:
            kv = self._read(id, level)
            if kv is not None and below[0].has_room(record_bytes(kv)):
                if below[0].put(id, level.held[id].key, kv).ok:
                    return True
        return not self.is_pinned(id)

    def _read(self, id: int, level: Level) -> KV | None:
        found = self.load([id], level, HOST).get(id)
        if found is None:
            return None
        try:
            return KV([*found.k], [*found.v], found.lossy)
        except StoreError:
            return None

    # ---- up

    def load(
        self, ids: Iterable[int], only: Level | None = None, to: Staging | None = None
    ) -> dict[int, Arriving]:
        """Begin to read chunks; return those whose records were found, arriving layer by layer."""
        to = self.staging if to is None else to
        deadline = time.monotonic() + self.seconds
        wanted = []
        for id in ids:
            level = self.level_of(id) if only is None else only
            if level is None:
                continue
            head, outcome = level.head(id, deadline)
            if head is None:
                self.lost(id, outcome, level)
                continue
            load = Load(id, head.shapes, head.n_tokens, head.dtype.itemsize, head.lossy)
            room = to.room(head.shapes, head.n_tokens, head.dtype)
            wanted.append(_Wanted(level, head, load, room))
        if wanted:
            reader = threading.Thread(
                target=self._fetch, args=(wanted, to, deadline), name="kvweave-reader", daemon=True
            )
            reader.start()
        self.counts["loads"] += len(wanted)
        return {each.load.key: Arriving(each.load) for each in wanted}

    def lost(self, id: int, outcome: Outcome, level: Level | None = None) -> None:
        """A chunk could not be read: it is not there any more for us."""
        level = self.level_of(id) if level is None else level
        self.counts["late" if outcome.state == "late" else "lost"] += 1
        log.warning("#%s is computed again: %s", id, outcome.why or outcome.state)
        if level is not None:
            level.drop([id])

    def _fetch(self, every: list[_Wanted], to: Staging, deadline: float) -> None:
        """Read layer 0 of every chunk, then layer 1, ...; several at once where they are small."""
        wanted = every
        try:
            n_layers = max(len(each.head.shapes) for each in wanted)
            per_layer = sum(each.head.n_bytes for each in wanted) // n_layers + 1
            step = max(1, TOGETHER // per_layer)
            for start in range(0, n_layers, step):
                self._layers(wanted, (start, min(start + step, n_layers)), to, deadline)
                wanted = [each for each in wanted if not each.load.ended]
        except Exception as error:
            log.exception("loading failed")
            for each in wanted:
                each.load.fail(f"failed: {error}")
        finally:
            to.settle()  # before `every` lets go of the room of what failed

    def _layers(
        self, wanted: list[_Wanted], layers: tuple[int, int], to: Staging, deadline: float
    ) -> None:
        start, stop = layers
        for level in {id(each.level): each.level for each in wanted}.values():
            mine = [each for each in wanted if each.level is level and not each.load.ended]
            gets, buffers = [], []
            for each in mine:
                held = level.held.get(each.load.key)
                if held is None:
                    each.load.fail("missing: it was dropped")
                    continue
                span = each.head.layers(start, stop)
                memory = to.buffer(span.n_bytes)
                gets.append(span.get(held.key, memory))
                buffers.append((each, memory))
            for (each, memory), outcome in zip(buffers, level.get(gets, deadline), strict=True):
                if not outcome.ok:
                    each.load.fail(f"{outcome.state}: {outcome.why}")
                    continue
                self.counts["bytes_read"] += len(memory)
                try:
                    kv = each.head.decode(memory, start, stop)
                except StoreError as error:
                    each.load.fail(f"wrong: {error}")
                    continue
                for layer, rows in enumerate(zip(kv.k, kv.v, strict=True), start):
                    each.load.add(*to.up(rows, each.room, layer))

    # ---- away

    def drop(self, id: int) -> None:
        """Delete a chunk everywhere."""
        with self._lock:
            if id in self._writing:
                self._writing[id] = False
        for level in self.levels:
            level.drop([id])

    def close(self) -> None:
        """Write what waits, stop the thread, close the tiers."""
        if self._writer is not None:
            self._behind.put(None)
            self._writer.join()
            self._writer = None
        for level in self.levels:
            level.tier.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a level's accounting and content differ."""
        self.settle()
        for level in self.levels:
            level.check_integrity()
        assert self._waiting_bytes == 0, f"{self._waiting_bytes} bytes wait for nobody"

"""Moves chunks between memory and the tiers below it.

::

    memory   --- clean: copies are written behind, while memory fills -------->  first level
             --- save:  now, because room is needed or somebody asked -------->  (first with room)
             <-- load:  all chunks of a weave at once, layer by layer ---------
    a level over its budget moves its coldest chunks one level down; behind the last they are lost,
    pinned ones excepted, and are computed again when they are wanted; what a level keeps for us
    stays, though, where the one below fails

Whoever calls waits for no device longer than ``seconds``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Sequence

import torch

from kvweave.chunk.background import Background, NoThread
from kvweave.errors import KVWeaveError, NoSpace, OverBudget, StoreError
from kvweave.store.arriving import Arriving, Load
from kvweave.store.behind import WriteBehind
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.reader import Reader, ToRead
from kvweave.store.record.encode import record_bytes
from kvweave.store.record.transfer import Expected
from kvweave.store.staging import HOST, Staging, staging
from kvweave.store.tier.base import DONE, LATE, Outcome

LOOKING = 0.5  # seconds that a look for what others may have stored may take
log = logging.getLogger("kvweave.store")


class Mover:
    """Knows which level has which chunk, and moves their KV.

    ``about`` says what a chunk's record must be of. ``seconds`` is what a load or a write may take;
    one that is late is given up, and the chunk is computed. ``is_pinned`` chunks never leave the
    last level they are on.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        about: Callable[[int], Expected],
        *,
        is_pinned: Callable[[int], bool] = lambda id: False,
        device: torch.device | None = None,
        seconds: float = 10.0,
    ) -> None:
        self.levels, self.about, self.is_pinned = list(levels), about, is_pinned
        self.staging, self.seconds = staging(device or torch.device("cpu")), seconds
        self.on_tier: Callable[[int, str, int], None] = lambda id, tier, n_bytes: None
        self.told: Callable[[], None] = lambda: None  # has the index keep what `on_tier` told it
        self.counts = {"loads": 0, "late": 0, "lost": 0, "bytes_read": 0, "bytes_written": 0}
        self._behind = WriteBehind(self.levels[0] if self.levels else None, self.counts)
        self._sources: dict[int, Level] = {}  # chunk -> where it was last read from

    def level_of(self, id: int) -> Level | None:
        """Return the fastest level that is known to have a chunk, and is not in doubt."""
        return next((level for level in self.levels if level.ready(id)), None)

    def find(self, ids: Iterable[int]) -> None:
        """Ask the levels for chunks that are not known to be on any; one round trip for each."""
        wanted = {id: self.about(id) for id in ids if not any(id in x for x in self.levels)}
        for level in self.levels:
            if wanted:
                level.find(wanted, time.monotonic() + min(self.seconds, LOOKING))
                for id in [id for id in wanted if id in level]:
                    del wanted[id]
                    self.on_tier(id, level.place, level.held[id].n_bytes)

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
        """Write a chunk now and return where it is.

        Raises OverBudget when no level has room for it, NoSpace when the last one's disk has none,
        StoreError when none could be written.

        Content never changes: what is there already is not written again, unless ``durable`` or
        another codec than the level's is asked for.
        """
        if not durable and choice is None:
            for level in self.levels if on is None else [on]:
                if id in level:
                    return level
        ends = time.monotonic() + self.seconds
        last = Outcome("full", "there is no level")
        if not self._behind.over(id, ends):
            last, levels = LATE, []
        else:
            kv = self.staging.down(kv)()
            levels = self.levels if on is None else [on]
        about = self.about(id)
        for level in levels:
            last = self._put(level, id, about, kv, ends, durable=durable, choice=choice)
            if last.ok:
                return level
            log.warning("%s did not take #%s: %s", level.name, id, last.why)
        lowest = levels[-1] if levels else None
        if last.state == "full" and lowest and lowest.place == "disk":
            if lowest.has_room(record_bytes(kv)):  # the level is not full, its device is
                raise NoSpace(f"cannot write #{id} to {lowest.name}", lowest.name)
        if last.state == "full":
            budget = sum(level.budget or 0 for level in self.levels)
            over = OverBudget(kv.n_bytes, budget, 0)
            over.hint = "give the tiers below memory more room (size=), or remove chunks"
            raise over from OSError(last.why)
        hint = "nothing was lost; see whether the device or server is well, and try again"
        raise StoreError(f"#{id} could not be written: {last.why}", hint=hint)

    def clean(self, id: int, kv: KV) -> bool:
        """Have a chunk written behind; False when too much waits already, or it is there."""
        if not self.levels or any(id in level for level in self.levels):
            return False
        if not self.levels[0].has_room(record_bytes(kv)):
            return False
        return self._behind.add(id, self.about(id), kv.n_bytes, lambda: self.staging.down(kv))

    def beside(self, ids: Container[int]) -> int:
        """Return the bytes alive to be written of chunks not among ``ids``, those in memory."""
        return self._behind.beside(ids)

    def let_go(self, ids: Container[int]) -> bool:
        """Wait until nothing is `beside` any more; tell whether that is so in time."""
        return self._behind.let_go(ids, time.monotonic() + self.seconds)

    def settle(self) -> None:
        """Wait until everything that was to be written behind is written."""
        self._behind.settle()

    def _put(
        self,
        level: Level,
        id: int,
        about: Expected,
        kv: KV,
        ends: float,
        *,
        durable: bool = False,
        choice: CodecSpec | None = None,
    ) -> Outcome:
        """Have a chunk on a level, for which others go down."""
        n = record_bytes(kv)
        self._make_room(level, n, ends)
        outcome = level.put(id, about, kv, durable=durable, choice=choice, deadline=ends)
        if outcome.state == "full" and self._make_room(level, n, ends, force=True):
            outcome = level.put(id, about, kv, durable=durable, choice=choice, deadline=ends)
        if outcome.ok:
            self.counts["bytes_written"] += level.held[id].n_bytes
        return outcome

    def _make_room(self, level: Level, n_bytes: int, ends: float, *, force: bool = False) -> bool:
        """Move the coldest chunks of a level down, or drop them; tell whether any went."""
        short = level.over(n_bytes) or (n_bytes if force else 0)
        if short <= 0 or not level.owned:
            return False
        freed = level.clear(short)
        if force and level.keeps:
            return freed > 0  # a full disk is no bound that anybody declared
        gone = []
        for id in level.victims():
            if short <= freed or time.monotonic() >= ends:
                break
            held, outcome = level.held.get(id), self._sink(id, level, ends)
            if outcome.ok and held is not None:
                gone.append(id)
                freed += held.n_bytes
            elif outcome.state != "full":
                log.warning("#%s stays on %s: %s", id, level.name, outcome.why)
                break
        # the index first: who dies in between has no KV that is counted on and gone
        for id in gone:
            there = next((x for x in self.levels if x is not level and x.ready(id)), None)
            n = 0 if there is None else there.held[id].n_bytes
            self.on_tier(id, "none" if there is None else there.place, n)
        if gone:
            self.told()
        level.drop(gone, ends)
        return freed > 0

    def _sink(self, id: int, level: Level, ends: float) -> Outcome:
        """Have a chunk one level down, if there is one; ``done``: it may leave this one.

        What was perhaps acknowledged as durable goes down durably, to a level that keeps it, and
        stays where that fails; behind the last of these the declared budgets are the bound.
        """
        below = self.levels[self.levels.index(level) + 1 :]
        if level.keeps:
            below = [lower for lower in below if lower.keeps]
        elif any(id in lower for lower in below):
            return DONE
        outcome = Outcome("full", "it is pinned, or cannot be read now")
        if below:
            kv = self._read(id, level, ends)
            if kv is not None:
                outcome = self._put(below[0], id, self.about(id), kv, ends, durable=level.keeps)
            if outcome.ok:
                return outcome
            if level.keeps and not (kv is not None and self._is_bound(below[0], outcome, kv)):
                return Outcome("failed", outcome.why)
        return outcome if self.is_pinned(id) else DONE

    def _is_bound(self, lower: Level, outcome: Outcome, kv: KV) -> bool:
        """Tell whether a level takes nothing more by its declared budget: not because its device is full,
        or what it has could not go down in its turn."""
        n = record_bytes(kv)
        if outcome.state != "full" or lower.budget is None or lower.has_room(n):
            return False
        return n > lower.budget or all(map(self.is_pinned, lower.victims()))

    def _read(self, id: int, level: Level, ends: float) -> KV | None:
        found = self.load([id], level, HOST, ends).get(id)
        if found is None:
            return None
        try:
            return found.whole()
        except StoreError as error:
            self.failed(id, Outcome("failed", str(error)))
            return None

    # ---- up

    def load(
        self,
        ids: Iterable[int],
        only: Level | None = None,
        to: Staging | None = None,
        ends: float | None = None,
    ) -> dict[int, Arriving]:
        """Begin to read chunks; return those that are known to be on a level, arriving by layers."""
        to = self.staging if to is None else to
        ends = time.monotonic() + self.seconds if ends is None else ends
        wanted = []
        for id in ids:
            level = self.level_of(id) if only is None else only
            if level is None or id not in level:
                continue
            about = self.about(id)
            load = Load(id, about, level.lossy(id), ends)
            room = to.room(about.shapes, about.rows, about.dtype)
            wanted.append(ToRead(level, about, load, room))
            self._sources[id] = level
        if wanted:
            reader = Reader(wanted, to, ends, self.counts)
            try:
                Background(reader.run)
            except NoThread:  # then before the first layer is used
                reader.run()
        self.counts["loads"] += len(wanted)
        return {each.load.key: Arriving(each.load) for each in wanted}

    def failed(self, id: int, outcome: Outcome) -> None:
        """A chunk could not be read. Its record is in doubt, or condemned (`kvweave.store.level`)."""
        level = self._sources.pop(id, None) or self.level_of(id)
        self.counts["late" if outcome.state == "late" else "lost"] += 1
        log.warning("#%s is computed again: %s", id, outcome.why or outcome.state)
        if level is not None:
            level.failed(id, outcome)

    # ---- away

    def drop(self, id: int) -> None:
        """Let go of a chunk everywhere."""
        self._behind.unwanted(id)
        self._sources.pop(id, None)
        for level in self.levels:
            level.drop([id], time.monotonic() + self.seconds)

    def close(self) -> None:
        """Write what waits, stop the thread, close the tiers: all of them, whatever fails."""
        self._behind.close()
        failure: KVWeaveError | OSError | None = None
        for level in self.levels:
            try:
                level.close()
            except (KVWeaveError, OSError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def check_integrity(self) -> None:
        """Raise AssertionError when a level's accounting and content differ."""
        self.settle()
        for level in self.levels:
            level.check_integrity()
        self._behind.check_integrity()

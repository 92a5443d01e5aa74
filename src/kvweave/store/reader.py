"""One load: heads, then layer 0 of every chunk, then layer 1, ..., in a thread of its own; what was read is
decoded in another one meanwhile."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass

from kvweave.chunk.background import Background, NoThread
from kvweave.errors import StoreError
from kvweave.store.arriving import Load
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import Expected
from kvweave.store.staging import Staging
from kvweave.store.tier.base import Get, Outcome

TOGETHER = 1 << 20  # bytes of one request to a tier; layers of small chunks are read together
A_READ = 1 << 19  # bytes of one chunk in a request: smaller reads cost more than they are worth
REQUESTS = 4  # of a load for whose sake they are larger, at least: the first layers are wanted while others are read
log = logging.getLogger("kvweave.store")


@dataclass(slots=True, eq=False)
class ToRead:
    """A chunk that is being read, and from where."""

    level: Level
    about: Expected
    load: Load
    room: KV | None  # where it goes on the device
    head: Head | None = None
    memory: memoryview | None = None  # of all its layers

    def part(self, start: int, stop: int) -> memoryview:
        """Return the memory of layers ``[start, stop)``."""
        assert self.head is not None and self.memory is not None
        span = self.head.layers(start, stop)
        return self.memory[span.offset - self.head.n_head :][: span.n_bytes]


class Reader:
    """Fills the loads of ``wanted`` by ``ends``; ``counts`` are the mover's."""

    def __init__(
        self, wanted: list[ToRead], to: Staging, ends: float, counts: dict[str, int]
    ) -> None:
        self.wanted, self.to, self.ends, self.counts = wanted, to, ends, counts

    def run(self) -> None:
        """Read everything; what goes wrong is said to the loads."""
        try:
            self._heads()
            wanted = self._left()
            if wanted:
                n_layers = max(len(each.about.shapes) for each in wanted)
                per_layer = sum(each.about.n_bytes for each in wanted) // n_layers + 1
                more = min(n_layers // REQUESTS, A_READ * len(wanted) // per_layer)
                step = max(1, TOGETHER // per_layer, more)
                spans = [(at, min(at + step, n_layers)) for at in range(0, n_layers, step)]
                for start, stop, each, outcome in self._ahead(spans):
                    if not each.load.ended:
                        self._take(start, stop, each, outcome)
        except Exception as error:
            log.exception("loading failed")
            for each in self.wanted:
                each.load.fail(f"failed: {error}")
        finally:
            self.to.settle()  # before anybody lets go of the room of what failed

    def _left(self) -> list[ToRead]:
        return [each for each in self.wanted if not each.load.ended]

    def _by_level(self) -> list[tuple[Level, list[ToRead]]]:
        levels = {id(each.level): each.level for each in self._left()}
        return [(x, [e for e in self._left() if e.level is x]) for x in levels.values()]

    def _heads(self) -> None:
        for level, mine in self._by_level():
            heads = level.heads({each.load.key: each.about for each in mine}, self.ends)
            for each in mine:
                head = heads[each.load.key]
                if isinstance(head, Outcome):
                    if head.state == "wrong":  # once may be the bus or the cache: look again
                        head = self._again(each)
                    elif head.state == "missing" and not level.owned:
                        head = self._elsewhere(each)
                if isinstance(head, Head) and head.lossy and not each.load.kv.lossy:
                    head = Outcome("failed", "its rows are not as exact as was believed")
                if isinstance(head, Outcome):
                    each.load.fail(f"{head.state}: {head.why}")
                    continue
                each.head = head
                each.memory = self.to.buffer(head.n_bytes - head.n_head)

    def _again(self, each: ToRead) -> Head | Outcome:
        each.level.stale(each.load.key)
        return each.level.heads({each.load.key: each.about}, self.ends)[each.load.key]

    def _elsewhere(self, each: ToRead) -> Head | Outcome:
        """Look for a record that got another name, as its first one was about to be swept."""
        wanted = {each.load.key: each.about}
        each.level.forget(each.load.key)
        each.level.find(wanted, self.ends)
        return each.level.heads(wanted, self.ends)[each.load.key]

    def _ahead(self, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int, ToRead, Outcome]]:
        """Yield what came of each span of layers, while those behind it are read already."""
        came: queue.SimpleQueue[list[tuple[int, int, ToRead, Outcome]] | Exception]
        came = queue.SimpleQueue()

        def read() -> None:
            try:
                for start, stop in spans:
                    came.put([(start, stop, *one) for one in self._read(start, stop)])
            except Exception as error:  # is raised where it is waited for
                came.put(error)

        try:
            if len(spans) > 1:
                Background(read)
            else:  # there is nothing to go ahead to
                read()
        except NoThread:
            read()
        for _ in spans:
            some = came.get()
            if isinstance(some, Exception):
                raise some
            yield from some

    def _read(self, start: int, stop: int) -> list[tuple[ToRead, Outcome]]:
        """Fill the memory of layers ``[start, stop)`` of what has not failed."""
        found: list[tuple[ToRead, Outcome]] = []
        for level, mine in self._by_level():
            held = {each: level.held.get(each.load.key) for each in mine}
            there = {each: at.key for each, at in held.items() if at is not None}
            gets = [self._get(each, key, start, stop) for each, key in there.items()]
            found += zip(there, level.get(gets, self.ends), strict=True)
            dropped = Outcome("missing", "it was dropped")
            found += [(each, dropped) for each in mine if each not in there]
        return found

    def _take(self, start: int, stop: int, each: ToRead, outcome: Outcome) -> None:
        """Hand over layers of one chunk, or read them again where they are wrong."""
        if outcome.state == "wrong":
            outcome = self._reread(each, start, stop)
        if outcome.ok:
            self._arrived(each, start, stop)
        else:
            each.load.fail(f"{outcome.state}: {outcome.why}")

    def _get(self, each: ToRead, key: str, start: int, stop: int) -> Get:
        assert each.head is not None
        return each.head.layers(start, stop).get(key, each.part(start, stop))

    def _reread(self, each: ToRead, start: int, stop: int) -> Outcome:
        """Read a span a second time, by a head that is read anew; ``wrong`` now is verified."""
        old, head, held = each.head, self._again(each), each.level.held.get(each.load.key)
        if isinstance(head, Outcome) or held is None:
            return head if isinstance(head, Outcome) else Outcome("missing", "it was dropped")
        assert old is not None
        if head.table.tobytes() != old.table.tobytes():
            return Outcome("failed", "its record was created anew meanwhile")
        return each.level.get([self._get(each, held.key, start, stop)], self.ends)[0]

    def _arrived(self, each: ToRead, start: int, stop: int) -> None:
        assert each.head is not None
        data = each.part(start, stop)
        self.counts["bytes_read"] += len(data)
        try:
            kv = each.head.decode(data, start, stop)
        except StoreError as error:
            each.load.fail(f"wrong: {error}")
            return
        for layer, rows in enumerate(zip(kv.k, kv.v, strict=True), start):
            k, v, fence = self.to.up(rows, each.room, layer)
            kept = None if kv.kept is None else kv.kept[layer - start]
            each.load.add(k, v, fence, kept)

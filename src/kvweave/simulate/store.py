"""The engine's own shelf, mover and levels, holding values that have sizes and no bytes.

What is let go of, copied down, written behind and brought back is decided by the code that an engine
runs; only what would touch bytes is replaced. This is the one file of the simulator that knows
`kvweave.store`.

::

    memory   what is read from a level is copied to it and stays below: levels are inclusive
    level    gets copies of what memory lets go of, or soon will; over its budget its coldest go one
             level down where there is room, else away
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvweave.errors import OverBudget
from kvweave.keep import Facts, Policy
from kvweave.simulate.cost import Tier
from kvweave.store.codec import CodecSpec, parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.encode import record_bytes
from kvweave.store.record.transfer import Expected, key_of
from kvweave.store.shelf import Shelf
from kvweave.store.staging import Staging
from kvweave.store.tier.base import DONE, Get, Outcome, Put


class Moved(NamedTuple):
    """Traffic of a level; reads to move chunks further down count too."""

    read: int = 0  # bytes
    n_reads: int = 0
    written: int = 0  # bytes
    n_writes: int = 0


class Sizes:
    """A tier that remembers how many bytes each value would have."""

    shared = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, int] = {}
        self.n_bytes = 0

    def note(self, key: str, n_bytes: int) -> None:
        """Take a value of this size."""
        self.n_bytes += n_bytes - self.held.get(key, 0)
        self.held[key] = n_bytes

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Take the sizes of values."""
        for each in puts:
            self.note(each.key, sum(len(data) for data in each.data))
        return [DONE for _ in puts]

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        """Have no bytes to give."""
        return [Outcome("missing", each.key) for each in gets]

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        """Forget values."""
        for key in keys:
            self.n_bytes -= self.held.pop(key, 0)
        return [DONE for _ in keys]

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        """Return the bytes that values would have."""
        return [self.held.get(key, Outcome("missing", key)) for key in keys]

    def keys(self) -> Iterator[str]:
        """Yield what is held."""
        return iter(list(self.held))

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes do not add up."""
        assert self.n_bytes == sum(self.held.values()), "bytes of a tier"

    def close(self) -> None:
        """Do nothing: there is nothing open."""


class SizedLevel(Level):
    """A level whose records are sizes."""

    def __init__(self, name: str, policy: Policy, budget: int) -> None:
        self.sized = Sizes(name)
        self.written = self.n_writes = 0
        super().__init__(self.sized, parse("raw"), "", policy, budget)

    def put(
        self,
        id: int,
        expected: Expected,
        kv: KV,
        *,
        durable: bool = False,
        choice: CodecSpec | None = None,
        deadline: float | None = None,
    ) -> Outcome:
        """Note a record of the size a raw one has, and count the write."""
        n, key = record_bytes(kv), key_of(expected.digest, self.choice, False)
        if not self._fits(id, key, n):
            return Outcome("full", "more than there is room for")
        self.written, self.n_writes = self.written + n, self.n_writes + 1
        self.sized.note(key, n)
        self._note(id, key, n)
        return DONE


class SizedMover(Mover):
    """Moves sizes, at once, and counts reads."""

    def __init__(self, levels: Sequence[SizedLevel], kv_of: Callable[[int], KV]) -> None:
        super().__init__(levels, self._about)
        self._kv_of = kv_of
        self.read: Counter[str] = Counter()
        self.n_reads: Counter[str] = Counter()

    def _about(self, id: int) -> Expected:
        """Return a record of one byte a token."""
        n = self._kv_of(id).n_bytes
        return Expected(f"{id:032x}", n, (LayerShape(1, 1, 1, 0),), torch.uint8)

    def load(  # type: ignore[override]  # nothing is on its way: it is there
        self,
        ids: Iterable[int],
        only: Level | None = None,
        to: Staging | None = None,
        ends: float | None = None,
    ) -> dict[int, KV]:
        """Return what is on a level, and count the read."""
        found = {}
        for id in ids:
            level = self.level_of(id) if only is None else only
            if level is not None:
                self.read[level.name] += level.held[id].n_bytes
                self.n_reads[level.name] += 1
                found[id] = self._kv_of(id)
        return found

    def clean(self, id: int, kv: KV) -> bool:
        """Write behind, and wait for it: a replay gives the same every time."""
        waits = super().clean(id, kv)
        self.settle()
        return waits


class SizedStore:
    """The tiers of one node under a policy: what is where, and what was moved."""

    def __init__(self, tiers: Sequence[Tier], make: Callable[[int], Policy]) -> None:
        first, *rest = self.tiers = list(tiers)
        self.levels = [SizedLevel(tier.name, make(tier.budget), tier.budget) for tier in rest]
        self.mover = SizedMover(self.levels, lambda id: self._kv[id])
        self.shelf = Shelf(first.budget, make(first.budget), self.mover, memory=first.name)
        self.shelf.facts = lambda id: self._facts
        self.refused = 0  # chunks that did not fit beside those in use
        self._facts = Facts()
        self._kv: dict[int, KV] = {}
        self._last: dict[str, OrderedDict[int, float]] = {
            tier.name: OrderedDict() for tier in tiers if tier.ttl < float("inf")
        }
        self.now = 0.0

    def where(self, id: int) -> str:
        """Return the tier a chunk would be read from; ``none`` for nowhere."""
        return self.shelf.tier(id)

    def begin(self, ids: Iterable[int], session: str) -> None:
        """A context begins to use these: none of them is let go of until the next one does."""
        self.shelf.busy(ids, session)

    def use(self, id: int, n_bytes: int, facts: Facts) -> str:
        """Use a chunk, or store it; return where it was."""
        self._facts = facts
        where = self.shelf.tier(id)
        if id not in self._kv:
            rows = torch.empty(n_bytes, 1, 1, dtype=torch.uint8, device="meta")
            self._kv[id] = KV([rows], [rows[:0]])
        try:
            if self.shelf.get(id) is None:
                self.shelf.put(id, self._kv[id])
        except OverBudget:
            self.refused += 1
            return "none"
        for last in self._last.values():
            last[id] = self.now
            last.move_to_end(id)
        return where

    def at(self, now: float) -> None:
        """Let time pass to ``now`` seconds: what was unused for longer than a tier's TTL goes."""
        self.now = max(self.now, now)
        for tier in self.tiers:
            last = self._last.get(tier.name, OrderedDict())
            while last and next(iter(last.values())) < self.now - tier.ttl:
                self._expire(tier.name, last.popitem(last=False)[0])

    def _expire(self, name: str, id: int) -> None:
        if name == self.shelf.memory:
            self.shelf.ram.pop(id)
            self.shelf.policy.dropped(id)
        for level in self.levels:
            if level.name == name:
                level.drop([id])

    def moved(self) -> dict[str, Moved]:
        """Return what was read and written, by level."""
        return {
            level.name: Moved(
                self.mover.read[level.name], self.mover.n_reads[level.name],
                level.written, level.n_writes,
            )
            for level in self.levels
        }  # fmt: skip

    def close(self) -> None:
        """End the writer's thread."""
        self.mover.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting, content and policies differ."""
        self.shelf.check_integrity()
        self.shelf.policy.check_integrity()
        assert set(self.shelf.policy.victims()) == set(self.shelf.ram), "the policy and memory"
        for level in self.levels:
            level.policy.check_integrity()
            assert set(level.victims()) == set(level.held), f"the policy and {level.name}"

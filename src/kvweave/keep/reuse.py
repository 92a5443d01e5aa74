"""By reuse time: each kind of chunk comes back after times of its own.

After KVCache in the Wild (arXiv 2506.02634): reuse times are about exponential within a category of
requests, with a mean and a share of returns per category. Here a category is the kind of a chunk,
and there is a third end of a wait, that the chunk is declared dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import exp
from typing import NamedTuple

from kvweave.keep.base import UNKNOWN, Facts
from kvweave.keep.ranks import Queue, Ranks

PRIOR = 16  # uses of all chunks together that a kind is judged by before it has its own
DRAWN = 16  # victims that are chosen together
STILL = 64  # an order is good for a use by one in so many of the keys in memory
REMEMBERED = 4  # keys that went are remembered, to so many times the bytes in memory


@dataclass
class Reuse:
    """How often and how soon chunks of one kind come back. Times are uses of any chunk, summed."""

    uses: float = 0.0
    returns: float = 0.0
    waited: float = 0.0  # from a use to the return
    deaths: float = 0.0
    lingered: float = 0.0  # from a use to the declaration of death

    def returned(self, interval: int) -> None:
        """Count a return."""
        self.returns += 1
        self.waited += interval

    def died(self, interval: int) -> None:
        """Count a declaration."""
        self.deaths += 1
        self.lingered += interval

    def with_prior(self, other: Reuse, uses: float) -> Reuse:
        """Return these counts and so many uses like the other's."""
        part = uses / max(other.uses, 1.0)
        return Reuse(
            self.uses + uses,
            self.returns + part * other.returns,
            self.waited + part * other.waited,
            self.deaths + part * other.deaths,
            self.lingered + part * other.lingered,
        )

    def rate(self, age: int) -> float:
        """Return the chance per use of any chunk that one unused for ``age`` comes back now.

        A part of the chunks comes back after exponential times, a part is declared dead after
        others, the rest waits for ever; ``age`` tells which part this one is likely in.
        """
        if not self.returns or not self.waited:
            return 0.0
        mean = self.waited / self.returns
        coming = self.returns * exp(-age / mean)
        dying = self.deaths * exp(-age * self.deaths / self.lingered) if self.lingered else 0.0
        never = max(0.0, self.uses - self.returns - self.deaths)
        return coming / (coming + dying + never) / mean if coming else 0.0


class Group(NamedTuple):
    """Chunks that are judged alike: of two, the one unused for longer goes first."""

    kind: str
    sessions: int = 0
    size: int = 0


class ReuseTime:
    """Let the chunk go whose kind and time since the last use make a return least likely.

    With one kind this is LRU. Hints are not listened to.
    """

    name = "reuse"

    def __init__(self, budget: int = 0) -> None:
        self._held, self._gone = Queue(), Queue()
        self._last: dict[int, int] = {}  # of both
        self._counted: dict[int, Group] = {}  # of both: where the last use was counted
        self._place: dict[int, Group] = {}  # of what is held and alive
        self._queues: dict[Group, Ranks] = {}  # by last use
        self._stats: dict[Group, Reuse] = {}
        self._all = Reuse()
        self._clock = 0
        self._drawn: dict[int, None] = {}  # the next victims, in order
        self._drawn_at = 0

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Note the use, and how long after the one before it came."""
        self._clock += 1
        if key in self._last:
            interval = self._clock - self._last[key]
            for stats in self._stats_of(self._counted[key]):
                stats.returned(interval)
        self._last[key] = self._clock
        self._gone.pop(key)
        self._held.push(key, n_bytes)
        self._lift(key)
        self._put(key, self._group(key, n_bytes, facts))
        self._counted[key] = self._counts_as(self._place[key])
        for stats in self._stats_of(self._counted[key]):
            stats.uses += 1

    def _group(self, key: int, n_bytes: int, facts: Facts) -> Group:
        return Group(facts.kind)

    def _weight(self, group: Group) -> float:
        return 1.0

    def _counts_as(self, group: Group) -> Group:
        return group

    def _stats_of(self, group: Group) -> tuple[Reuse, Reuse]:
        return self._stats.setdefault(group, Reuse()), self._all

    def _put(self, key: int, group: Group) -> None:
        self._place[key] = group
        self._queues.setdefault(group, Ranks()).set(key, self._last[key])

    def _lift(self, key: int) -> None:
        group = self._place.pop(key, None)
        self._drawn.pop(key, None)
        if group is not None:
            self._queues[group].pop(key)
            if not self._queues[group]:
                del self._queues[group]

    def evicted(self, key: int) -> None:
        """Remember ``key`` for a while, so that its return is seen."""
        if key not in self._held:
            return
        self._lift(key)
        self._gone.push(key, self._held.pop(key))
        while self._gone.n_bytes > REMEMBERED * max(1, self._held.n_bytes):
            self.dropped(next(iter(self._gone)))

    def dropped(self, key: int) -> None:
        """Forget ``key`` everywhere."""
        self._lift(key)
        self._held.pop(key)
        self._gone.pop(key)
        self._last.pop(key, None)
        self._counted.pop(key, None)

    def victims(self) -> Iterator[int]:
        """Yield keys, the least likely to come back first.

        To weigh all groups for each chunk that comes would take a microsecond for four of them. So
        the first few are drawn together, and are good for as many uses as change little.
        """
        if not self._drawn or self._clock - self._drawn_at > len(self._held) // STILL:
            self._drawn = dict.fromkeys(islice(self._in_order(), DRAWN))
            self._drawn_at = self._clock
        yield from list(self._drawn)
        yield from (key for key in self._in_order() if key not in self._drawn)

    def _in_order(self) -> Iterator[int]:
        for _, _, key in merge(*(self._of_group(group) for group in self._queues)):
            yield key

    def _of_group(self, group: Group) -> Iterator[tuple[float, int, int]]:
        counts = self._stats_of(self._counts_as(group))[0].with_prior(self._all, PRIOR)
        weight = self._weight(group)
        for key in self._queues[group]:
            last = self._last[key]
            yield counts.rate(self._clock - last) * weight, last, key

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is in two places or in none."""
        self._held.check_integrity()
        self._gone.check_integrity()
        for queue in self._queues.values():
            queue.check_integrity()
        queued = {key: group for group, queue in self._queues.items() for key in queue}
        assert queued == self._place, "keys by group"
        assert queued.keys() <= set(self._held), "a queued key that is not in memory"
        known = set(self._held) | set(self._gone)
        assert len(known) == len(self._held) + len(self._gone), "a key in memory and gone"
        assert known == self._last.keys() == self._counted.keys(), "when and where"

    def missed(self, key: int, n_bytes: int) -> None:
        """Do nothing."""

    def pruned(self, key: int) -> None:
        """Do nothing: kinds and times are all this one knows."""

    def ended(self, session: str) -> None:
        """Do nothing."""

    def upcoming(self, keys: Sequence[int]) -> None:
        """Do nothing."""

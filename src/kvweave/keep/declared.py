"""By what applications declare: prunes, ended sessions, kinds; then least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from math import exp

from kvweave.keep.base import UNKNOWN, Deaf, Facts
from kvweave.keep.ranks import Queue

PRIOR = 16  # uses of all chunks together that a kind is judged by before it has its own
REMEMBERED = 4  # keys that went are remembered, to so many times the bytes in memory


@dataclass
class Reuse:
    """How soon and how often chunks of one kind come back; times are uses of any chunk."""

    uses: float = 0.0
    returns: float = 0.0
    waited: float = 0.0  # between a use and the return, summed

    def add(self, interval: int | None) -> None:
        """Count a use, and after which interval it came back, if it did."""
        self.uses += 1
        if interval is not None:
            self.returns += 1
            self.waited += interval

    def with_prior(self, other: Reuse, uses: float) -> Reuse:
        """Return these counts and so many uses like the other's."""
        part = uses / max(other.uses, 1.0)
        return Reuse(
            self.uses + uses, self.returns + part * other.returns, self.waited + part * other.waited
        )

    def rate(self, age: int) -> float:
        """Return the chance per use of any chunk that one unused for ``age`` comes back now.

        A part of the chunks comes back, after exponential times; the others never.
        """
        if not self.returns or not self.waited:
            return 0.0
        share, mean = self.returns / self.uses, self.waited / self.returns
        still = share * exp(-age / mean)
        return still / (still + 1 - share) / mean if share < 1 else 1 / mean


class Declared(Deaf):
    """First what was declared dropped or whose session ended, oldest declaration first.

    Then what comes back least likely, by its kind and the time since its last use; with one kind
    this is LRU. A chunk that several sessions used does
    not go with one of them; one that is used again after a declaration counts as alive.
    """

    name = "declared"

    def __init__(self, budget: int = 0) -> None:
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._alive: dict[str, OrderedDict[int, None]] = {}  # by kind, oldest use first
        self._kind: dict[int, str] = {}  # of the living
        self._owner: dict[int, str | None] = {}  # None: several sessions
        self._owned: dict[str, dict[int, None]] = {}
        self._last: dict[int, int] = {}
        self._kinds: dict[str, Reuse] = {}
        self._all = Reuse()
        self._held, self._gone = Queue(), Queue()
        self._clock = 0

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Note the use, whose it was, and when the key was used before."""
        self._clock += 1
        before = self._last.get(key)
        interval = None if before is None else self._clock - before
        self._kinds.setdefault(facts.kind, Reuse()).add(interval)
        self._all.add(interval)
        self._last[key] = self._clock
        self._gone.pop(key)
        self._held.push(key, n_bytes)
        self._dead.pop(key, None)
        self._own(key, facts.session)
        self._bury(key)
        self._kind[key] = facts.kind
        self._alive.setdefault(facts.kind, OrderedDict())[key] = None

    def _own(self, key: int, session: str) -> None:
        if key not in self._owner:
            self._owner[key] = session
            self._owned.setdefault(session, {})[key] = None
        elif self._owner[key] != session:
            self._disown(key)
            self._owner[key] = None

    def _disown(self, key: int) -> None:
        session = self._owner.pop(key, None)
        if session is not None:
            self._owned[session].pop(key)
            if not self._owned[session]:
                del self._owned[session]

    def _bury(self, key: int) -> None:
        kind = self._kind.pop(key, None)
        if kind is not None:
            del self._alive[kind][key]

    def evicted(self, key: int) -> None:
        """Remember ``key`` for a while, so that its return is seen."""
        if key not in self._held:
            return
        self._gone.push(key, self._held.pop(key))
        self._bury(key)
        self._dead.pop(key, None)
        while self._gone.n_bytes > REMEMBERED * max(1, self._held.n_bytes):
            self.dropped(next(iter(self._gone)))

    def dropped(self, key: int) -> None:
        """Forget ``key`` everywhere."""
        self._held.pop(key)
        self._gone.pop(key)
        self._bury(key)
        self._dead.pop(key, None)
        self._last.pop(key, None)
        self._disown(key)

    def pruned(self, key: int) -> None:
        """Let ``key`` go before all that is alive."""
        if key in self._held:
            self._bury(key)
            self._dead[key] = None

    def ended(self, session: str) -> None:
        """Let go what only ``session`` used before all that is alive."""
        if session:
            for key in list(self._owned.get(session, ())):
                self.pruned(key)

    def victims(self) -> Iterator[int]:
        """Yield dead keys, then living ones, the least likely to come back first."""
        yield from self._dead
        for _, _, key in merge(*(self._of_kind(kind) for kind in self._alive)):
            yield key

    def _of_kind(self, kind: str) -> Iterator[tuple[float, int, int]]:
        reuse = self._kinds[kind].with_prior(self._all, PRIOR)
        for key in self._alive[kind]:
            yield reuse.rate(self._clock - self._last[key]), self._last[key], key

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is in two places or in none."""
        self._held.check_integrity()
        self._gone.check_integrity()
        dead, alive = set(self._dead), {key for keys in self._alive.values() for key in keys}
        assert alive == set(self._kind), "kinds of the living"
        assert not dead & alive and dead | alive == set(self._held), "dead or alive"
        known = set(self._held) | set(self._gone)
        assert known == set(self._owner) == set(self._last), "whose and when"
        owned = {(key, session) for session, keys in self._owned.items() for key in keys}
        assert owned == {(k, s) for k, s in self._owner.items() if s is not None}, "owned"

"""By what applications declare: prunes, ended sessions, kinds, the queue of requests; and by size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import log2

from kvweave.keep.base import UNKNOWN, Facts
from kvweave.keep.reuse import Group, ReuseTime

SHARED = 2  # live sessions that count as several
STEPS = 2  # sizes are told apart by so many steps per doubling
SMALLER = 0.25  # a chunk of half the bytes outweighs a return so many doublings likelier


class Declared(ReuseTime):
    """First what was declared dropped or whose session ended, oldest declaration first.

    Then what comes back least likely (`ReuseTime`), by kind, by size, and by how many live sessions
    have used it: none, one or several. The fourth root of the bytes is weighed in: of equally likely
    ones the bigger goes. Last what waiting requests will use, the last to be used first, as in
    CachedAttention (arXiv 2403.19708). Until a session is named, a second kind is seen or a prune is
    declared, this is LRU.

    A chunk that several sessions used does not go with them; one that is used again after a
    declaration counts as alive.
    """

    name = "declared"

    def __init__(self, budget: int = 0) -> None:
        super().__init__(budget)
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._users: dict[int, set[str]] = {}  # live sessions
        self._used_by: dict[str, dict[int, None]] = {}
        self._common: set[int] = set()  # used by several sessions, or by nobody named
        self._soon: dict[int, None] = {}  # what waiting requests use, soonest last
        self._kind: str | None = None
        self._told = False

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Note the use, whose it was, and how long after the one before it came."""
        self._dead.pop(key, None)
        self._told |= bool(facts.session) or self._kind not in (None, facts.kind)
        self._kind = facts.kind
        users = self._users.setdefault(key, set())
        if facts.session:
            if key in self._last and facts.session not in users:
                self._common.add(key)
            users.add(facts.session)
            self._used_by.setdefault(facts.session, {})[key] = None
        else:
            self._common.add(key)
        super().used(key, n_bytes, facts)

    def _group(self, key: int, n_bytes: int, facts: Facts) -> Group:
        size = int(STEPS * log2(max(1, n_bytes)))
        return Group(facts.kind, min(len(self._users[key]), SHARED), size)

    def _counts_as(self, group: Group) -> Group:
        return group._replace(size=group.size // STEPS)

    def _weight(self, group: Group) -> float:
        return float(2.0 ** (-SMALLER * group.size / STEPS))

    def evicted(self, key: int) -> None:
        """Remember ``key`` for a while, so that its return is seen; not if it was dead."""
        if key in self._dead:
            self.dropped(key)
        super().evicted(key)

    def dropped(self, key: int) -> None:
        """Forget ``key`` everywhere."""
        super().dropped(key)
        self._dead.pop(key, None)
        self._common.discard(key)
        for session in self._users.pop(key, ()):
            self._used_by[session].pop(key)
            if not self._used_by[session]:
                del self._used_by[session]

    def pruned(self, key: int) -> None:
        """Let ``key`` go before all that is alive, unless several live sessions use it."""
        if key not in self._last or key in self._dead or len(self._users[key]) > 1:
            return
        self._told = True
        self._drawn.clear()
        for stats in self._stats_of(self._counted[key]):
            stats.died(self._clock - self._last[key])
        if key in self._held:
            self._lift(key)
            self._dead[key] = None
        else:
            self.dropped(key)

    def ended(self, session: str) -> None:
        """Let go what only ``session`` used before all that is alive."""
        self._drawn.clear()
        for key in self._used_by.pop(session, ()):
            self._users[key].discard(session)
            if not self._users[key] and key not in self._common:
                self.pruned(key)
            elif key in self._place:
                group = self._place[key]
                self._lift(key)
                self._put(key, group._replace(sessions=min(len(self._users[key]), SHARED)))

    def upcoming(self, keys: Sequence[int]) -> None:
        """Let ``keys`` go after all others, the last one first."""
        self._soon = dict.fromkeys(reversed(dict.fromkeys(keys)))

    def victims(self) -> Iterator[int]:
        """Yield dead keys, then living ones, the least likely to come back first."""
        soon = self._soon
        yield from (key for key in self._dead if key not in soon)
        alive = super().victims() if self._told else iter(self._held)
        yield from (key for key in alive if key not in soon)
        yield from (key for key in soon if key in self._held)

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is in two places or in none."""
        super().check_integrity()
        assert not self._dead.keys() & self._place.keys(), "dead and alive"
        assert self._dead.keys() | self._place.keys() == set(self._held), "dead or alive"
        assert self._users.keys() == self._last.keys() >= self._common, "whose"
        users = {(key, session) for key, names in self._users.items() for session in names}
        used_by = {(key, session) for session, keys in self._used_by.items() for key in keys}
        assert users == used_by, "keys by session"

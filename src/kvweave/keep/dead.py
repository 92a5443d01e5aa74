"""What was declared dead goes first, else the least recently used: what a policy has to beat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvweave.keep.base import UNKNOWN, Deaf, Facts


class DeadFirst(Deaf):
    """Least recently used, but what was pruned, or used last by a session that ended, goes before.

    No model of anything. A chunk that is used again is alive again.
    """

    name = "dead_first"

    def __init__(self, budget: int = 0) -> None:
        self._alive: OrderedDict[int, str] = OrderedDict()  # key -> whose use was the last
        self._dead: OrderedDict[int, str] = OrderedDict()

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Move ``key`` to the end of the queue."""
        self._dead.pop(key, None)
        self._alive[key] = facts.session
        self._alive.move_to_end(key)

    def pruned(self, key: int) -> None:
        """Let ``key`` go before all that is alive."""
        if key in self._alive:
            self._dead[key] = self._alive.pop(key)

    def ended(self, session: str) -> None:
        """Let what ``session`` used last go before all that is alive."""
        for key in [key for key, whose in self._alive.items() if whose == session]:
            self.pruned(key)

    def dropped(self, key: int) -> None:
        """Forget ``key``."""
        self._alive.pop(key, None)
        self._dead.pop(key, None)

    def evicted(self, key: int) -> None:
        """Forget ``key``: nothing is learnt from its going."""
        self.dropped(key)

    def victims(self) -> Iterator[int]:
        """Yield dead keys, then living ones, oldest first."""
        yield from self._dead
        yield from self._alive

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is dead and alive."""
        assert not self._dead.keys() & self._alive.keys(), "dead and alive"

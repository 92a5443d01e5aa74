"""Least frequently used first, with ageing (LFU-DA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvweave.keep.base import UNKNOWN, Deaf, Facts
from kvweave.keep.ranks import Ranks

Worth = Callable[[int, Facts], float]


class LFU(Deaf):
    """Rank a chunk by its uses plus the rank of the last one that went.

    Without the second term, what was used much long ago would never go.
    """

    name = "lfu"

    def __init__(self, budget: int = 0, worth: Worth = lambda n_bytes, facts: 1.0) -> None:
        self._worth = worth  # of one use
        self._ranks = Ranks()
        self._uses: dict[int, int] = {}
        self._age = 0.0

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Count a use."""
        self._uses[key] = uses = self._uses.get(key, 0) + 1
        self._ranks.set(key, self._age + uses * self._worth(n_bytes, facts))

    def dropped(self, key: int) -> None:
        """Forget ``key`` and its uses."""
        self._ranks.pop(key)
        self._uses.pop(key, None)

    def evicted(self, key: int) -> None:
        """Forget ``key``; whoever comes now starts at its rank."""
        if key in self._ranks:
            self._age = max(self._age, self._ranks[key])
        self.dropped(key)

    def victims(self) -> Iterator[int]:
        """Yield keys, lowest rank first."""
        yield from self._ranks

    def check_integrity(self) -> None:
        """Raise AssertionError when uses and ranks have different keys."""
        self._ranks.check_integrity()
        assert set(self._uses) == set(self._ranks), "keys with uses and keys with a rank"

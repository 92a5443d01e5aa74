"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvweave.keep.base import UNKNOWN, Deaf, Facts


class LRU(Deaf):
    """Let the chunk go that was not used for the longest time."""

    name = "lru"

    def __init__(self, budget: int = 0) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Move ``key`` to the end of the queue."""
        self._order[key] = None
        self._order.move_to_end(key)

    def dropped(self, key: int) -> None:
        """Take ``key`` out of the queue."""
        self._order.pop(key, None)

    def evicted(self, key: int) -> None:
        """Forget ``key``: nothing is learnt from its going."""
        self.dropped(key)

    def victims(self) -> Iterator[int]:
        """Yield keys, oldest use first."""
        yield from self._order

    def check_integrity(self) -> None:
        """Do nothing: there is one record of each key."""

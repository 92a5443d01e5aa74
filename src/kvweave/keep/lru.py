"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LRU:
    """Let the chunk go that was not used for the longest time."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, key: int, n_bytes: int) -> None:
        """Move ``key`` to the end of the queue."""
        self._order[key] = None
        self._order.move_to_end(key)

    def dropped(self, key: int) -> None:
        """Take ``key`` out of the queue."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[int]:
        """Yield keys, oldest use first."""
        yield from list(self._order)

"""What is remembered of each namespace, the latest of it: nobody's can push out another's."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LatestOfEach(Generic[K, V]):
    """Values by namespace and key, ``most`` in all: where there are more, the namespace that has most of
    them loses what it used longest ago. One thread's."""

    def __init__(self, most: int) -> None:
        self.most, self._n = most, 0
        self._known: dict[str, OrderedDict[K, tuple[V, float]]] = {}

    def __len__(self) -> int:
        return self._n

    def note(self, namespace: str, key: K, value: V) -> None:
        """Remember a value, instead of one that has the key already."""
        mine = self._known.setdefault(namespace, OrderedDict())
        self._n += key not in mine
        mine[key] = value, time.time()
        mine.move_to_end(key)
        while self._n > self.most:
            self._forget(max(self._known, key=lambda name: len(self._known[name])))

    def find(self, namespace: str, key: K) -> V | None:
        """Return what was noted, which is used with that; None for nothing."""
        mine = self._known.get(namespace)
        if mine is None or key not in mine:
            return None
        value, _ = mine[key]
        mine[key] = value, time.time()
        mine.move_to_end(key)
        return value

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``."""
        for namespace in list(self._known):
            while (mine := self._known.get(namespace)) and next(iter(mine.values()))[1] < before:
                self._forget(namespace)

    def _forget(self, namespace: str) -> None:
        mine = self._known[namespace]
        mine.popitem(last=False)
        self._n -= 1
        if not mine:
            del self._known[namespace]

"""A queue in which tenants take turns, so that one with many requests does not hold up others."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import chain, islice, zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within a tenant; round robin over tenants that have something."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # in order of whose turn is next

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count(self, tenant: str) -> int:
        """Return how many items of a tenant wait."""
        return len(self._queues.get(tenant, ()))

    def put(self, tenant: str, item: T) -> None:
        """Queue behind the tenant's others; a tenant with none so far is last to take a turn."""
        self._queues.setdefault(tenant, deque()).append(item)

    def tenants(self) -> list[str]:
        """Return who has something here, in the order of their turns."""
        return list(self._queues)

    def next(self, but: Collection[str] = ()) -> str | None:
        """Return whose turn it is, of those not in ``but``; None where there is nobody."""
        return next((tenant for tenant in self._queues if tenant not in but), None)

    def take(self, but: Collection[str] = ()) -> T:
        """Return the next item, of no tenant in ``but``. Raises IndexError when there is none."""
        tenant = self.next(but)
        if tenant is None:
            raise IndexError("nothing waits")
        return self.take_of(tenant)

    def take_of(self, tenant: str) -> T:
        """Return the next item of a tenant that has one."""
        queue = self._queues.pop(tenant)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item

    def first(self, n: int) -> list[T]:
        """Return what would be taken next, at most ``n`` items, and leave it."""
        rounds = zip_longest(*self._queues.values())
        return list(islice((item for item in chain.from_iterable(rounds) if item is not None), n))

    def remove(self, tenant: str, item: T) -> bool:
        """Take an item out; False when it is not here."""
        queue = self._queues.get(tenant)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[tenant]
        return True

    def clear(self) -> list[T]:
        """Empty the queue and return what was in it, in the order it would have been taken."""
        left = []
        while self._queues:
            left.append(self.take())
        return left

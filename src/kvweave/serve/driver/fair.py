"""Whose turn it is: tenants take turns, and who had much waits for who wants little."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import chain, islice, zip_longest
from typing import Generic, TypeVar

from kvweave.run.ledger import Ledger

T = TypeVar("T")

MUCH = 50.0  # milliseconds lately, with which one had a share
PATIENCE = 8  # turns that he waits at most
LATELY = 60.0  # seconds
BETWEEN = (
    0.02  # seconds of calls, and of answers that begin, between two steps; at least one is run
)
AMONG_OTHERS = 0.005  # where several tenants came lately: who waits for a step waits for these, too


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

    def next(self, but: Collection[str] = (), behind: Collection[str] = ()) -> str | None:
        """Return whose turn it is, of those not in ``but``, those in ``behind`` last; None where
        there is nobody."""
        there = [tenant for tenant in self._queues if tenant not in but]
        return min(there, key=lambda tenant: tenant in behind, default=None)

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


class FairLock:
    """A lock of an event loop for which tenants take turns."""

    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._held = False

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold it, after those whose turn is first."""
        if self._held:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.put(tenant, mine)
            try:
                await mine
            except BaseException:
                self._waiting.remove(tenant, mine)
                if mine.done() and not mine.cancelled():  # it was given the lock meanwhile
                    self._let_go()
                raise
        self._held = True
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._held = False
        while self._waiting and not self._held:
            after = self._waiting.take()
            if not after.done():
                after.set_result(None)
                self._held = True


class Crowd:
    """Tells whether several tenants were here lately. From any thread."""

    def __init__(self) -> None:
        self._came: dict[str, float] = {}  # when each was here last

    def note(self, tenant: str) -> None:
        """Somebody asks for something."""
        self._came[tenant] = time.monotonic()

    def __bool__(self) -> bool:
        long_ago = time.monotonic() - LATELY
        came = tuple(self._came.items())  # at once: others come meanwhile
        self._came = {tenant: when for tenant, when in came if when > long_ago}
        return len(self._came) > 1

    @property
    def between(self) -> float:
        """Seconds that may go by between two steps."""
        return AMONG_OTHERS if self else BETWEEN


class Spent:
    """The time of one thread that each tenant had; who had much waits while others want little."""

    def __init__(self) -> None:
        self._ledger = Ledger(MUCH)
        self._turns = 0

    def turn(self) -> None:
        """Another turn begins."""
        self._turns += 1

    def greedy(self, there: Collection[str]) -> set[str]:
        """Return those of ``there`` that had much, and wait in this turn."""
        return self.behind(self._ledger.greedy(there))

    def behind(self, others: set[str]) -> set[str]:
        """Return those who wait in this turn for ``others`` to be first: all, and every eighth turn
        nobody."""
        return others if self._turns % PATIENCE else set()

    @contextmanager
    def by(self, tenant: str) -> Iterator[None]:
        """Work for a tenant."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._ledger.note([(tenant, 1000 * (time.monotonic() - started))])

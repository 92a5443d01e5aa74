"""Who may change a tenant's chunks at a time: many that are of some names each, or one that is of any.

A copy that is made while its chunk is replaced or removed would be of what is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary


class ChunkTurns:
    """The turns of one tenant. Nobody may ask for a second one while it has one."""

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._n = 0  # who is inside with some names
        self._none = asyncio.Event()
        self._none.set()
        self._names: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, names: Iterable[str]) -> AsyncGenerator[None, None]:
        """Wait until nobody else changes chunks of these names."""
        async with self._door:
            self._n += 1
            self._none.clear()
        try:
            async with AsyncExitStack() as held:
                for name in sorted(set(names)):
                    lock = self._names.setdefault(name, asyncio.Lock())
                    await held.enter_async_context(lock)
                yield
        finally:
            self._n -= 1
            if not self._n:
                self._none.set()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None, None]:
        """Wait until nobody else changes any; who comes meanwhile waits."""
        async with self._door:
            await self._none.wait()
            yield

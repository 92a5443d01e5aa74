"""Large bodies of one namespace come one after the other, and only so many bytes a second.

To parse one holds up every other request for a moment. Who sends little notices nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

LARGE = 64 * 1024  # bytes; a smaller body is not held up
RATE = 2 * 2**20  # bytes a second, for each namespace
BURST = 8 * 2**20  # bytes that may come at once after a while without any


@dataclass(slots=True)
class Bucket:
    """What a namespace may send now, and whose turn it is."""

    left: float = BURST
    at: float = field(default_factory=time.monotonic)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def wait(self, n_bytes: int) -> float:
        """Take ``n_bytes``; return the seconds until they are there."""
        now = time.monotonic()
        self.left = min(BURST, self.left + RATE * (now - self.at)) - n_bytes
        self.at = now
        return max(0.0, -self.left / RATE)


class Throttle:
    """The buckets of all namespaces."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    @asynccontextmanager
    async def turn(self, tenant: str, n_bytes: int) -> AsyncGenerator[None, None]:
        """Wait until a body of this size may be parsed; the next large one waits for the end."""
        if n_bytes < LARGE:
            yield
            return
        bucket = self._buckets.setdefault(tenant, Bucket())
        async with bucket.turn:
            await asyncio.sleep(bucket.wait(n_bytes))
            yield

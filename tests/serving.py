"""Drivers of tiny engines for the tests of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from weaving import text

from kvweave import Engine, Sampling
from kvweave.serve.driver import Driver, Finished
from kvweave.weave.generate import Answer


class Steps:
    """Lets a driver's thread make so many model passes and no more."""

    def __init__(self, engine: Engine) -> None:
        self.allowed = threading.Semaphore(0)
        self.open = threading.Event()
        self.before: Callable[[], None] = lambda: None
        self._step = engine.loop.step
        engine.loop.step = self.step  # type: ignore[method-assign]

    def step(self) -> bool:
        while not self.open.is_set() and not self.allowed.acquire(timeout=0.01):
            pass
        self.before()
        return self._step()

    def allow(self, n: int = 1) -> None:
        for _ in range(n):
            self.allowed.release()


class Driven:
    """A driver of a tiny engine, with answers of one context each."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.driver = Driver(engine, **options)
        self.steps = Steps(engine)
        self.begun: list[str] = []
        self.ended: list[tuple[str, list[str]]] = []
        self.driver.start()

    def answer(self, name: str, tenant: str = "", n: int = 3, turns: int = 1) -> Any:
        """Return the events of an answer of ``n`` tokens in each of ``turns`` new contexts."""

        def begin(engine: Engine) -> list[Any]:
            self.begun.append(name)
            made = []
            for i in range(turns):
                context = engine.context(f"{name}-{i}", denoise=False)
                context.append(text(5, i + 1))
                made.append(context.begin(Sampling(max_tokens=n, ignore_eos=True)))
            return made

        def done(engine: Engine, answers: list[Answer]) -> None:
            self.ended.append((name, [answer.finish for answer in answers]))
            for i in range(turns):
                engine.close_context(f"{name}-{i}")

        return self.driver.answer(tenant, begin, done)

    async def finishes(self, name: str, tenant: str = "", n: int = 3) -> list[str]:
        """Read an answer to its end; return how its turns ended."""
        events = [event async for event in self.answer(name, tenant, n)]
        return [event.answer.finish for event in events if isinstance(event, Finished)]

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for what the other thread does."""
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Wait until what was cancelled is gone."""
        await self.driver.call(lambda engine: engine.check_integrity(), tenant="|")


def run(main: Awaitable[None]) -> None:
    """Run a test's coroutine, and give up on one that hangs."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main

    asyncio.run(bounded())

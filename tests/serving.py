"""Drivers of tiny engines, and apps over the bundled model, for the tests of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from needs import PIP, lack

pytest.importorskip("fastapi", reason=lack("fastapi is not installed", PIP, "fastapi"))

from fastapi import FastAPI
from starlette.testclient import TestClient
from weaving import text

from kvweave import Engine, Sampling
from kvweave.serve.driver.thread import Driver, Finished
from kvweave.weave.answer import Answer


class Steps:
    """Lets a driver's thread make so many model passes and no more."""

    def __init__(self, engine: Engine) -> None:
        self.allowed = threading.Semaphore(0)
        self.open = threading.Event()
        self.n_asked = 0  # steps that the driver wanted to make
        self.before: Callable[[], None] = lambda: None
        self._step = engine.loop.step
        engine.loop.step = self.step  # type: ignore[method-assign]

    def step(self) -> bool:
        self.n_asked += 1
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


KEYS = {"key-of-anna": "anna", "key-of-berta": "berta"}
METRICS_KEY = "key-of-metrics"
BUNDLED = Path(__file__).parents[1] / "src" / "kvweave" / "demo" / "model"


class Caller:
    """Requests with one key."""

    def __init__(self, client: TestClient, key: str | None) -> None:
        self.client = client
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        status: int | tuple[int, ...] = 200,
        **more: Any,
    ) -> Any:
        """Return the JSON of an answer that has this status, or one of these."""
        content = more | ({} if body is None else {"json": body})
        found = self.client.request(method, path, headers=self.headers, **content)
        wanted = status if isinstance(status, tuple) else (status,)
        assert found.status_code in wanted, f"{method} {path}: {found.status_code} {found.text}"
        return found.json()

    def error(
        self, method: str, path: str, body: Any = None, status: int = 400, **more: Any
    ) -> Any:
        """Return the error of an answer that has this status."""
        return self(method, path, body, status, **more)["error"]

    def put(self, name: str, text: str, **more: Any) -> Any:
        return self("PUT", f"/v1/chunks/{name}", {"text": text, **more}, (200, 201))

    def names(self, pattern: str = "") -> list[str]:
        return [e["name"] for e in self("GET", "/v1/chunks", params={"pattern": pattern})["data"]]


class Served:
    """A running app and its callers."""

    def __init__(self, engine: Engine, app: FastAPI) -> None:
        self.engine, self.app = engine, app
        self.started = self.closed = False
        self.client = TestClient(app, "http://localhost", raise_server_exceptions=True)
        self.driver: Driver = app.state.kvweave.driver
        self.anna, self.berta = (Caller(self.client, key) for key in KEYS)
        self.nobody = Caller(self.client, None)

    def start(self) -> None:
        self.started = True
        self.client.__enter__()

    def close(self) -> None:
        """Stop the app, check and close the engine; doing it twice does nothing."""
        if not self.closed:
            self.closed = True
            if self.started:
                self.client.__exit__(None, None, None)
            self.engine.check_integrity()
            self.engine.close()

    def on_engine(self, work: Callable[[Engine], Any]) -> Any:
        """Return what ``work`` does in the driver's thread."""
        return self.client.portal.call(self.driver.call, work)  # type: ignore[union-attr]

    def settle(self) -> None:
        """Wait until no answer runs and the idle work behind the last one is done."""
        while any(self.driver.stats()[what] for what in ("active", "waiting", "later")):
            self.on_engine(lambda engine: None)

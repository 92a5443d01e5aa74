"""The verbs on chunks over HTTP, answered inside a vLLM worker: our server's own routes.

A request comes as plain data by vLLM's `collective_rpc`; it is answered in slices, between which
the worker runs its steps, so that nobody's decoding stands still for a long put.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kvweave.connect.vllm.host import Host
from kvweave.engine import Engine
from kvweave.run.loop import Task
from kvweave.serve.driver.thread import Driver
from kvweave.serve.driver.work import DriverCall
from kvweave.serve.guard import problems
from kvweave.serve.options import Options
from kvweave.serve.routes import chunks, place, placements, thin
from kvweave.serve.state import ServerState

T = TypeVar("T")
SLICE_SECONDS = 0.05
TURNS = 64  # of asyncio's loop between two passes: a number, so that all workers come as far
MOST_WAITING = 256  # requests under way together


@dataclass(frozen=True, slots=True)
class VerbRequest:
    """A request as plain data; the body is bytes."""

    method: str
    path: str  # with the query
    headers: Sequence[tuple[str, str]]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class VerbReply:
    """What came of it."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


class InlineDriver(Driver):
    """Runs calls at once, in the thread that asks: the worker's own, between two of its steps."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.engine)
        self.host = host

    async def call(self, work: Callable[[Engine], T | Task[T]], *, tenant: str = "") -> T:
        """Run ``work`` now; a task goes on with the host's."""
        result = work(self.engine)
        if not isinstance(result, Generator):
            return result
        call = DriverCall(work, asyncio.get_running_loop().create_future())
        self.host.ahead.pause()
        try:
            self.host.tasks.begin(result, call)
            found: T = await call.future
            return found
        finally:
            self.host.tasks.cancel(result)


class Verbs:
    """Requests under way, by ticket. Used in the worker's main thread only."""

    def __init__(self, host: Host) -> None:
        self.host, self.loop, self._tickets = host, asyncio.new_event_loop(), count(1)
        self._running: dict[int, asyncio.Task[VerbReply]] = {}
        host.ahead.others_wait = lambda: bool(self._running)
        app = FastAPI(redirect_slashes=False)
        state = ServerState(InlineDriver(host), Options())
        state.library = host.cutter.library  # what is put is found in prompts
        self._responses = state.responses  # none come here, but a home has a file of them
        app.state.kvweave = state
        problems.install(app)
        for rooms in (thin, place, chunks, placements):
            app.router.routes.extend(rooms.router.routes)
        self._app = app

    def close(self) -> None:
        """Give up what is under way."""
        for ticket in list(self._running):
            self.cancel(ticket)
        self._responses.close()
        self.loop.close()

    def begin(self, request: VerbRequest) -> tuple[int, VerbReply | None]:
        """Begin a request; return its ticket, and what came of it, if it took no more than a
        slice."""
        ticket = next(self._tickets)
        if len(self._running) >= MOST_WAITING:
            told = b'{"error": {"message": "too many requests wait", "code": "overloaded"}}'
            return ticket, VerbReply(503, [("retry-after", "1")], told)
        self._running[ticket] = self.loop.create_task(self._answer(request))
        return ticket, self.go_on(ticket)

    def go_on(self, ticket: int) -> VerbReply | None:
        """Go on for a slice; return what came of the request, None while it runs."""
        task, until = self._running[ticket], time.perf_counter() + SLICE_SECONDS
        goes_on = self.host.lockstep.goes_on
        while not task.done() and goes_on(time.perf_counter() < until):
            self.loop.run_until_complete(_turns())
            self.host.tasks.go_on()
            self.host.engine.loop.step()
            self.host.tasks.go_on()
        if not task.done():
            return None
        del self._running[ticket]
        return task.result()

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        task = self._running.pop(ticket, None)
        if task is not None:
            task.cancel()
            self.loop.run_until_complete(asyncio.wait({task}))

    async def _answer(self, request: VerbRequest) -> VerbReply:
        transport = httpx.ASGITransport(app=self._entered, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            reply = await client.request(
                request.method,
                request.path,
                headers=list(request.headers),
                content=request.body,
                timeout=None,
            )
        kept = [(k, v) for k, v in reply.headers.items() if k.lower() != "content-length"]
        return VerbReply(reply.status_code, kept, reply.content)

    async def _entered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Everybody whom vLLM lets in has the chunks of the one namespace."""
        scope.setdefault("state", {}).update(tenant="", sees_metrics=False)
        await self._app(scope, receive, send)


async def _turns() -> None:
    """Let whatever can go on do so."""
    for _ in range(TURNS):
        await asyncio.sleep(0)

"""The application: routers, limits, keys, metrics, and the driver's life.

::

    AccessLog (id, line) -> Requests (count) -> Access (key -> namespace)
        -> Limits (body, JSON, hang-ups) -> routes
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvweave.engine import Engine
from kvweave.errors import KVWeaveError
from kvweave.serve.anthropic import routes as anthropic
from kvweave.serve.driver.thread import Driver
from kvweave.serve.guard import problems
from kvweave.serve.guard.access import Access
from kvweave.serve.guard.access_log import AccessLog
from kvweave.serve.guard.limits import Limits
from kvweave.serve.listening import CONNECTIONS, GRACE
from kvweave.serve.metrics import Requests
from kvweave.serve.openai import models, tokens, vectors
from kvweave.serve.openai import routes as openai
from kvweave.serve.options import Options
from kvweave.serve.responses import conversations
from kvweave.serve.responses import routes as responses
from kvweave.serve.responses.used import before
from kvweave.serve.routes import (
    asked,
    chunks,
    contexts,
    edits,
    history,
    memory,
    page,
    place,
    placements,
    system,
    thin,
    turns,
)
from kvweave.serve.routes.system import OURS
from kvweave.serve.state import ServerState
from kvweave.weave.answer import Answer

ROOMS = (
    turns, edits, history, contexts, asked, memory, thin, place, chunks, system, placements, tokens,
    vectors, models, responses, conversations, anthropic,
)  # fmt: skip
log = logging.getLogger("kvweave.serve")


def create_app(engine: Engine, options: Options | None = None) -> FastAPI:
    """Return the app of one engine. Its lifespan starts and stops the driver; the engine stays open.

    ``app.state.kvweave`` is its `ServerState`.
    """
    options = options or Options()
    driver = Driver(engine, max_waiting=options.max_waiting, max_active=options.max_active)
    state = ServerState(driver, options)
    state.quota.bound_rows(engine.shelf)

    def count(tenant: str, answer: Answer, waited: float, context: str) -> None:
        state.metrics.answered(answer, waited)
        state.history.add(tenant, answer, waited, context)

    driver.on_answer = count

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncGenerator[None, None]:
        state.responses.expire(before(options.retain))
        driver.start()
        expiring = asyncio.create_task(_expire(state, options.retain))
        try:
            yield
        finally:
            expiring.cancel()
            await asyncio.to_thread(driver.stop, GRACE)
            await asyncio.to_thread(state.responses.close)

    app = _App(
        title="kvweave",
        version=version("kvweave"),
        summary="A language model's context as a list of named chunks whose KV is reused.",
        lifespan=life,
        docs_url=None,  # they would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.kvweave = state
    problems.install(app)
    # as they are: `include_router` builds each anew at the first request, which takes .2 s
    for router in (
        *(rooms.router for rooms in ROOMS),
        openai.make_router(state),
        page.make_router(),
    ):
        app.router.routes.extend(router.routes)
    _guard(app, state)
    return app


def _guard(app: FastAPI, state: ServerState) -> None:
    """Put the guards before the routes."""
    options = state.options
    # the last one added is the first to see a request
    app.add_middleware(
        Limits,
        max_body=options.max_body,
        body_timeout=options.body_timeout,
        max_requests=CONNECTIONS // (1 + len(set(options.keys.values()))),
    )
    app.add_middleware(
        Access,
        keys=options.keys,
        metrics_key=options.metrics_key,
        host=options.host,
        allowed_hosts=options.allowed_hosts,
        origins=options.cors_origins,
    )
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    app.add_middleware(Requests, metrics=state.metrics)
    app.add_middleware(AccessLog)


async def _expire(state: ServerState, seconds: float) -> None:
    """Forget again and again what was kept for so long without a use."""
    while True:
        await asyncio.sleep(min(max(seconds / 10, 0.1), 600.0))
        state.responses.expire(before(seconds))
        try:
            await state.call(OURS, lambda engine: state.expire(time.time() - seconds))
        except KVWeaveError as error:  # busy, or a disk that is full: another time
            log.warning("nothing was forgotten: %s", error)


class _App(FastAPI):
    """Describes what it really answers: what cannot be read is 400 here, not 422."""

    def openapi(self) -> dict[str, Any]:
        """Return the description in OpenAPI's form."""
        described = super().openapi()
        for ways in described["paths"].values():
            for way in ways.values():
                way["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        return described

"""The application of a router: its guards, its routes, and what goes on behind them.

::

    AccessLog (id, line) -> Access (hosts, origins) -> Tenancy -> Limits (body, JSON, hang-ups) -> routes
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.route import chunks, completions, contexts, own, stored
from kvweave.route.follow import following, probing
from kvweave.route.forward import Call
from kvweave.route.options import RouteOptions
from kvweave.route.state import Nonsense, NotAccepted, RouterState, answer_of, nonsense
from kvweave.serve.guard.access import Access
from kvweave.serve.guard.access_log import AccessLog
from kvweave.serve.guard.limits import Limits
from kvweave.serve.guard.problems import problem_of

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Tenancy:
    """ASGI middleware: who is who, for limits; a caller goes by the key that workers see.

    By few bits of its digest: strangers can write any, and limits keep something for each.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = Call.head_of(scope).caller
            digest = sha256(caller).hexdigest()[:3] if caller else ""
            scope.setdefault("state", {})["tenant"] = digest
        await self.app(scope, receive, send)


def create_router(options: RouteOptions) -> Starlette:
    """Return the app of one router. ``app.state.router`` is its `RouterState`."""
    state = RouterState(options)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncGenerator[None, None]:
        tasks = [asyncio.create_task(work(state)) for work in (probing, following)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await state.forwarder.close()

    guards = [
        Middleware(AccessLog),
        Middleware(Access, keys={}, host=options.host, allowed_hosts=options.allowed_hosts),
        Middleware(Tenancy),
        Middleware(Limits, max_body=options.max_body, body_timeout=options.body_timeout),
    ]
    app = Starlette(routes=_routes(), middleware=guards, lifespan=life)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _problem)
    app.add_exception_handler(NotAccepted, _not_accepted)
    app.add_exception_handler(Nonsense, _nonsense)
    app.state.router = state
    return app


async def _problem(request: Request, error: Exception) -> Response:
    return problem_of(error).response


async def _not_accepted(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotAccepted)
    return answer_of(error.told)


async def _nonsense(request: Request, error: Exception) -> Response:
    return nonsense().response


def _routes() -> list[BaseRoute]:
    def route(path: str, endpoint: Endpoint, *methods: str) -> BaseRoute:
        made = Route(path, endpoint, methods=list(methods))
        made.methods = set(methods)  # HEAD would be sent to workers that have none
        return made

    return [
        route("/health", own.health, "GET"),
        route("/metrics", own.metrics, "GET"),
        route("/v1/workers", own.workers, "GET"),
        route("/v1/workers/{name}", own.drain, "POST"),
        route("/v1/chat/completions", completions.complete, "POST"),
        route("/v1/completions", completions.complete, "POST"),
        route("/v1/embeddings", completions.complete, "POST"),
        route("/tokenize", completions.complete, "POST"),
        route("/detokenize", completions.complete, "POST"),
        route("/v1/messages", stored.answer, "POST"),
        route("/v1/messages/count_tokens", stored.answer, "POST"),
        route("/v1/responses", stored.answer, "POST"),
        route("/v1/responses/input_tokens", stored.answer, "POST"),
        route("/v1/responses/compact", stored.answer, "POST"),
        route("/v1/responses/{id:path}", stored.kept, "GET", "DELETE"),
        route("/v1/conversations", stored.opened, "POST"),
        route("/v1/conversations/{id:path}", stored.kept, "GET", "POST", "DELETE"),
        route("/v1/compactions/{id:path}", stored.kept, "GET", "POST"),
        route("/v1/models", completions.models, "GET"),
        route("/v1/models/{model:path}", completions.models, "GET"),
        route("/v1/contexts", contexts.listed, "GET"),
        route("/v1/contexts", contexts.opened, "POST"),
        route("/v1/contexts:compose", contexts.opened, "POST"),
        route("/v1/compose", contexts.opened, "POST"),
        route("/v1/contexts/{name:path}", contexts.one, "GET", "POST", "DELETE"),
        route("/v1/memory", contexts.listed, "GET"),
        route("/v1/memory/{name:path}", contexts.remembered, "GET", "POST", "DELETE"),
        route("/v1/chunks", chunks.read, "GET"),
        route("/v1/chunks:put", chunks.put, "POST"),
        route("/v1/chunks:find", chunks.read, "GET"),
        route("/v1/chunks:du", chunks.read, "GET"),
        route("/v1/chunks/{name:path}", chunks.read, "GET"),
        route("/v1/chunks/{name:path}", chunks.put, "PUT"),
        route("/v1/chunks/{name:path}", chunks.change, "POST", "DELETE"),
        route(
            "/{rest:path}",
            own.not_routed,
            "GET",
            "POST",
            "PUT",
            "DELETE",
            "PATCH",
            "OPTIONS",
            "HEAD",
        ),
    ]

"""The endpoint plugin: ``/v1/chunks`` in vLLM's own server, and requests that cannot be woven refused.

vLLM loads it where ``VLLM_PLUGINS`` names it: ``kvweave``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.connect.vllm.spec import KEY, spec_of
from kvweave.errors import InvalidArgument, KVWeaveError, Overloaded
from kvweave.serve.guard.problems import problem_of

MOST_BYTES = 8 << 20  # of the body of a verb: what is more would hold up vLLM while it is read
MOST_CHECKED = 64 << 20  # of the body of a completion
DEEPEST = 32  # levels of kv_transfer_params: vLLM cannot send on what is nested hundreds deep
WOVEN = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PASSED = ("content-type", "if-match", "idempotency-key", "accept")  # headers that verbs read
VERBS = ["GET", "PUT", "POST", "DELETE", "PATCH", "HEAD"]


class KVWeavePlugin:
    """What vLLM asks of an endpoint plugin."""

    name = "kvweave"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/v1/chunks", _verb, methods=VERBS, include_in_schema=False)
        app.add_api_route("/v1/chunks:{rest:path}", _verb, methods=VERBS, include_in_schema=False)
        app.add_api_route("/v1/chunks/{rest:path}", _verb, methods=VERBS, include_in_schema=False)
        app.add_middleware(Checked, engine_of=lambda: getattr(app.state, "kvweave_engine", None))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there, None where this process only renders."""
        state.kvweave_engine, state.kvweave_turn = engine_client, asyncio.Lock()


def make() -> KVWeavePlugin:
    """Return the plugin; the entry point."""
    return KVWeavePlugin()


async def _verb(request: Request) -> Response:
    """Have a worker answer a verb on chunks, slice by slice."""
    state = request.app.state
    engine, turn = getattr(state, "kvweave_engine", None), getattr(state, "kvweave_turn", None)
    if engine is None or turn is None:
        return _refused(Overloaded(1))
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            return _refused(InvalidArgument("body", f"it has more than {MOST_BYTES} bytes"))
    path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
    path = path.split("?", 1)[0] + (f"?{request.url.query}" if request.url.query else "")
    headers = [(k, v) for k, v in request.headers.items() if k in PASSED]
    said = (request.method, path, headers, bytes(body))
    # one call at a time: vLLM takes all that wait between two of its steps
    async with turn:
        if await request.is_disconnected():
            return Response(status_code=499)
        ticket, reply = (await engine.collective_rpc("kvweave_begin", args=said))[0]
    try:
        while reply is None:
            async with turn:
                if await request.is_disconnected():
                    return Response(status_code=499)
                reply = (await engine.collective_rpc("kvweave_go_on", args=(ticket,)))[0]
    finally:
        if reply is None:
            async with turn:
                await engine.collective_rpc("kvweave_cancel", args=(ticket,))
    status, headers, content = reply
    return Response(content, status, dict(headers))


class Checked:
    """ASGI middleware: a request whose ``kvweave`` is wrong, or names what is not there, is refused
    in vLLM's own shape, before vLLM sees it."""

    def __init__(self, app: ASGIApp, engine_of: Any) -> None:
        self.app, self.engine_of = app, engine_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in WOVEN or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, messages = bytearray(), []
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            ended = message["type"] != "http.request" or not message.get("more_body", False)
            if ended or len(body) > MOST_CHECKED:
                break

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        try:
            await self._check(bytes(body))
        except KVWeaveError as error:
            await _refused(error)(scope, again, send)
            return
        await self.app(scope, again, send)

    async def _check(self, body: bytes) -> None:
        if b"kv_transfer_params" not in body and b"\\u" not in body:
            return
        try:
            said = json.loads(body)
            params, prompt = said.get("kv_transfer_params"), said.get("prompt")
        except (ValueError, AttributeError, RecursionError):
            return  # vLLM says what is wrong with it
        if _depth(params) > DEEPEST:
            raise InvalidArgument("kv_transfer_params", f"it is nested more than {DEEPEST} deep")
        engine = self.engine_of()
        most = None if engine is None else engine.model_config.max_model_len
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            most = len(prompt)
        spec = spec_of(params if isinstance(params, Mapping) else None, most)
        names = [part.chunk for part in spec.parts if part.chunk is not None] if spec else []
        if spec is None or not names or engine is None:
            return
        missing = (await engine.collective_rpc("kvweave_missing", args=(names, spec.namespace)))[0]
        if missing:
            raise InvalidArgument(
                KEY, f"no chunk {missing[0]!r}", "store it first: PUT /v1/chunks/NAME"
            )


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested, counted no further than is allowed."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        inner = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [one for each in inner if isinstance(each, list) for one in each]
        depth += 1
    return depth


def _refused(error: KVWeaveError) -> JSONResponse:
    """Return an error as vLLM says its own: ``code`` is the status."""
    problem = problem_of(error)
    told = problem.body["error"]
    kinds = {404: "NotFoundError", 503: "ServiceUnavailableError"}
    body = {
        "message": " ".join(filter(None, (told["message"], told.get("hint")))),
        "type": kinds.get(problem.status, "BadRequestError"),
        "param": told.get("param"),
        "code": problem.status,
    }
    return JSONResponse({"error": body}, problem.status)

"""What stands in vLLM's server before a completion: refusals, content parts, and reports behind it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.connect.vllm.content import CHAT, DIALECTS, MESSAGES, PARAMS, chunks_of, filled
from kvweave.connect.vllm.spec import KEY, WeaveSpec, spec_of
from kvweave.connect.vllm.told import Telling
from kvweave.errors import ChunkNotFound, ContextTooLong, InvalidArgument, KVWeaveError
from kvweave.serve.guard.problems import problem_of

MOST_CHECKED = 64 << 20  # of the body of a completion
DEEPEST = 32  # levels of kv_transfer_params: vLLM cannot send on what is nested hundreds deep
WOVEN = ("/v1/completions", *DIALECTS)
STREAMED = ("/v1/completions", CHAT)  # whose events are known here


@dataclass(frozen=True, slots=True)
class WovenBody:
    """A request that says something to us: its body as vLLM is to see it, None as it came.

    ``ticket``: under which the worker keeps the report for a stream.
    """

    body: bytes | None = None
    ticket: str | None = None


class Checked:
    """ASGI middleware: a request whose ``kvweave`` is wrong, or names what is not there, is refused
    in vLLM's own shape, before vLLM sees it; content parts become text; streams get reports.

    What says nothing to us goes through as it came.
    """

    def __init__(
        self, app: ASGIApp, engine_of: Callable[[], Any], after: Callable[[bool], object]
    ) -> None:
        """``engine_of``: returns vLLM's client of the engine, None where there is none.
        ``after``: is called behind each request, with whether it says something to us."""
        self.app, self.engine_of, self.after = app, engine_of, after
        self._turn = asyncio.Lock()  # one text is read at a time, between two of vLLM's steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in WOVEN or scope["method"] != "POST":
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
            woven = await self._check(path, bytes(body))
        except KVWeaveError as error:
            await refused(error, path)(scope, again, send)
            return
        if woven is None:
            try:
                await self.app(scope, again, send)
            finally:
                self.after(False)
            return
        if woven.body is not None:
            messages[:] = [{"type": "http.request", "body": woven.body, "more_body": False}]
            others = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
            length = (b"content-length", str(len(woven.body)).encode())
            scope = {**scope, "headers": [*others, length]}
        try:
            await self.app(scope, again, Telling(send, lambda: self._report(woven.ticket)))
        finally:
            self.after(True)

    async def _check(self, path: str, body: bytes) -> WovenBody | None:
        if not any(each in body for each in (PARAMS.encode(), b'"chunk"', b"\\u")):
            return None
        try:
            said = json.loads(body)
            params, prompt = said.get(PARAMS), said.get("prompt")
        except (ValueError, AttributeError, RecursionError):
            return None  # vLLM says what is wrong with it
        names = chunks_of(said, path) if path in DIALECTS else []
        if _depth(params) > DEEPEST:
            raise InvalidArgument(PARAMS, f"it is nested more than {DEEPEST} deep")
        engine = self.engine_of()
        most = None if engine is None else engine.model_config.max_model_len
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            most = len(prompt)
        spec = spec_of(params if isinstance(params, Mapping) else None, most)
        if engine is None or (spec is None and not names):
            return None
        await self._require(engine, spec or WeaveSpec())
        if names:
            texts = await self._texts(engine, names, spec.namespace if spec else "")
            said = filled(said, texts, path)
        return _woven(path, said, changed=bool(names))

    async def _require(self, engine: Any, spec: WeaveSpec) -> None:
        """Raise InvalidArgument where a declared chunk is not there."""
        names = [part.chunk for part in spec.parts if part.chunk is not None]
        if not names:
            return
        missing = (await engine.collective_rpc("kvweave_missing", args=(names, spec.namespace)))[0]
        if missing:
            raise InvalidArgument(
                KEY, f"no chunk {missing[0]!r}", "store it first: PUT /v1/chunks/NAME"
            )

    async def _texts(self, engine: Any, names: list[str], namespace: str) -> dict[str, str]:
        """Return the texts of chunks. Raises ChunkNotFound, ContextTooLong, InvalidArgument."""
        texts: dict[str, str] = {}
        sizes: dict[str, int] = {}
        limit = engine.model_config.max_model_len
        left = list(dict.fromkeys(names))
        while left:
            async with self._turn:
                said = (left, namespace)
                found = (await engine.collective_rpc("kvweave_texts", args=said))[0]
            for name, each in zip(left, found, strict=False):
                if each is None:
                    raise ChunkNotFound(name)
                sizes[name], text = each
                if text is None:
                    hint = "give its tokens in a prompt, and name it in kv_transfer_params"
                    raise InvalidArgument("messages", f"no text has the tokens of {name!r}", hint)
                texts[name] = text
            n = sum(sizes.get(name, 0) for name in names)
            if n > limit:
                raise ContextTooLong(n, limit)
            left = left[len(found) :]
        return texts

    async def _report(self, ticket: str | None) -> dict[str, Any] | None:
        engine = self.engine_of()
        if engine is None or ticket is None:
            return None
        found: dict[str, Any] | None
        found = (await engine.collective_rpc("kvweave_report", args=(ticket,)))[0]
        return found


def _woven(path: str, said: dict[str, Any], changed: bool) -> WovenBody:
    if path not in STREAMED or said.get("stream") is not True:
        return WovenBody(_written(said) if changed else None)
    ticket = secrets.token_hex(12)
    params = said[PARAMS]
    said = {**said, PARAMS: {**params, KEY: {**params[KEY], "ticket": ticket}}}
    return WovenBody(_written(said), ticket)


def _written(said: dict[str, Any]) -> bytes:
    try:
        return json.dumps(said).encode()
    except RecursionError:
        raise InvalidArgument(
            "body", "it is nested too deep", "send it less deeply nested"
        ) from None


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested, counted no further than is allowed."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        inner = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [one for each in inner if isinstance(each, list) for one in each]
        depth += 1
    return depth


def refused(error: KVWeaveError, path: str = "") -> JSONResponse:
    """Return an error as vLLM says its own: ``code`` is the status; as Anthropic's API does where that
    is spoken."""
    problem = problem_of(error)
    told = problem.body["error"]
    kinds = {404: "NotFoundError", 503: "ServiceUnavailableError"}
    body = {
        "message": " ".join(filter(None, (told["message"], told.get("hint")))),
        "type": kinds.get(problem.status, "BadRequestError"),
        "param": told.get("param"),
        "code": problem.status,
    }
    if path == MESSAGES:
        kinds = {404: "not_found_error", 503: "overloaded_error"}
        kind = kinds.get(problem.status, "invalid_request_error")
        spoken = {"type": "error", "error": {"type": kind, "message": body["message"]}}
        return JSONResponse(spoken, problem.status, problem.headers)
    return JSONResponse({"error": body}, problem.status, problem.headers)

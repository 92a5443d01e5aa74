"""What a request may be: its size, how long it takes to arrive, and that it is sound JSON.

The body is read here in full, within the limits, and then played to the app. From then on the
connection is watched: when the client goes away, what answers it is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

import jiter
import re2  # type: ignore[import-untyped]
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.errors import Overloaded
from kvweave.serve.guard.problems import CLOSE, Problem, make, problem_of
from kvweave.serve.guard.throttle import Throttle

MAX_DEPTH = 100  # of nested lists and objects
MAX_INNER = 100_000  # lists and objects in one request; parsing them holds up everybody
MAX_URL = 8_192  # bytes of path and query
_HUGE = re2.compile(rb"[0-9][eE]\+?0*[1-9][0-9][0-9]|[0-9]{309}")  # a number that may be infinite
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


TOGETHER = 8
RETRY_SECONDS = 5


class Gone(Exception):
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a request's JSON says."""

    value: Any


def parsed(scope: Scope) -> Parsed | None:
    """Return what a request's JSON says, where `Limits` has read it; once, as it is large while an answer is long."""
    found: Parsed | None = scope.get("state", {}).pop("json", None)
    return found


class Limits:
    """ASGI middleware in front of all routes; also answers what they fail to.

    A namespace may have ``max_requests`` under way, so that others find a connection, and of those
    that came whole bodies of `TOGETHER` times ``max_body`` bytes.
    """

    def __init__(
        self, app: ASGIApp, max_body: int, body_timeout: float, max_requests: int = 1024
    ) -> None:
        self.app, self.max_body, self.body_timeout = app, max_body, body_timeout
        self.max_requests = max_requests
        self._throttle = Throttle()
        self._requests: Counter[str] = Counter()  # that are here, by namespace
        self._under_way: Counter[str] = Counter()  # bytes of bodies, by namespace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tenant = scope.get("state", {}).get("tenant", "")
        if self._requests[tenant] >= self.max_requests:
            problem = problem_of(Overloaded(RETRY_SECONDS))
            await replace(problem, headers=problem.headers | CLOSE).response(scope, receive, send)
            return
        self._requests[tenant] += 1
        try:
            await self._take(tenant, scope, receive, send)
        finally:
            self._requests[tenant] -= 1

    async def _take(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._throttle.turn(tenant, self._said(scope)):
                body = check_path(scope) or await self._body(scope, receive)
                if not isinstance(body, Problem) and _is_json(scope) and body:
                    found = check_json(body)
                    body = found if isinstance(found, Problem) else body
                    scope.setdefault("state", {})["json"] = found
        except Gone:
            return
        if isinstance(body, Problem):
            await body.response(scope, receive, send)
            return
        if self._under_way[tenant] + len(body) > TOGETHER * self.max_body:
            problem = problem_of(Overloaded(RETRY_SECONDS))
            await problem.response(scope, receive, send)
            return
        self._under_way[tenant] += len(body)
        try:
            await _Exchange(scope, receive, send, body).run(self.app)
        finally:
            self._under_way[tenant] -= len(body)

    def _said(self, scope: Scope) -> int:
        """Return how many bytes a body has, by what is said of it; of the worst kind if nothing is."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdecimal():
            return min(int(length), self.max_body)
        return self.max_body if "transfer-encoding" in headers else 0

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Problem:
        """Return the whole body, or why it is refused. Raises Gone."""
        length = Headers(scope=scope).get("content-length", "0")
        too_large = make(
            413, f"the request has more than {self.max_body:,} bytes",
            code="request_too_large", headers=CLOSE,
        )  # fmt: skip
        if not length.isdecimal() or int(length) > self.max_body:
            return too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    body += message.get("body", b"")
                    if len(body) > self.max_body:
                        return too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            return make(
                408, f"the request did not arrive within {self.body_timeout:g} s", headers=CLOSE
            )


class _Exchange:
    """One request that is played to the app while its client is watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        self.scope, self.body = scope, body
        self._receive, self._send = receive, send
        self._played = self._started = self._ended = False
        self._gone = asyncio.Event()

    async def run(self, app: ASGIApp) -> None:
        """Run the app to its end, or until the client is gone."""
        answer = asyncio.ensure_future(self._answer(app))
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not self._ended:
                answer.cancel()
            await asyncio.wait((answer,))
        finally:
            watch.cancel()
            answer.cancel()
        if not answer.cancelled():
            answer.result()

    async def _answer(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self._play, self._say)
        except Exception as error:
            if self._gone.is_set():
                return
            problem = problem_of(error)
            if not self._started:  # else the server cuts the connection: what was sent is not whole
                await problem.response(self.scope, self._play, self._say)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()

    async def _play(self) -> Message:
        if not self._played:
            self._played = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _say(self, message: Message) -> None:
        self._started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)


def check_path(scope: Scope) -> Problem | None:
    """Return why a path is refused: it is too long, no UTF-8, or has control characters."""
    raw = scope.get("raw_path") or scope["path"].encode()
    if len(raw) + len(scope.get("query_string", b"")) > MAX_URL:
        return make(414, f"the address has more than {MAX_URL:,} bytes", code="uri_too_long")
    try:
        path = unquote_to_bytes(raw).decode()
        unquote_to_bytes(scope.get("query_string", b"")).decode()
    except UnicodeDecodeError:
        return make(400, "the address is not UTF-8", code="invalid_request")
    if _CONTROL.search(path):
        return make(400, "the address has control characters", code="invalid_request")
    return None


def check_json(body: bytes) -> Parsed | Problem:
    """Return what ``body`` says if it is JSON as its RFC has it: no NaN, no half characters, no name twice."""
    n_inner = _n_inner(body)
    if n_inner > MAX_INNER and _n_inner(_STRING.sub(b"", body)) > MAX_INNER:
        message = f"the JSON has more than {MAX_INNER:,} lists and objects"
        return make(400, message, code="invalid_json")
    try:
        # all threads wait for each other while one runs Python: a parser that calls none of it
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
        if n_inner > MAX_DEPTH and _is_deep(value):
            return _too_deep()
        if _HUGE.search(body):
            json.dumps(value, allow_nan=False)
    except ValueError as error:
        twice = str(error).startswith("Detected duplicate key")
        why = "a name is given twice" if twice else "the request is not JSON"
        return make(400, f"{why}: {error}", code="invalid_json")
    return Parsed(value)


def _n_inner(body: bytes) -> int:
    """Return how many lists and objects there are at most; brackets in strings count."""
    return body.count(b"[") + body.count(b"{")


def _is_deep(value: object) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        values = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [x for each in values for x in each if (kind := type(x)) is dict or kind is list]
        if not level:
            return False
    return True


def _too_deep() -> Problem:
    return make(400, f"the JSON is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _is_json(scope: Scope) -> bool:
    return "json" in Headers(scope=scope).get("content-type", "").lower()

"""A name for each request, and a line about it that has nothing of what was said.

The line has the namespace and the route's template, never a path, query, body or key.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.serve.guard.problems import OF_MESSAGES, REQUEST_ID, speaks_messages

log = logging.getLogger("kvweave.access")

HEADER = "X-Request-Id"
REFUSED = (401, 403)
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class AccessLog:
    """ASGI middleware around all others, so that a stream counts until its end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id, started = request_id(Headers(scope=scope)), time.perf_counter()
        status, n_bytes = 499, 0  # 499: the client went away before there was one

        async def note(message: Message) -> None:
            nonlocal status, n_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = id
                if of_messages:
                    MutableHeaders(scope=message)["Request-Id"] = id
            elif message["type"] == "http.response.body" and scope["method"] != "HEAD":
                n_bytes += len(message.get("body", b""))
            await send(message)

        of_messages = speaks_messages(scope)
        token, which = REQUEST_ID.set(id), OF_MESSAGES.set(of_messages)
        try:
            await self.app(scope, receive, note)
        finally:
            REQUEST_ID.reset(token)
            OF_MESSAGES.reset(which)
            _tell(scope, id, status, n_bytes, 1000 * (time.perf_counter() - started))


def request_id(headers: Headers) -> str:
    """Return the id a client gave its request, or a new one for none and for what is no id."""
    given = headers.get(HEADER, "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _tell(scope: Scope, id: str, status: int, n_bytes: int, ms: float) -> None:
    refused = status in REFUSED
    level = logging.WARNING if refused else logging.INFO
    if not log.isEnabledFor(level):
        return
    log.log(
        level,
        "%s namespace=%r %s %s status=%d bytes=%d ms=%.1f%s",
        id,
        scope.get("state", {}).get("tenant", ""),
        scope["method"] if scope["method"] in METHODS else "other",
        getattr(scope.get("route"), "path", "none"),
        status,
        n_bytes,
        ms,
        f" peer={(scope.get('client') or ('-',))[0]}" if refused else "",
    )

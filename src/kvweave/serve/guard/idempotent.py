"""``Idempotency-Key``: a request that is sent again is answered again, and done once.

What is kept of a request is its digest and its answer, of each namespace so many, for a day.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response, StreamingResponse

from kvweave.errors import IdempotencyKeyReused, InvalidArgument, KVWeaveError

log = logging.getLogger("kvweave.serve")

HEADER = "Idempotency-Key"
MOST_ANSWERS = 256  # of one namespace
MOST_BYTES = 2**20  # of one answer; a longer one is not kept
MOST_TOGETHER = 8 * 2**20  # of the answers of one namespace, the oldest of which go first
SECONDS = 86_400.0
MAX_KEY = 128  # characters
TOLD = KVWeaveError, HTTPException, RequestValidationError  # of whoever asked; no fault here
AGAIN = (408, 409, 425, 429)  # answers that say: try again


@dataclass(slots=True)
class KeptAnswer:
    """A request under way, or its answer."""

    digest: bytes
    at: float = field(default_factory=time.monotonic)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    answer: tuple[int, dict[str, str], bytes] | None = None

    @property
    def body(self) -> bytes:
        return b"" if self.answer is None else self.answer[2]


class Idempotent:
    """The answers of each namespace by the keys of their requests."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, KeptAnswer]] = {}
        self._doing: set[asyncio.Task[Response]] = set()

    async def answer(
        self, tenant: str, request: Request, handle: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Handle a request, or answer as the first of its key was.

        Raises IdempotencyKeyReused where that was another request. One that failed, or was told to
        try again, is handled anew; so is one whose answer is a stream.
        """
        key = request.headers.get(HEADER, "")
        if not 0 < len(key) <= MAX_KEY:
            raise InvalidArgument(HEADER, f"it has {len(key)} characters, not 1 to {MAX_KEY}")
        head = f"{request.method} {request.url.path}?{request.url.query}\n".encode()
        digest = blake2b(head + await request.body(), digest_size=16).digest()
        mine = self._kept.setdefault(tenant, OrderedDict())
        self._expire(mine)
        while (known := mine.get(key)) is not None:
            if known.digest != digest:
                raise IdempotencyKeyReused(key)
            if known.answer is not None:
                status, headers, body = known.answer
                return Response(body, status, {**headers, "Idempotent-Replayed": "true"})
            await known.over.wait()
        kept = mine[key] = KeptAnswer(digest)

        async def once() -> Response:
            try:
                response = await handle(request)
                kept.answer = _whole(response)
                return response
            finally:
                if kept.answer is None:
                    del mine[key]
                kept.over.set()

        # who hangs up asks again: what began is done, and told then
        doing = asyncio.create_task(once())
        self._doing.add(doing)
        doing.add_done_callback(self._doing.discard)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            doing.add_done_callback(_unheard)
            raise

    def _expire(self, mine: OrderedDict[str, KeptAnswer]) -> None:
        since = time.monotonic() - SECONDS
        old = [key for key, kept in mine.items() if kept.answer is not None]
        n_bytes = sum(len(mine[key].body) for key in old)
        for i, key in enumerate(old):
            if len(old) - i < MOST_ANSWERS and n_bytes <= MOST_TOGETHER:
                break
            n_bytes -= len(mine.pop(key).body)
        for key in [key for key in old if key in mine and mine[key].at < since]:
            del mine[key]


def _unheard(doing: asyncio.Task[Response]) -> None:
    """Take what a request ended in of which nobody is told; only what is our fault is told the log."""
    error = None if doing.cancelled() else doing.exception()
    if error is not None and not isinstance(error, TOLD):
        log.error("a request that was hung up on failed", exc_info=error)


def _whole(response: Response) -> tuple[int, dict[str, str], bytes] | None:
    """Return what is kept of an answer; None if nothing is."""
    status = response.status_code
    if isinstance(response, StreamingResponse) or status >= 500 or status in AGAIN:
        return None
    body = bytes(response.body)
    if len(body) > MOST_BYTES:
        return None
    names = ("content-type", "etag")
    return status, {k: v for k, v in response.headers.items() if k in names}, body

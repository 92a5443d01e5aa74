"""A worker's answer on its way to the client, and what is read of it in passing.

A stream goes on event by event, whole ones only: where a worker dies, the client has every event before,
then one that says so, and no ``[DONE]``. An answer that is no stream is cut off where the worker's was,
which HTTP shows: nothing that was cut short looks complete.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from kvweave.route.forward import headers_of
from kvweave.serve.guard.problems import Problem, make

MAX_EVENT = 16 * 2**20  # bytes; what is longer goes on in pieces
MAX_TEXT = 2**20  # characters of an answer that are read
ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class AnswerRead:
    """What is read of a completion: its usage, and its first choice's text."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] | None = None
        self.text = ""
        self.ended = self.failed = False

    def whole(self, body: bytes) -> None:
        """Read an answer that is no stream."""
        self._take(body)
        self.ended = True

    def event(self, event: bytes) -> None:
        """Read an event of a stream."""
        lines = [line for line in event.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(line[5:].strip() for line in lines)
        if data == b"[DONE]":
            self.ended = True
        elif data:
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(told, dict):
            return
        self.failed = self.failed or "error" in told
        if isinstance(told.get("usage"), dict):
            self.usage = told["usage"]
        choices = told.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(first, dict) and not first.get("index"):
            said = first.get("delta") or first.get("message") or {}
            text = said.get("content") if isinstance(said, dict) and said else first.get("text")
            if isinstance(text, str) and len(self.text) < MAX_TEXT:
                self.text += text

    @property
    def n_prompt(self) -> int | None:
        """Tokens of the prompt; None where the answer does not say."""
        return _int((self.usage or {}).get("prompt_tokens"))

    @property
    def n_cached(self) -> int | None:
        """Tokens of the prompt that the worker had; None where the answer does not say."""
        usage = self.usage or {}
        kv = usage.get("kv")
        if isinstance(kv, dict):
            names = ("exact", "reused", "patched", "repaired")
            return sum(_int(kv.get(name)) or 0 for name in names)
        details = usage.get("prompt_tokens_details")
        return _int(details.get("cached_tokens")) if isinstance(details, dict) else None


def _int(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else None


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole events of a stream, as soon as they are whole; what was left of one is lost."""
    held = b""
    async for piece in pieces:
        held += piece
        at = max(held.rfind(end) + len(end) if end in held else 0 for end in ENDS)
        if at:
            yield held[:at]
            held = held[at:]
        elif len(held) > MAX_EVENT:
            yield held
            held = b""


def broken(why: str) -> Problem:
    """Return what a client is told whose answer broke off."""
    hint = "what came before it is right, but not all: send the request again"
    return make(502, f"the worker that answered is gone: {why}", code="worker_died", hint=hint)


class Passing:
    """An ASGI answer that goes on as it comes. ``until`` is closed at the end, however it comes."""

    def __init__(
        self,
        response: httpx.Response,
        until: ExitStack,
        read: AnswerRead | None = None,
        done: Callable[[], None] = lambda: None,
        cut: Callable[[str], None] = lambda why: None,
    ) -> None:
        """``done`` is called when all of it went on, ``cut`` where the worker's answer broke off."""
        self.response, self.until = response, until
        self._read, self._done, self._cut = read or AnswerRead(), done, cut

    @property
    def is_stream(self) -> bool:
        """Whether it is events that can be told apart."""
        headers = self.response.headers
        kind = headers.get("content-type", "").lower()
        return kind.startswith("text/event-stream") and "content-encoding" not in headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it on."""
        with self.until:
            try:
                headers = headers_of(self.response)
                if self.is_stream:
                    headers = [(k, v) for k, v in headers if k != b"content-length"]
                status = self.response.status_code
                await send({"type": "http.response.start", "status": status, "headers": headers})
                body = self._events() if self.is_stream else self.response.aiter_raw()
                try:
                    async for piece in body:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except (httpx.TransportError, httpx.StreamError) as error:
                    self._cut(str(error) or type(error).__name__)
                    raise
                await send({"type": "http.response.body", "body": b""})
                self._done()
            finally:
                await self.response.aclose()

    async def _events(self) -> AsyncIterator[bytes]:
        why = "its stream ended early"
        try:
            async for found in events(self.response.aiter_raw()):
                for event in found.replace(b"\r\n", b"\n").split(b"\n\n"):
                    self._read.event(event)
                yield found
        except (httpx.TransportError, httpx.StreamError) as error:
            why = str(error) or type(error).__name__
        if not self._read.ended and not self._read.failed:
            self._cut(why)
            yield f"data: {json.dumps(broken(why).body)}\n\n".encode()

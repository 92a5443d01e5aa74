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
# what ends a stream whose events have names, in Anthropic's API and OpenAI's
LAST = frozenset("message_stop response.completed response.incomplete response.failed".split())
PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
NOUNS = {"response": "responses", "conversation": "conversations"}  # ``object`` -> below /v1
ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class AnswerRead:
    """What is read of an answer of whatever API: its usage, its first choice's text, what it stored."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] | None = None
        self.text = ""
        self.stored: list[str] = []  # `stored_key` of what the worker keeps of it
        self.ended = self.failed = False
        self.named = False  # its events have names

    def whole(self, body: bytes) -> None:
        """Read an answer that is no stream."""
        self._take(body)
        self.ended = True

    def event(self, event: bytes) -> None:
        """Read an event of a stream."""
        lines = [line for line in event.splitlines() if line.startswith(b"data:")]
        data = b"\n".join(line[5:].strip() for line in lines)
        self.named = self.named or event.startswith(b"event:")
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
        kind = told.get("type")
        self.failed = self.failed or bool(told.get("error")) or kind in ("error", "response.failed")
        self.ended = self.ended or kind in LAST
        choices = told.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(first, dict) and not first.get("index"):
            said = first.get("delta") or first.get("message") or {}
            self._say(said.get("content") if isinstance(said, dict) and said else first.get("text"))
        delta = told.get("delta")
        if kind == "response.output_text.delta":
            self._say(delta)
        elif isinstance(delta, dict) and delta.get("type") == "text_delta":
            self._say(delta.get("text"))
        elif kind in ("message", "message_delta"):
            self._body(told)
        elif isinstance(told.get("response"), dict) and kind in LAST:
            self._body(told["response"], says=False)
        elif kind is None:
            self._body(told)

    def _body(self, body: dict[str, Any], *, says: bool = True) -> None:
        """Read a body that is whole, or what a stream says of it at its end."""
        if isinstance(body.get("usage"), dict):
            self.usage = body["usage"]
        self.stored += stored_in(body)
        for part in _parts_of(body) if says else ():
            self._say(part.get("text"))

    def _say(self, text: object) -> None:
        if isinstance(text, str) and len(self.text) < MAX_TEXT:
            self.text += text

    @property
    def n_prompt(self) -> int | None:
        """Tokens of the prompt; None where the answer does not say."""
        usage = self.usage or {}
        if "cache_read_input_tokens" in usage:  # Anthropic's: of three kinds
            return sum(_int(usage.get(name)) or 0 for name in PROMPT)
        return _int(usage.get("prompt_tokens", usage.get("input_tokens")))

    @property
    def n_cached(self) -> int | None:
        """Tokens of the prompt that the worker had; None where the answer does not say."""
        usage = self.usage or {}
        kv = usage.get("kv")
        if isinstance(kv, dict):
            names = ("exact", "reused", "patched", "repaired")
            return sum(_int(kv.get(name)) or 0 for name in names)
        if "cache_read_input_tokens" in usage:
            return _int(usage["cache_read_input_tokens"])
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        return _int(details.get("cached_tokens")) if isinstance(details, dict) else None


def stored_key(noun: str, id: object) -> str:
    """Return what stands for something that one worker keeps: a response, conversation, compaction, item."""
    return f"{noun}/{id}"


def stored_in(body: dict[str, Any]) -> list[str]:
    """Return the keys of what a body says was kept."""
    found = []
    if body.get("object") in NOUNS:
        found.append(stored_key(NOUNS[body["object"]], body.get("id")))
    extension = body.get("kvweave")
    compaction = extension.get("compaction") if isinstance(extension, dict) else None
    if isinstance(compaction, dict) and "id" in compaction:
        found.append(stored_key("compactions", compaction["id"]))
    items = body.get("output") if body.get("object") == "response" else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "id" in item:
            found.append(stored_key("items", item["id"]))
    return found


def _parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message of Anthropic's, or of the messages of a response."""
    holders = [body]
    if isinstance(body.get("output"), list):
        holders = [item for item in body["output"] if isinstance(item, dict)]
    parts = [
        part for held in holders for part in held.get("content") or () if isinstance(part, dict)
    ]
    return [part for part in parts if part.get("type") in ("text", "output_text")]


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
            body = broken(why).body
            name = "event: error\n" if self._read.named else ""
            told = {"type": "error", **body} if self._read.named else body
            yield f"{name}data: {json.dumps(told)}\n\n".encode()

"""What a response of vLLM's server says of a weave: in streams too, where vLLM itself has no place for it.

The last event before ``[DONE]`` waits until that comes, and goes on with the report in it; all others go
on as they come, byte by byte. Plain data, without vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Message, Send

from kvweave.connect.vllm.content import PARAMS
from kvweave.connect.vllm.spec import KEY

Report = Mapping[str, Any]
FindReport = Callable[[], Awaitable[Report | None]]
COUNTS = ("exact", "reused", "patched", "repaired", "prefilled")
CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
MOST_HELD = 1 << 20  # bytes of one event


def usage_of(report: Report, n_prompt: int) -> dict[str, Any] | None:
    """Return ``usage.kv`` of a report; None where it has no counts: the weave failed, or was refused."""
    if report.get("woven"):
        return {name: report[name] for name in (*COUNTS, "drift")}
    if "drift" not in report:
        return None
    n_found = min(int(report.get("cached", report.get("local", 0))), n_prompt)
    kv: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    # of rows of an earlier weave vLLM's cache does not say which are exact
    kv["exact" if report["drift"] == 0 else "reused"] = n_found
    return {**kv, "prefilled": n_prompt - n_found, "drift": report["drift"]}


def with_report(told: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return a body, or an event, with the report of its weave."""
    params = told.get(PARAMS)
    made = {**told, PARAMS: {**(params if isinstance(params, dict) else {}), KEY: report}}
    usage = told.get("usage")
    if isinstance(usage, dict) and (n := _n_prompt(usage)) is not None:
        kv = usage_of(report, n)
        made["usage"] = usage | ({} if kv is None else {"kv": kv})
    return made


def _n_prompt(usage: Mapping[str, Any]) -> int | None:
    """Return the tokens of a prompt, as the usage of any API says it."""
    if isinstance(n := usage.get("prompt_tokens"), int):
        return n
    if not isinstance(n := usage.get("input_tokens"), int):
        return None
    if "input_tokens_details" in usage:
        return n
    apart = (usage.get(key) or 0 for key in CACHED)  # Anthropic's API counts these by themselves
    return n + sum(each for each in apart if isinstance(each, int))


class Telling:
    """Stands for the ``send`` of one woven request; ``report`` is asked once, at the end of a stream."""

    def __init__(self, send: Send, report: FindReport) -> None:
        self._send, self._report = send, report
        self._start: Message | None = None
        self._kind = ""  # "stream", "whole": a JSON body, or "": goes on as it is
        self._rest = b""  # of a body, or of an event, that is not whole yet
        self._held = b""  # the event that may be the last before [DONE]

    async def __call__(self, message: Message) -> None:
        """Send a message on."""
        if message["type"] == "http.response.start":
            self._kind = _kind_of(message)
            if self._kind == "whole":
                self._start = message  # its length may change
                return
        elif message["type"] == "http.response.body" and self._kind:
            body, more = message.get("body", b""), message.get("more_body", False)
            if self._kind == "stream":
                body = await self._events(body, more)
            else:
                self._rest += body
                if more:
                    return
                body = await self._whole()
            message = {**message, "body": body}
        await self._send(message)

    async def _events(self, body: bytes, more: bool) -> bytes:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        out = b""
        for event in events:
            if event.strip() == b"data: [DONE]" and self._held:
                self._held = await self._with_report(self._held)
            out += self._held
            whole = event + b"\n\n"
            self._held = whole if _may_be_last(event) else b""
            out += b"" if self._held else whole
        if not more or len(self._rest) > MOST_HELD:
            out += self._held + self._rest
            self._held = self._rest = b""
        return out

    async def _with_report(self, event: bytes) -> bytes:
        told = _object(event.strip().removeprefix(b"data: "))
        report = None if told is None else await self._report()
        if told is None or report is None:
            return event
        return b"data: " + json.dumps(with_report(told, report)).encode() + b"\n\n"

    async def _whole(self) -> bytes:
        body, start = self._rest, self._start
        told = _object(body)
        params = None if told is None else told.get(PARAMS)
        report = params.get(KEY) if isinstance(params, dict) else None
        if told is not None and isinstance(report, dict):
            body = json.dumps(with_report(told, report), ensure_ascii=False).encode()
        assert start is not None
        others = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        await self._send({**start, "headers": [*others, length]})
        return body


def _kind_of(start: Message) -> str:
    headers = {k.lower(): v for k, v in start.get("headers", ())}
    kind = headers.get(b"content-type", b"").lower()
    if start["status"] != 200 or b"content-encoding" in headers:
        return ""
    if kind.startswith(b"text/event-stream"):
        return "stream"
    return "whole" if kind.startswith(b"application/json") else ""


def _may_be_last(event: bytes) -> bool:
    """Tell whether an event ends an answer, or has the usage of all; only such are read."""
    if not event.startswith(b"data: {") or (
        b'"finish_reason"' not in event and b'"usage"' not in event
    ):
        return False
    told = _object(event.removeprefix(b"data: "))
    choices = None if told is None else told.get("choices")
    if not isinstance(choices, list):
        return False
    return not choices or any(isinstance(c, dict) and c.get("finish_reason") for c in choices)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

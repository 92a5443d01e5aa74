"""Requests to one server, as courses: the key, retries, errors as exceptions, events of a stream."""

from __future__ import annotations

import ipaddress
import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvweave.client.course import Course, Emit, Pause, Read, Send
from kvweave.client.events import EventParser
from kvweave.client.problems import error_of, error_part
from kvweave.errors import (
    InvalidArgument,
    InvalidName,
    KeyRefused,
    KVWeaveError,
    OverBudget,
    Unreachable,
)

if TYPE_CHECKING:
    import httpx
else:
    try:
        import httpx
    except ImportError:
        httpx = None

LONGEST_WAIT = 60.0  # seconds; a server that is busy for longer is an error at once
FIRST_PAUSE = 0.1  # seconds before a broken connection is tried again; twice as long each time
REFUSED_FOR_NOW = (429, 503)


class Peer:
    """What is known of one server. Every method raises the server's errors as `KVWeaveError`.

    ``retries``: how often to try again what the server refused for now (with a Retry-After), or what
    broke off and does no harm twice: what reads, and what has a key by which a server knows it again.
    """

    def __init__(self, url: str, key: str | None, retries: int) -> None:
        self.url = _checked(url)
        self.is_local = _is_local(self.url)
        self.retries = retries
        self.left: set[str] = set()  # paths of contexts with an answer that was hung up on
        self.headers = {"accept": "application/json"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise InvalidArgument(
                    "key",
                    "it has characters no API key has",
                    "give it as the server has it: ASCII, no line break behind it",
                )
            self.headers["authorization"] = f"Bearer {key}"

    def get(self, path: str, **params: object) -> Course[Any]:
        """Return the JSON of a GET; parameters that are None are left out."""
        return (yield from self.call("GET", path, params=params))

    def pages(self, path: str, **params: Any) -> Course[list[Any]]:
        """Return all of a list that comes in pages, or its first ``limit``."""
        limit, found = params.pop("limit", None), list[Any]()
        after = None
        while True:
            left = None if limit is None else limit - len(found)
            page = yield from self.get(path, **params, limit=left, after=after)
            found += page["data"]
            before, after = after, page.get("next")
            if after is not None and after == before:  # it would be the same page for ever
                raise Unreachable(self.url, "what answers there is no kvweave server")
            if after is None or (limit is not None and len(found) >= limit):
                return found

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Course[Any]:
        """Send one request and return its JSON; None when there is none."""
        headers = dict(headers or {})
        if method != "GET":
            headers["idempotency-key"] = str(uuid.uuid4())
        send = Send(method, path, _given(body), _query(params), headers)
        for left in range(self.retries, -1, -1):
            try:
                found = yield send
            except (httpx.TransportError, httpx.InvalidURL) as error:
                if not (left and _may_again(error)):
                    raise self._unreachable(error) from error
                yield Pause(FIRST_PAUSE * 2 ** (self.retries - left))
                continue
            if found.is_success:
                return self._json(found) if found.content else None
            yield from self._wait_or_raise(found, left)
        raise AssertionError("unreachable")

    def events(self, path: str, body: Mapping[str, object]) -> Course[dict[str, Any]]:
        """Hand on the text of a stream of server-sent events; return the last event before its end.

        What is no text is not handed on.
        """
        yield from self._open(Send("POST", path, _given(body), open=True))
        parser, last = EventParser(), dict[str, Any]()
        while True:
            try:
                more = yield Read()
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            for data in parser.feed(more):
                if data == "[DONE]":
                    return last
                last = self._event(data)
                if last.get("text"):
                    yield Emit(str(last["text"]))
            if not more:
                raise Unreachable(self.url, "the stream broke off")

    def _open(self, send: Send) -> Course[None]:
        for left in range(self.retries, -1, -1):
            try:
                found = yield send
            except (httpx.TransportError, httpx.InvalidURL) as error:
                raise self._unreachable(error) from error
            if found.is_success:
                return
            yield from self._wait_or_raise(found, left)

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise Unreachable(self.url, "the stream is not of a kvweave server") from error
        if event.get("error"):
            raise error_of(event, 200)
        return dict(event)

    def _wait_or_raise(self, found: httpx.Response, left: int) -> Course[None]:
        """Wait as long as the server asks if it may be tried again, else raise its error."""
        error, wait = self._refusal(found), _seconds(found.headers.get("retry-after"))
        may = found.status_code in REFUSED_FOR_NOW and not isinstance(error, OverBudget)
        if not (left and may and wait is not None and wait <= LONGEST_WAIT):
            raise error
        yield Pause(wait)

    def _refusal(self, found: httpx.Response) -> KVWeaveError:
        try:
            body = found.json()
        except ValueError:
            body = None
        if found.status_code != 401:
            return error_of(body, found.status_code)
        told = error_part(body)
        refused = KeyRefused(self.url, str(told.get("message") or "it asks for one"))
        refused.request_id = str(told.get("request_id") or "")
        return refused

    def _json(self, found: httpx.Response) -> Any:
        try:
            return found.json()
        except ValueError as error:
            raise Unreachable(self.url, "what answers there is no kvweave server") from error

    def _unreachable(self, error: Exception) -> Unreachable:
        slow = isinstance(error, httpx.TimeoutException)
        reason = "it took too long" if slow else str(error) or type(error).__name__
        return Unreachable(self.url, reason)


def part_of_path(name: str) -> str:
    """Return a name or pattern as it stands in a path. Raises InvalidName."""
    if not name or {".", ".."} & set(name.split("/")):
        raise InvalidName(name, "it cannot be sent in a path" if name else "it is empty")
    return quote(name, safe="/")


def _may_again(error: Exception) -> bool:
    """Tell whether it broke off, and not of what was asked: a key sees to it that twice is once."""
    broke_off = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
    return isinstance(error, broke_off)


def _checked(url: str) -> str:
    hint = "such as http://127.0.0.1:8700"
    if re.match(r"[\w.-]+:\d+(/|$)|\[[0-9a-fA-F:]+\]:\d+(/|$)", url):
        url = f"http://{url}"  # HOST:PORT
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidArgument("url", str(error), hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument("url", f"{url!r} is no http address", hint)
    if parts.username or parts.password:
        raise InvalidArgument("url", "it has a user or password in it", "give the key apart")
    return url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients want it


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given(body: Mapping[str, object] | None) -> dict[str, object] | None:
    return None if body is None else {k: v for k, v in body.items() if v is not None}


def _query(params: Mapping[str, object] | None) -> dict[str, str]:
    """Return query parameters: booleans in lower case, what is None left out."""
    given = {k: v for k, v in (params or {}).items() if v is not None}
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in given.items()}


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:  # the other form is a date, which kvweave's server never sends
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None

"""Requests to a server: the key, retries, errors as exceptions, and streams that get closed."""

from __future__ import annotations

import ipaddress
import json
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from kvweave import errors
from kvweave.errors import InvalidArgument, InvalidName, KeyRefused, ServerError, Unreachable

if TYPE_CHECKING:
    import httpx
else:
    try:
        import httpx
    except ImportError:
        httpx = None

CONNECT_SECONDS = 10.0
LONGEST_WAIT = 60.0  # seconds; a server that is busy for longer is an error at once


class Http:
    """A connection to one server. Every method raises the server's errors as `KVWeaveError`.

    ``timeout`` is seconds without a byte; ``retries`` how often to try again what the server
    refused for now (with a Retry-After) or, of what only reads, what broke off.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout: float,
        retries: int,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if httpx is None:
            raise ServerError("httpx is not installed", hint="pip install 'kvweave[client]'")
        self.url = _checked(url)
        self.retries = retries
        self.left: set[str] = set()  # paths of contexts with an answer that was hung up on
        headers = {"accept": "application/json"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise InvalidArgument("key", "it has characters no API key has")
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
            transport=transport,
            trust_env=not _is_local(self.url),  # a proxy cannot reach this machine
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, path: str, **params: object) -> Any:
        """Return the JSON of a GET; parameters that are None are left out."""
        return self.call("GET", path, params=params)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, object] | None = None,
    ) -> Any:
        """Send one request and return its JSON; None when there is none."""
        for left in range(self.retries, -1, -1):
            try:
                with self._told():
                    found = self._client.request(
                        method, path, json=_given(body), params=_query(params)
                    )
            except Unreachable as error:
                broke_off = (httpx.ReadError, httpx.RemoteProtocolError)
                if left and method == "GET" and isinstance(error.__cause__, broke_off):
                    continue
                raise
            if found.is_success:
                return self._json(found) if found.content else None
            self._wait_or_raise(found, left)
        raise AssertionError("unreachable")

    def events(self, path: str, body: Mapping[str, object]) -> Generator[dict[str, Any]]:
        """Yield the objects of a stream of server-sent events; closing it hangs up."""
        for left in range(self.retries, -1, -1):
            with self._told(), self._client.stream("POST", path, json=_given(body)) as found:
                if found.is_success:
                    yield from self._parse(found)
                    return
                found.read()
            self._wait_or_raise(found, left)

    def _parse(self, found: httpx.Response) -> Generator[dict[str, Any]]:
        data: list[str] = []
        for line in found.iter_lines():
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                text, data = "\n".join(data), []
                if text == "[DONE]":
                    return
                try:
                    event = json.loads(text)
                except ValueError as error:
                    raise Unreachable(self.url, "the stream is not of a kvweave server") from error
                if event.get("error"):
                    raise error_of(event, found.status_code)
                yield event
        raise Unreachable(self.url, "the stream broke off")

    def _wait_or_raise(self, found: httpx.Response, left: int) -> None:
        """Wait as long as the server asks if it may be tried again, else raise its error."""
        wait = _seconds(found.headers.get("retry-after"))
        if left and wait is not None and wait <= LONGEST_WAIT and found.status_code == 429:
            time.sleep(wait)
            return
        try:
            body = found.json()
        except ValueError:
            body = None
        if found.status_code == 401:
            told = _error_part(body)
            refused = KeyRefused(self.url, str(told.get("message") or "it asks for one"))
            refused.request_id = str(told.get("request_id") or "")
            raise refused
        raise error_of(body, found.status_code)

    def _json(self, found: httpx.Response) -> Any:
        try:
            return found.json()
        except ValueError as error:
            raise Unreachable(self.url, "what answers there is no kvweave server") from error

    @contextmanager
    def _told(self) -> Generator[None]:
        """Raise Unreachable for what goes wrong on the way."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise Unreachable(self.url, "it took too long") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error


def part_of_path(name: str) -> str:
    """Return a name or pattern as it stands in a path. Raises InvalidName."""
    if not name or {".", ".."} & set(name.split("/")):
        raise InvalidName(name, "it cannot be sent in a path" if name else "it is empty")
    return quote(name, safe="/")


def error_of(body: object, status: int) -> errors.KVWeaveError:
    """Return the exception a server's error body describes: of the class it was, if that is known."""
    told = dict(_error_part(body))
    code, message = str(told.pop("code", "")), str(told.pop("message", ""))
    hint = str(told.pop("hint", None) or "")
    told.pop("type", None)
    request_id = str(told.pop("request_id", None) or "")
    param = told.pop("param", None)
    data = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    kind = _CLASSES.get(code.replace("_", "").lower())
    if kind is errors.InvalidArgument:
        data["argument"] = param
    if kind is None:
        kind, data = ServerError, data | {"status": status}
        message = message or f"the server answers with status {status}"
    made = kind.__new__(kind)
    errors.KVWeaveError.__init__(made, message.removesuffix(f" ({hint})"), hint=hint, **data)
    made.request_id = request_id
    return made


def _classes(root: type[errors.KVWeaveError]) -> dict[str, type[errors.KVWeaveError]]:
    found = {root.__name__.lower(): root}
    for kind in root.__subclasses__():
        found |= _classes(kind)
    return found


# By code without underscores; some have the codes OpenAI's clients know.
_CLASSES = _classes(errors.KVWeaveError) | {
    "invalidrequest": errors.InvalidArgument,
    "contextlengthexceeded": errors.ContextTooLong,
    "insufficientquota": errors.OverQuota,
}


def _error_part(body: object) -> Mapping[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _checked(url: str) -> str:
    hint = "such as http://127.0.0.1:8700"
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

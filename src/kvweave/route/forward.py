"""One exchange with a worker: what is sent on, what comes back, and what may be tried again.

Headers that are between two neighbours stay between them (RFC 9110, 7.6.1). What changes something goes
over a connection of its own: on a kept one nobody can tell whether a worker that hung up had read it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import Scope

from kvweave.client.wires import aside
from kvweave.route.options import RouteOptions
from kvweave.route.worker import Worker
from kvweave.serve.guard.access_log import HEADER as REQUEST_ID_HEADER
from kvweave.serve.guard.keys import key_given
from kvweave.serve.guard.problems import REQUEST_ID

HOPS = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade expect".split()
)
# of requests: made anew for the worker, or checked here, where the worker's own names are not known
OURS = frozenset(b"host content-length accept-encoding origin referer x-request-id".split())
THEIRS = frozenset(b"date server x-request-id".split())  # of answers: the listener makes its own
ASKING = frozenset(b"authorization x-api-key x-request-id".split())  # who asks
Headers = list[tuple[bytes, bytes]]


class WorkerFailed(Exception):
    """A worker did not answer. ``sent``: it may have read the request. ``slow``: it is still there."""

    def __init__(self, why: str, *, sent: bool, slow: bool = False) -> None:
        super().__init__(why)
        self.why, self.sent, self.slow = why, sent, slow


@dataclass(frozen=True, slots=True)
class Call:
    """A request as a worker gets it. ``target`` is the path with its query, as bytes of the line."""

    method: str
    target: bytes
    headers: Headers = field(default_factory=list)
    body: bytes = b""

    @classmethod
    async def of(cls, request: Request) -> Call:
        """Return what is sent on of a request that came."""
        head = cls.head_of(request.scope)
        headers = [*head.headers, (REQUEST_ID_HEADER.lower().encode(), REQUEST_ID.get().encode())]
        return replace(head, headers=headers, body=await request.body())

    @classmethod
    def head_of(cls, scope: Scope) -> Call:
        """Return what is sent on of a request, without its body."""
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        return cls(scope["method"], target, end_to_end(scope["headers"], OURS))

    def json(self) -> Mapping[str, Any]:
        """Return the body's object; an empty one for anything else."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def header(self, name: bytes) -> bytes | None:
        """Return a header, None where it is not there."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def caller(self) -> bytes:
        """What workers know the caller by, as an ``Authorization``: its key, however it was written."""
        given, api_key = self.header(b"authorization") or b"", self.header(b"x-api-key") or b""
        key = key_given(given.decode("latin-1"), api_key.decode("latin-1"))
        return b"Bearer " + key.encode("latin-1") if key else given

    def asking(self, method: str, target: str, body: Mapping[str, Any] | None = None) -> Call:
        """Return another call of the same caller."""
        kept = [(k, v) for k, v in self.headers if k in ASKING]
        made = Call(method, target.encode(), kept)
        return made if body is None else made.with_json(body)

    def with_json(self, body: Mapping[str, Any]) -> Call:
        """Return the call with another body."""
        headers = [(k, v) for k, v in self.headers if k != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        return replace(self, headers=headers, body=json.dumps(body).encode())


def end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> Headers:
    """Return headers that go on: none of one hop, none of ``without``; names in small letters."""
    given = [(name.lower(), value) for name, value in headers]
    named = {
        word.strip().lower()
        for name, value in given
        if name == b"connection"
        for word in value.split(b",")
    }
    return [(k, v) for k, v in given if k not in HOPS and k not in without and k not in named]


class Forwarder:
    """The connections to workers."""

    def __init__(self, options: RouteOptions) -> None:
        slow, connect = options.timeout, options.connect_timeout
        self._timeouts = httpx.Timeout(slow, connect=connect, pool=connect).as_dict()
        self._quick = httpx.Timeout(max(5.0, options.probe), connect=connect).as_dict()
        kept = httpx.Limits(max_keepalive_connections=64, keepalive_expiry=15.0)
        self._kept = httpx.AsyncHTTPTransport(limits=kept)
        self._fresh = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def send(self, worker: Worker, call: Call, *, quick: bool = False) -> httpx.Response:
        """Return the head of a worker's answer; its body is to be read or closed.

        ``quick``: an answer is expected in seconds. Raises WorkerFailed.
        """
        headers = [*call.headers, (b"accept-encoding", b"identity")]
        timeouts = self._quick if quick else self._timeouts
        content = call.body if call.body or call.method in ("POST", "PUT") else None
        url = httpx.URL(worker.url).copy_with(raw_path=call.target)
        request = httpx.Request(
            call.method, url, headers=headers, content=content, extensions={"timeout": timeouts}
        )
        transport = self._kept if call.method in ("GET", "HEAD") else self._fresh
        try:
            sending = partial(transport.handle_async_request, request)
            response = await aside(sending, httpx.Response.aclose)
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Body(response.stream)
            return response
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise WorkerFailed(_says(error), sent=False) from error
        except httpx.ReadTimeout as error:
            raise WorkerFailed("it did not answer in time", sent=True, slow=True) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise WorkerFailed(_says(error), sent=True) from error

    async def ask(
        self, worker: Worker, call: Call, *, quick: bool = True
    ) -> tuple[httpx.Response, bytes]:
        """Return a worker's whole answer. Raises WorkerFailed."""
        response = await self.send(worker, call, quick=quick)
        return response, await whole(response)

    async def close(self) -> None:
        """Close what is open."""
        await self._kept.aclose()
        await self._fresh.aclose()


async def whole(response: httpx.Response) -> bytes:
    """Return the body of an answer. Raises WorkerFailed where it broke off."""
    try:
        return b"".join([piece async for piece in response.aiter_raw()])
    except (httpx.TransportError, httpx.StreamError) as error:
        raise WorkerFailed(_says(error), sent=True) from error
    finally:
        await response.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer, whose connection is given back whoever hangs up meanwhile."""

    def __init__(self, pieces: httpx.AsyncByteStream) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._pieces)

    async def aclose(self) -> None:
        await aside(self._pieces.aclose)


def headers_of(response: httpx.Response) -> Headers:
    """Return what goes on to the client of an answer's headers."""
    return end_to_end(response.headers.raw, THEIRS)


def _says(error: Exception) -> str:
    return str(error) or type(error).__name__

"""A socket with uvicorn behind it: bounds on what a connection may take, and a graceful end.

Nothing here knows what is served; it imports no torch.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE = 10.0  # seconds that running answers get at the end
HEADER_SECONDS = 10.0  # a client has to send its headers
KEEP_ALIVE = 30.0  # seconds an idle connection stays open
HEADER_BYTES = 32_768
CONNECTIONS = 4096  # then those that ask nothing make room
FILES = 512  # left for all else that has a file descriptor
BACKLOG = 512


FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\n\r\n"
    b'{"error": {"message": "the server has no connection left", "type": "server_error", '
    b'"param": null, "code": "overloaded", "hint": "try again"}}'
)


class Protocol(H11Protocol):
    """Hangs up on who takes too long to send headers, also the second request's.

    Where there are too many connections, one that asks nothing is closed for each new one: the
    oldest of the address that has most of them. If all ask, one whose request has not come whole.
    """

    most = CONNECTIONS
    _headers: asyncio.TimerHandle | None = None
    _since = 0.0
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the headers are complete."""
        if self._refused:  # answered now, since what is closed unread is reset
            self.transport.write(FULL)
            self.transport.close()
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._headers is None:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._unwatch()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request of it has begun, or all are answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_asked(self) -> bool:
        """Whether a request of it has come whole, and is being answered."""
        return not self.is_idle and not self.cycle.more_body

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, Protocol)]
        silent = [each for each in others if each is not self and not each.has_asked]
        if not silent:
            self._refused = True
            return
        by_host = Counter(each.host for each in others)
        max(silent, key=lambda each: (each.is_idle, by_host[each.host], -each._since))._give_up()

    @property
    def host(self) -> str:
        """The address that it comes from."""
        return self.client[0] if self.client else ""

    def _watch(self) -> None:
        self._headers = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _give_up(self) -> None:
        self._headers = None
        if not self.transport.is_closing():
            self.transport.abort()


def most_connections() -> int:
    """Return how many connections this process may have; it asks for as many files as it may get.

    Where a socket gets none, nobody is let in, and none of those that ask nothing goes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, soft - FILES))


class Listener(uvicorn.Server):
    """Serves on one socket until SIGINT or SIGTERM, then lets running answers end and returns."""

    def __init__(
        self,
        app: ASGIApp,
        ready: Callable[[], None],
        grace: float = GRACE,
        stopping: Callable[[], None] = lambda: None,
    ) -> None:
        """``ready`` is called when it accepts, ``stopping`` when it begins to end; ``grace``: seconds."""
        config: dict[str, Any] = {
            "http": Protocol, "ws": "none", "loop": "asyncio", "lifespan": "on",
            "log_config": None, "access_log": False, "server_header": False,
            "proxy_headers": False, "timeout_keep_alive": KEEP_ALIVE, "backlog": BACKLOG,
            "h11_max_incomplete_event_size": HEADER_BYTES,
            "timeout_graceful_shutdown": round(grace + 5),
        }  # fmt: skip
        super().__init__(uvicorn.Config(app, **config))
        self._ready, self._grace, self._stopping = ready, grace, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so."""
        Protocol.most = most_connections()
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say that it ends, and wait for what runs."""
        self._stopping()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out, and what is cancelled instead leaves a trace
            self.hurry()
            await self.lifespan.shutdown()

    def hurry(self) -> None:
        """Let nothing that runs go on to its end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End gracefully; a second Ctrl-C ends at once. Unlike uvicorn's own, do not die of it."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, what follows the
    # headers of an answer waits 40 ms for their acknowledgement
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    sock.set_inheritable(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

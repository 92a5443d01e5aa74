"""The app behind a socket: uvicorn with bounds on what a connection may take, and a graceful end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvweave.serve.app import GRACE
from kvweave.serve.state import ServerState

HEADER_SECONDS = 10.0  # a client has to send its headers
KEEP_ALIVE = 30.0  # seconds an idle connection stays open
HEADER_BYTES = 32_768
CONNECTIONS = 512
BACKLOG = 512


class Protocol(H11Protocol):
    """Hangs up on who takes too long to send headers, also the second request's."""

    _headers: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when the headers are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._headers is None:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._unwatch()
        super().connection_lost(exc)

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


class Server(uvicorn.Server):
    """Serves on one socket until SIGINT or SIGTERM, then lets running answers end and returns."""

    def __init__(self, app: FastAPI, ready: Callable[[], None], grace: float = GRACE) -> None:
        config: dict[str, Any] = {
            "http": Protocol, "ws": "none", "loop": "asyncio", "lifespan": "on",
            "log_config": None, "access_log": False, "server_header": False,
            "proxy_headers": False, "timeout_keep_alive": KEEP_ALIVE, "backlog": BACKLOG,
            "limit_concurrency": CONNECTIONS, "h11_max_incomplete_event_size": HEADER_BYTES,
            "timeout_graceful_shutdown": round(grace + 5),
        }  # fmt: skip
        super().__init__(uvicorn.Config(app, **config))
        self._state: ServerState = app.state.kvweave
        self._ready, self._grace = ready, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so."""
        gc.collect()
        gc.freeze()  # to go through all of torch again takes a quarter of a second, in some request
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits at once, so that only running answers are waited for."""
        self._state.driver.refuse(self._grace)
        await super().shutdown(sockets)

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

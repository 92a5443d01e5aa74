"""The app of an engine behind a socket; `Listener` has the socket's part."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable

from fastapi import FastAPI

from kvweave.serve.listening import GRACE, Listener
from kvweave.serve.state import ServerState

SWITCH_SECONDS = 0.0005  # the thread that computes must not wait long for one that parses


class Server(Listener):
    """Serves an engine until SIGINT or SIGTERM; what waits is refused then, what runs may end."""

    def __init__(self, app: FastAPI, ready: Callable[[], None], grace: float = GRACE) -> None:
        state: ServerState = app.state.kvweave
        super().__init__(app, ready, grace, lambda: state.driver.refuse(grace))
        self._driver = state.driver

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so."""
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()  # to go through all of torch again takes a quarter of a second, in some request
        await super().startup(sockets)

    def hurry(self) -> None:
        """End answers at once."""
        self._driver.refuse(0)

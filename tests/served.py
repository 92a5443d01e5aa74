"""A server on a free port of this machine, for tests of who talks to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from kvweave import Engine
from kvweave.serve.app import create_app
from kvweave.serve.driver.thread import Driver
from kvweave.serve.options import Options


@dataclass
class Server:
    """A running server."""

    url: str
    driver: Driver

    def settle(self) -> None:
        """Wait until no answer runs and the idle work behind the last one is done."""
        until = time.monotonic() + 30
        while any(self.driver.stats()[what] for what in ("active", "waiting", "later")):
            assert time.monotonic() < until, f"still busy: {self.driver.stats()}"
            time.sleep(0.005)
        asyncio.run(self.driver.call(lambda engine: None))


@contextmanager
def served(engine: Engine, **options: Any) -> Iterator[Server]:
    """Serve an engine; the engine stays open."""
    app = create_app(engine, Options(**options))
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until, "the server did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(f"http://127.0.0.1:{port}", app.state.kvweave.driver)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"

"""Workers that do what a test says, and routers before them, each on a free port of this machine."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import uvicorn

from kvweave.route.app import create_router
from kvweave.route.options import RouteOptions
from kvweave.route.state import RouterState

CHAT = "/v1/chat/completions"
DIE = object()  # among the pieces of an answer: the worker dies there
PATIENCE = 60.0  # seconds; nothing here should take that long


@dataclass(frozen=True)
class Seen:
    """A request that a worker got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What a worker answers. ``pieces`` are sent one by one, chunked; ``DIE`` resets the connection."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[Any] | None = None
    wait: threading.Event | None = None  # before the first byte
    between: Callable[[], None] = lambda: None  # before each piece
    length: int | None = None  # said of the body, if it is not its own


def answered(text: str = "ok", n_prompt: int = 100, n_cached: int = 0) -> Reply:
    """A completion as vLLM gives it."""
    usage = {"prompt_tokens": n_prompt, "completion_tokens": 1}
    usage |= {"prompt_tokens_details": {"cached_tokens": n_cached}}
    message = {"role": "assistant", "content": text}
    return Reply({"choices": [{"index": 0, "message": message}], "usage": usage})


def event(text: str) -> bytes:
    told = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return f"data: {json.dumps(told)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def streamed(*pieces: Any, **more: Any) -> Reply:
    return Reply(pieces=list(pieces), headers={"Content-Type": "text/event-stream"}, **more)


class FakeWorker:
    """A worker; ``behave`` says what it answers to a request that is no probe."""

    def __init__(self, behave: Callable[[Seen], Reply], ours: bool = False) -> None:
        self.behave, self.ours, self.healthy = behave, ours, True
        self.inside = False  # a vLLM with kvweave in it
        self.seen: list[Seen] = []
        self.placements: Callable[[Seen], Reply] = lambda seen: Reply({}, 404)
        self.hung_up = threading.Event()  # a client went away while it was answered
        self.port, self.stopped = 0, False
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> FakeWorker:
        worker, self.stopped = self, False

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, ValueError):
                    worker.hung_up.set()
                    self.close_connection = True

            def do_GET(self) -> None:
                worker._answer(self)

            do_POST = do_PUT = do_DELETE = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 256

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Refuse connections from now on, answer none that are open; the port stays ours."""
        self.stopped = True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def asked(self, path: str = "") -> list[Seen]:
        """Requests to a path, probes left out."""
        return [s for s in list(self.seen) if s.path.startswith(path)]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = {k.lower(): v for k, v in handler.headers.items()}
        seen = Seen(handler.command, handler.path, headers, body)
        if self.stopped:
            self._die(handler)
            return
        if handler.path == "/health":
            told = {"status": "ok", "model": "m", "waiting": 0, "active": 0} if self.ours else {}
            self._send(handler, Reply(told, 200 if self.healthy else 503))
        elif handler.path == "/health/kvweave":
            self._send(
                handler,
                Reply({"kvweave": True} if self.inside else {}, 200 if self.inside else 404),
            )
        elif handler.path.startswith("/v1/placements"):
            self._send(handler, self.placements(seen))
        else:
            self.seen.append(seen)
            self._send(handler, self.behave(seen))

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply.wait is not None:
            reply.wait.wait(PATIENCE)
        pieces = reply.pieces
        if pieces and pieces[0] is DIE:
            self._die(handler)
            return
        handler.send_response(reply.status)
        content = b"" if pieces is not None else json.dumps(reply.body).encode()
        headers = {"Content-Type": "application/json"} | reply.headers
        if pieces is None:
            headers["Content-Length"] = str(len(content) if reply.length is None else reply.length)
        else:
            headers["Transfer-Encoding"] = "chunked"
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)
        if reply.length is not None:
            self._die(handler)
        for piece in pieces or ():
            reply.between()
            if piece is DIE:
                self._die(handler)
                return
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
        if pieces is not None:
            handler.wfile.write(b"0\r\n\r\n")

    def _die(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.flush()
        time.sleep(0.05)  # a reset throws away what the other side has not read yet
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.close_connection = True
        handler.connection.close()


@dataclass
class Routed:
    """A running router."""

    url: str
    state: RouterState
    stop: Callable[[], None]

    def client(self, key: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)

    def ask(self, text: str = "hi", key: str = "", **more: Any) -> httpx.Response:
        """Ask for a completion of one message."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}]} | more
        with self.client(key) as client:
            return client.post(CHAT, json=body)

    def retries(self) -> dict[str, float]:
        """How often requests were sent again, by why."""
        found = self.state.metrics.retries.collect()[0].samples
        return {s.labels["why"]: s.value for s in found if s.name.endswith("_total")}


def until(true: Callable[[], bool], what: str = "it") -> None:
    """Wait for what happens elsewhere."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


@contextmanager
def routed(urls: list[str], **options: Any) -> Iterator[Routed]:
    """Run a router before these workers; probes are rare, unless a test asks for them."""
    app = create_router(RouteOptions(urls, **({"port": 0, "probe": 0.1} | options)))
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the start")
    assert thread.is_alive()

    def stop() -> None:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the router did not stop"

    port = server.servers[0].sockets[0].getsockname()[1]
    state = app.state.router
    until(lambda: all(w.kind != "unknown" or not w.healthy for w in state.workers), "a probe")
    try:
        yield Routed(f"http://127.0.0.1:{port}", state, stop)
    finally:
        if thread.is_alive():
            stop()

"""Servers that do not behave: every call ends by its deadline and half a second, whatever they do."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import PIP, lack
from store import servers
from store.values import (
    SLACK,
    aligned,
    assert_gone,
    assert_holds,
    assert_untouched,
    content,
    ends_by,
    in_time,
    put_one,
    store,
)

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import Get, Outcome, Put
from kvweave.store.tier.redis import Redis

pytest.importorskip("redis", reason=lack("redis-py is not installed", PIP, "redis"))
HANDSHAKE = (b"CLIENT", b"SELECT", b"AUTH")


class Fake:
    """Something that listens and answers every request but those of a handshake with the same bytes;
    ``drip`` seconds pass between one byte and the next."""

    def __init__(
        self,
        answer: bytes,
        *,
        pong: bytes = b"+PONG\r\n",
        drip: float = 0.0,
        hang_up: bool = False,
    ) -> None:
        self.answer, self.pong, self.drip, self.hang_up = answer, pong, drip, hang_up
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.open = [self.listener]
        self.asked = 0
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                if b"PING" in data:
                    sock.sendall(self.pong)
                elif any(word in data for word in HANDSHAKE):
                    sock.sendall(b"+OK\r\n")
                else:
                    self.asked += 1
                    self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        if not self.drip:
            sock.sendall(self.answer)
        for i in range(len(self.answer) if self.drip else 0):
            sock.sendall(self.answer[i : i + 1])
            time.sleep(self.drip)
        if self.hang_up:
            sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *what: object) -> None:
        for sock in self.open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.thread.join(10)


def state_of(found: int | Outcome) -> str:
    return "done" if isinstance(found, int) else found.state


def all_are_doubts(tier: Redis, seconds: float) -> None:
    """Every call ends in time and claims to know nothing."""
    gets = [Get("a", 0, [aligned(10)]), Get("b", 0, [aligned(10)])]
    puts = [Put("a", [memoryview(b"value")])]
    calls: list[Callable[[float], list[Outcome] | list[int | Outcome]]] = [
        lambda end: tier.get(gets, deadline=end),
        lambda end: tier.put(puts, deadline=end),
        lambda end: tier.look(["a", "b"], deadline=end),
        lambda end: tier.discard(["a"], deadline=end),
    ]
    for call in calls:
        end = time.monotonic() + seconds
        with ends_by(end):
            found = call(end)
        assert {state_of(each) for each in found} <= {"late", "failed"}, found
    assert_untouched(gets, 0.1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x00" * 64 + b"\r\n",
        b"$\r\n",
        b"$ten\r\n",
        b"$--1\r\n",
        b"$11\r\n" + b"x" * 11 + b"\r\n",
        b"+OK\r\n",
        b"*1\r\n$10\r\n0123456789\r\n",
        b":10\r\n",
        b"-ERR of some kind\r\n",
    ],
)
def test_garbage_is_a_failure(answer: bytes) -> None:
    with Fake(answer) as fake:
        tier = Redis(fake.url, timeout=0.5)
        (outcome,) = tier.get([Get("a", 0, [aligned(10)])])
        assert outcome.state in ("failed", "wrong"), outcome
        in_time(tier.close)


@pytest.mark.parametrize("answer", [b"", b"$10", b"$10\r\n01234", b"$2000000\r\n" + bytes(900_000)])
def test_an_answer_that_stays_away(answer: bytes) -> None:
    with Fake(answer) as fake:
        tier = Redis(fake.url)
        all_are_doubts(tier, 0.2)
        in_time(tier.close)


def test_an_answer_of_one_byte_at_a_time() -> None:
    with Fake(b"$10\r\n0123456789\r\n" * 3, drip=0.1) as fake:
        tier = Redis(fake.url)
        all_are_doubts(tier, 0.3)
        in_time(tier.close)


def test_an_answer_that_ends_in_the_middle() -> None:
    with Fake(b"$10\r\n01234", hang_up=True) as fake:
        tier = Redis(fake.url)
        (outcome,) = tier.get([Get("a", 0, [aligned(10)])])
        assert outcome.state == "failed" and "closed" in outcome.why
        in_time(tier.close)


@contextlib.contextmanager
def nobody_accepts() -> Iterator[str]:
    """A port whose queue of connections is full: what connects gets no answer at all."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


def test_connecting_is_not_answered() -> None:
    with nobody_accepts() as url:
        begin = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer|Timeout|does not answer"):
            Redis(url, timeout=0.4)
        assert time.monotonic() - begin < 0.4 + SLACK


@servers.needs_redis
def test_a_server_behind_which_nobody_accepts_any_more(server: servers.Server) -> None:
    tier = Redis(f"redis://127.0.0.1:{server.port}")
    store(tier, "a", b"0123456789")
    server.kill()
    with nobody_accepts() as url:
        tier._url = url
        all_are_doubts(tier, 0.3)
    in_time(tier.close)


class SlowNames:
    """Host names are not found before ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, find = threading.Event(), socket.getaddrinfo

        def slowly(*args: object, **options: object) -> object:
            self.go.wait(20)
            return find(*args, **options)  # type: ignore[arg-type]

        self.go.set()
        monkeypatch.setattr(socket, "getaddrinfo", slowly)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    made = SlowNames(monkeypatch)
    yield made
    made.go.set()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[servers.Server]:
    made = servers.redis(tmp_path)
    yield made
    made.stop()


@servers.needs_redis
def test_a_name_that_is_not_found_for_long(names: SlowNames, server: servers.Server) -> None:
    url = f"redis://localhost:{server.port}"
    names.go.clear()
    begin = time.monotonic()
    with pytest.raises(StoreError, match="no answer"):
        Redis(url, timeout=0.3)
    assert time.monotonic() - begin < 0.3 + SLACK
    names.go.set()
    tier = Redis(url)
    names.go.clear()
    all_are_doubts(tier, 0.3)
    names.go.set()
    end = time.monotonic() + 20
    while not put_one(tier, "b", b"value").ok and time.monotonic() < end:
        time.sleep(0.02)
    assert_holds(tier, "b", b"value")
    tier.discard(["a"])
    assert_gone(tier, "a")
    tier.close()


@servers.needs_redis
def test_what_is_sent_late_is_what_was_put(names: SlowNames, server: servers.Server) -> None:
    tier = Redis(f"redis://localhost:{server.port}")
    data = content("a", 300_000)
    source = bytearray(data)
    names.go.clear()
    late = tier.put([Put("a", [memoryview(source)])], deadline=time.monotonic() + 0.1)
    assert late[0].state == "late"
    source[:] = bytes(len(data))  # it is the caller's again
    names.go.set()
    end = time.monotonic() + 20
    while tier.look(["a"]) != [len(data)]:
        assert time.monotonic() < end, "this test needs a put that arrives late"
        time.sleep(0.02)
    assert_holds(tier, "a", data)
    tier.close()


@pytest.mark.parametrize("pong", [b"-LOADING the data set\r\n", b"+HELLO\r\n", b"SSH-2.0-x\r\n"])
def test_what_is_no_redis_is_refused(pong: bytes) -> None:
    with Fake(b"", pong=pong) as fake:
        with pytest.raises(StoreError, match=r"no way into") as caught:
            Redis(fake.url)
        assert caught.value.hint


def test_nobody_there() -> None:
    with pytest.raises(StoreError, match="refused"):
        Redis(f"redis://127.0.0.1:{servers.free_port()}")


@pytest.mark.parametrize("url", ["host:6379", "http://host", "redis://host:0x1", ""])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Redis(url)
    assert "redis://host:6379/0" in caught.value.hint


@pytest.mark.parametrize("bad", [{"connections": 0}, {"timeout": 0}])
def test_bad_options(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="over 0"):
        Redis("redis://host", **bad)  # type: ignore[arg-type]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidArgument, match="cannot be loaded") as caught:
        Redis("redis://host")
    assert "kvweave[redis]" in caught.value.hint

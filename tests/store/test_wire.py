"""What is said to a Redis server, and what is done with answers that no Redis gives."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

import pytest
from store import servers
from store.values import aligned, assert_untouched, in_time, put_one

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import Get
from kvweave.store.tier.resp import Resp
from kvweave.store.tier.wire import ServerAddress, command


class Fake:
    """Something that listens and answers every request but PING with the same bytes."""

    def __init__(self, answer: bytes, *, pong: bytes = b"+PONG\r\n", hang_up: bool = False) -> None:
        self.answer, self.pong, self.hang_up = answer, pong, hang_up
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
                    continue
                self.asked += 1
                sock.sendall(self.answer)
                if self.hang_up:
                    sock.shutdown(socket.SHUT_RDWR)
                    return

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *what: object) -> None:
        for sock in self.open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.thread.join(10)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x00" * 64 + b"\r\n",
        b"$\r\n",
        b"$-7\r\n",
        b"$ten\r\n",
        b"$--1\r\n",
        b"$11\r\n" + b"x" * 11 + b"\r\n",
        b"$10\r\n" + b"x" * 12 + b"\r\n",
        b"$99999999999999999999\r\n",
        b":10\r\n",
        b"+OK\r\n",
        b"*1\r\n$10\r\n0123456789\r\n",
        b"x" * 40_000,
    ],
)
def test_garbage_is_a_failure(answer: bytes) -> None:
    with Fake(answer) as fake:
        tier = Resp(fake.url, timeout=0.5)
        (outcome,) = tier.get([Get("a", 0, [aligned(10)])])
        assert outcome.state == "failed" and "no answer" not in outcome.why, outcome
        assert tier._pool._idle == [], "the connection is not used again"
        if not answer.startswith(b"+OK"):
            assert put_one(tier, "a", b"value").state == "failed"
        assert tier.size("b") is None and list(tier.keys()) in ([], ["a"])
        tier.check_integrity()
        in_time(tier.close)


def test_an_answer_that_ends_in_the_middle_is_a_failure() -> None:
    with Fake(b"$10\r\n01234", hang_up=True) as fake:
        tier = Resp(fake.url)
        (outcome,) = tier.get([Get("a", 0, [aligned(10)])])
        assert outcome.state == "failed" and "closed" in outcome.why
        assert fake.asked == 2, "asked once more over a new connection"
        in_time(tier.close)


def test_an_answer_that_stays_away_is_late() -> None:
    with Fake(b"$10\r\n01234") as fake:
        tier = Resp(fake.url)
        gets = [Get("a", 0, [aligned(10)]), Get("b", 0, [aligned(10)])]
        outcomes = tier.get(gets, deadline=time.monotonic() + 0.2)
        assert [outcome.state for outcome in outcomes] == ["late", "late"]
        assert_untouched(gets, 0.1)
        in_time(tier.close)


@pytest.mark.parametrize("pong", [b"-LOADING the data set\r\n", b"+HELLO\r\n", b"SSH-2.0-x\r\n"])
def test_what_is_no_redis_is_refused(pong: bytes) -> None:
    with Fake(b"", pong=pong) as fake:
        with pytest.raises(StoreError, match=r"LOADING|HELLO|SSH") as caught:
            Resp(fake.url)
        assert caught.value.hint


def test_nobody_there() -> None:
    with pytest.raises(StoreError, match="refused"):
        Resp(f"redis://127.0.0.1:{servers.free_port()}")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://host", ServerAddress("host")),
        ("redis://host:7000/2", ServerAddress("host", 7000, database=2)),
        ("redis://u%40x:p%2Fw@[::1]:7/", ServerAddress("::1", 7, user="u@x", password="p/w")),
        ("redis://:pw@host", ServerAddress("host", password="pw")),
        ("unix:///run/redis.sock", ServerAddress(path="/run/redis.sock")),
        ("unix://u:pw@/run/r%20s?db=4", ServerAddress("", path="/run/r s", user="u", password="pw", database=4)),
    ],
)  # fmt: skip
def test_addresses(url: str, wanted: ServerAddress) -> None:
    assert ServerAddress.parse(url) == wanted


def test_a_secure_address_verifies_the_server() -> None:
    tls = ServerAddress.parse("rediss://host:1").tls
    assert tls is not None and tls.verify_mode == ssl.CERT_REQUIRED and tls.check_hostname


@pytest.mark.parametrize(
    "url", ["host:6379", "http://host", "redis://", "redis://host/x", "redis://host:0x1", "unix://", ""]
)  # fmt: skip
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Resp(url)
    assert "redis://host:6379/0" in caught.value.hint


@pytest.mark.parametrize("bad", [{"connections": 0}, {"timeout": 0}])
def test_bad_options(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="over 0"):
        Resp("redis://host", **bad)  # type: ignore[arg-type]


def test_a_request() -> None:
    assert command("GETRANGE", b"k\r\n", 5) == b"*3\r\n$8\r\nGETRANGE\r\n$3\r\nk\r\n\r\n$1\r\n5\r\n"

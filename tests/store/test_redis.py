"""The tier in Redis against real servers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import PIP, lack
from store import servers
from store.conformance import Conformance, Make
from store.doubts import Stalling
from store.values import (
    aligned,
    asking,
    assert_gone,
    assert_holds,
    content,
    in_time,
    put_one,
    store,
)

from kvweave.store.tier.base import Get, Outcome, Put, Tier
from kvweave.store.tier.redis import Redis

library = pytest.importorskip("redis", reason=lack("redis-py is not installed", PIP, "redis"))
NUMBERS = itertools.count()


class Behind:
    """The server that tests share; started again after one of them killed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: servers.Server | None = None

    def running(self) -> servers.Server:
        if self.server is None or self.server.process.poll() is not None:
            self.server = servers.redis(self.folder)
        return self.server

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.running().port}"

    def ask(self, *words: bytes | str | int) -> Any:
        with contextlib.closing(library.Redis(port=self.running().port, protocol=2)) as client:
            return client.execute_command(*words)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("redis"))
    yield made
    if made.server is not None:
        made.server.stop()


@pytest.fixture
def tier(behind: Behind) -> Iterator[Redis]:
    made = Redis(behind.url, prefix=f"t{next(NUMBERS)}:")
    yield made
    made.close()


@servers.needs_redis
class TestRedis(Conformance, Stalling):
    @pytest.fixture
    def make(self, behind: Behind) -> Make:
        self.behind = behind

        def make(capacity: int | None = None) -> Tier:
            assert capacity is None
            return Redis(behind.url, prefix=f"t{next(NUMBERS)}:")

        return make

    @pytest.fixture(autouse=True)
    def no_limit(self, behind: Behind) -> Iterator[None]:
        yield
        behind.ask("CONFIG", "SET", "maxmemory", 0)

    def limited(self, make: Make) -> Tier:
        self.behind.ask("FLUSHALL")
        used = self.behind.ask("INFO", "memory")["used_memory"]
        self.behind.ask("CONFIG", "SET", "maxmemory", used + 3 * self.room)
        return make()

    def taken(self, n: int) -> int:
        return n

    def change(self, tier: Tier, key: str, how: Callable[[bytes], bytes]) -> None:
        assert isinstance(tier, Redis)
        name = tier._name(key)
        self.behind.ask("SET", name, how(self.behind.ask("GET", name)))

    def corrupt(self, tier: Tier, key: str) -> None:
        def flip(data: bytes) -> bytes:
            at = len(data) * 3 // 4
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

        self.change(tier, key, flip)

    def tear(self, tier: Tier, key: str) -> None:
        self.change(tier, key, lambda data: data[: len(data) // 2])

    def slow(self, tier: Tier, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.behind.running().frozen(seconds)

    def hang(self, tier: Tier) -> contextlib.AbstractContextManager[None]:
        return self.behind.running().frozen()

    def lose(self, tier: Tier) -> None:
        self.behind.running().kill()

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return self.beside(tier)

    def beside(self, tier: Tier) -> Tier:
        assert isinstance(tier, Redis)
        return Redis(self.behind.url, prefix=tier._prefix.decode())


@servers.needs_redis
def test_it_comes_back_by_itself(tmp_path: Path) -> None:
    server = servers.redis(tmp_path)
    tier = Redis(f"redis://127.0.0.1:{server.port}")
    store(tier, "a", b"first")
    server.kill()
    get = Get("a", 0, [aligned(5)])
    assert tier.get([get])[0].state == "failed"
    (outcome,) = tier.get([get])
    assert outcome.state == "failed" and "next try in" in outcome.why, "left alone for a while"
    again = servers.redis(tmp_path, port=server.port)
    try:
        end = time.monotonic() + 20
        while (outcome := tier.get([get])[0]).state == "failed" and time.monotonic() < end:
            time.sleep(0.02)
        assert outcome.state == "missing", "it kept nothing"
        assert tier.n_bytes == 0
        store(tier, "a", b"again")
        assert_holds(tier, "a", b"again")
        tier.close()
    finally:
        again.stop()


@servers.needs_redis
def test_connections_that_the_server_dropped_are_not_used(behind: Behind, tier: Redis) -> None:
    store(tier, "a", b"value")
    behind.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert_holds(tier, "a", b"value")


@servers.needs_redis
def test_without_a_deadline_nobody_waits_for_ever(behind: Behind) -> None:
    tier = Redis(behind.url, prefix="frozen:", timeout=0.3)
    store(tier, "a", content("a", 5000))
    get = asking("a", content("a", 5000))
    with behind.running().frozen():
        begin = time.monotonic()
        (outcome,) = tier.get([get])
        assert outcome.state == "failed" and "no answer within 0.3 s" in outcome.why
        assert time.monotonic() - begin < 0.8
        while "next try in" not in (why := tier.get([get])[0].why):
            assert time.monotonic() - begin < 1.5, why
        late = tier.put([Put("b", [memoryview(b"x")])], deadline=time.monotonic() + 0.1)
        assert late[0].state in ("late", "failed")
    in_time(tier.close)


@servers.needs_redis
def test_a_call_is_given_the_time_of_its_bytes(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.store.tier.limit.SLOWEST", 1 << 20)
    tier = Redis(behind.url, prefix="patient:", timeout=0.2)
    data = content("a", 1 << 20)
    with behind.running().frozen(0.6):
        store(tier, "a", data)
    with behind.running().frozen(0.6):
        assert_holds(tier, "a", data)
    tier.close()


@servers.needs_redis
def test_prefixes_keep_apart(behind: Behind) -> None:
    odd, plain = Redis(behind.url, prefix="a*[b]?\\"), Redis(behind.url, prefix="aXb")
    store(odd, "k", b"odd")
    store(plain, "k", b"plain")
    behind.ask("SET", "aXbNOT A KEY", "foreign")
    assert (list(odd.keys()), list(plain.keys())) == (["k"], ["k"])
    assert (odd.n_bytes, plain.n_bytes) == (3, 5)
    assert odd.discard(["k"])[0].ok
    assert_holds(plain, "k", b"plain")
    for tier in (odd, plain):
        tier.close()


@servers.needs_redis
def test_more_keys_than_a_page(tier: Redis) -> None:
    keys = {f"k{i}" for i in range(2500)}
    assert all(outcome.ok for outcome in tier.put([Put(key, [memoryview(b"xy")]) for key in keys]))
    assert set(tier.keys()) == keys and tier.n_bytes == 5000
    assert tier.look(sorted(keys)) == [2] * 2500
    assert all(outcome.ok for outcome in tier.discard(sorted(keys)))
    assert list(tier.keys()) == []


@servers.needs_redis
def test_what_is_no_string_is_wrong(behind: Behind, tier: Redis) -> None:
    behind.ask("RPUSH", tier._name("list"), "x")
    assert tier.get([Get("list", 0, [aligned(1)])])[0].state == "wrong"
    (found,) = tier.look(["list"])
    assert isinstance(found, Outcome) and found.state == "failed"
    assert put_one(tier, "list", b"a value").state == "exists"
    assert tier.discard(["list"])[0].ok
    store(tier, "list", b"a value")
    assert_holds(tier, "list", b"a value")


@servers.needs_redis
def test_a_value_that_is_too_large_is_not_sent(tier: Redis) -> None:
    page = memoryview(bytes(1 << 20))
    large = Put("large", [page] * 512 + [page[:1]])
    outcomes = tier.put([large, Put("small", [page])])
    assert [outcome.state for outcome in outcomes] == ["failed", "done"]
    assert "536870912 bytes" in outcomes[0].why
    assert_gone(tier, "large")


@servers.needs_redis
@pytest.mark.slow
def test_the_largest_value(tier: Redis) -> None:
    n = 512 << 20
    data = memoryview(bytearray(content("a", n)))
    store(tier, "a", data)  # type: ignore[arg-type]
    tail = asking("a", bytes(data[-5000:]))
    get = Get("a", n - 5000, tail.into, tail.sums)
    assert tier.get([get])[0].ok
    assert tier.look(["a"]) == [n]
    assert tier.discard(["a"])[0].ok

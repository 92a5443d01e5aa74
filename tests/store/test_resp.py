from __future__ import annotations

import contextlib
import itertools
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import APT, lack
from store import servers
from store.conformance import Conformance, Make
from store.values import (
    aligned,
    asking,
    assert_holds,
    assert_untouched,
    content,
    filled,
    in_time,
    put_one,
    store,
)

from kvweave.errors import StoreError
from kvweave.store.tier.base import Get, Put, Tier
from kvweave.store.tier.limit import Limit
from kvweave.store.tier.resp import LARGEST, Resp
from kvweave.store.tier.wire import ServerAddress, Wire

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

    def ask(self, *words: bytes | str | int) -> object:
        limit = Limit(None, 10)
        wire = Wire(ServerAddress("127.0.0.1", self.running().port), limit)
        try:
            return wire.ask(limit, *words)
        finally:
            wire.close()


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    made = Behind(tmp_path_factory.mktemp("redis"))
    yield made
    if made.server is not None:
        made.server.stop()


@pytest.fixture
def tier(behind: Behind) -> Iterator[Resp]:
    made = Resp(behind.url, prefix=f"t{next(NUMBERS)}:")
    yield made
    made.check_integrity()
    made.close()


@servers.needs_redis
class TestResp(Conformance):
    @pytest.fixture
    def make(self, behind: Behind) -> Make:
        self.behind = behind

        def make(capacity: int | None = None) -> Tier:
            assert capacity is None
            return Resp(behind.url, prefix=f"t{next(NUMBERS)}:")

        return make

    @pytest.fixture(autouse=True)
    def no_limit(self, behind: Behind) -> Iterator[None]:
        yield
        behind.ask("CONFIG", "SET", "maxmemory", 0)

    def limited(self, make: Make) -> Tier:
        self.behind.ask("FLUSHALL")
        info = self.behind.ask("INFO", "memory")
        assert isinstance(info, bytes)
        used = int(info.split(b"used_memory:")[1].split()[0])
        self.behind.ask("CONFIG", "SET", "maxmemory", used + 3 * self.room)
        return make()

    def settle(self, tier: Tier) -> None:
        assert isinstance(tier, Resp) and tier.settle(10)

    def taken(self, n: int) -> int:
        return n

    def change(self, tier: Tier, key: str, how: Callable[[bytes], bytes]) -> None:
        assert isinstance(tier, Resp)
        name = tier._key(key)
        size = self.behind.ask("STRLEN", name)
        assert isinstance(size, int)
        whole = b""
        while len(whole) < size:
            part = self.behind.ask("GETRANGE", name, len(whole), len(whole) + 65_535)
            assert isinstance(part, bytes)
            whole += part
        self.behind.ask("SET", name, how(whole))

    def corrupt(self, tier: Tier, key: str) -> None:
        def flip(data: bytes) -> bytes:
            at = len(data) * 3 // 4
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

        self.change(tier, key, flip)

    def tear(self, tier: Tier, key: str) -> None:
        self.change(tier, key, lambda data: data[: len(data) // 2])
        assert isinstance(tier, Resp)
        tier._ledger.unsure(key)

    def slow(self, tier: Tier, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.behind.running().frozen(seconds)

    def lose(self, tier: Tier) -> None:
        self.behind.running().kill()

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, Resp)
        tier.close()
        return Resp(self.behind.url, prefix=tier._prefix.decode())


def refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(StoreError, match=why) as caught:
        call()
    assert caught.value.hint and "secret" not in str(caught.value)


@servers.needs_redis
def test_passwords_users_and_databases(tmp_path: Path) -> None:
    acl = "user writer on >secret ~mine:* +@all"
    server = servers.redis(tmp_path, "--requirepass", "secret", "--user", *acl.split()[1:])
    try:
        at = f"127.0.0.1:{server.port}"
        refused(lambda: Resp(f"redis://:wrong@{at}"), "WRONGPASS")
        refused(lambda: Resp(f"redis://writer:wrong@{at}"), "WRONGPASS")
        refused(lambda: Resp(f"redis://{at}"), "NOAUTH")
        refused(lambda: Resp(f"redis://{at}/99", password="secret"), "out of range")
        one = Resp(f"redis://{at}/1", password="secret", prefix="mine:")
        two = Resp(f"redis://:secret@{at}/2", prefix="mine:")
        writer = Resp(f"redis://writer:secret@{at}/1", prefix="mine:")
        elsewhere = Resp(f"redis://writer@{at}", password="secret", prefix="other:")
        store(one, "a", b"one")
        store(two, "a", b"second")
        assert_holds(writer, "a", b"one")
        assert_holds(two, "a", b"second")
        outcome = put_one(elsewhere, "a", b"x")
        assert outcome.state == "failed" and "NOPERM" in outcome.why
        assert elsewhere.size("a") is None
        assert elsewhere.get([Get("a", 0, [aligned(1)])])[0].state == "failed"
        assert "secret" not in repr(one.server) + str(one.server)
        for tier in (one, two, writer, elsewhere):
            tier.close()
    finally:
        server.stop()


@servers.needs_redis
def test_a_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    path = folder / "s"  # a path of a socket has at most 107 bytes
    server = servers.redis(
        folder, "--unixsocket", str(path), answers=lambda: servers.listens(0, str(path))
    )
    try:
        tier = Resp(f"unix://{path}?db=3")
        store(tier, "a", content("a", 300_000))
        assert_holds(tier, "a", content("a", 300_000))
        tier.close()
        refused(lambda: Resp(f"unix://{folder / 'nobody'}"), "No such file")
    finally:
        server.stop()


@servers.needs_redis
@pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason=lack("no openssl to make a certificate", APT, "openssl"),
)
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvweave".split()
    words += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(words, check=True, capture_output=True)
    port = servers.free_port()
    options = [
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
    ]
    options += ["--tls-auth-clients", "no"]
    server = servers.redis(tmp_path, *options, answers=lambda: servers.listens(port))
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        tier = Resp(f"rediss://127.0.0.1:{port}", tls=context)
        data = content("a", 3_000_000)
        store(tier, "a", data)
        for _ in range(3):
            assert_holds(tier, "a", data)
        get = asking("a", data, 1_000_001, 12_345)
        assert tier.get([get])[0].ok and filled(get) == data[1_000_001:1_012_346]
        assert len(tier._pool._idle) == 1, "the connection is used again"
        tier.close()
        refused(lambda: Resp(f"rediss://127.0.0.1:{port}"), "certificate verify failed")
        refused(lambda: Resp(f"redis://127.0.0.1:{port}", timeout=1.0), "closed|no answer|reset")
    finally:
        server.stop()


@servers.needs_redis
def test_killed_while_it_answers(tmp_path: Path) -> None:
    server = servers.redis(tmp_path)
    tier = Resp(f"redis://127.0.0.1:{server.port}")
    size = 48 << 20
    store(tier, "a", bytes(size))
    store(tier, "b", bytes(10))
    gets = [Get("b", 0, [aligned(10)]), *(Get("a", 0, [aligned(size)]) for _ in range(2))]
    states: list[str] = []
    reader = threading.Thread(target=lambda: states.extend(o.state for o in tier.get(gets)))
    reader.start()
    while gets[1].into[0][0] == 0xA5:
        time.sleep(0.001)
    server.kill()
    reader.join(30)
    assert states[0] == "done" and states[2] == "failed", "the second large one had not begun"
    assert_untouched(gets[2:], 0.2)
    assert put_one(tier, "c", b"x").state == "failed"
    assert sorted(tier.keys()) == ["a", "b"], "what was known"
    tier.close()


@servers.needs_redis
def test_it_comes_back_by_itself(tmp_path: Path) -> None:
    server = servers.redis(tmp_path)
    tier = Resp(f"redis://127.0.0.1:{server.port}")
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
        tier.check_integrity()
        tier.close()
    finally:
        again.stop()


@servers.needs_redis
def test_connections_that_the_server_dropped_are_not_used(behind: Behind, tier: Resp) -> None:
    store(tier, "a", b"value")
    limit = Limit(None, 10)
    with tier._pool.take(limit), tier._pool.take(limit), tier._pool.take(limit):
        pass
    assert len(tier._pool._idle) == 3
    behind.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert_holds(tier, "a", b"value")
    assert len(tier._pool._idle) == 1


@servers.needs_redis
def test_what_was_deleted_while_the_server_was_away_is_removed_later(behind: Behind) -> None:
    tier = Resp(behind.url, prefix="away:", timeout=0.3)
    store(tier, "a", content("a", 5000))
    with behind.running().frozen():
        tier.delete(["a"])
        assert not tier.settle(0.5)
        get = Get("a", 0, [aligned(9)])
        assert tier.get([get])[0].state == "missing", "for us it is gone at once"
        assert tier.size("a") is None
        assert put_one(tier, "a", b"not now").state == "failed"
        assert tier.get([get])[0].state == "missing", "nor does it come back"
    assert tier.settle(20)
    assert behind.ask("EXISTS", "away:a") == 0
    assert tier.n_bytes == 0
    tier.check_integrity()
    tier.close()


@servers.needs_redis
def test_without_a_deadline_nobody_waits_for_ever(behind: Behind) -> None:
    tier = Resp(behind.url, prefix="frozen:", timeout=0.3)
    store(tier, "a", content("a", 5000))
    get = asking("a", content("a", 5000))
    with behind.running().frozen():
        (outcome,) = tier.get([get])
        assert outcome.state == "failed" and "no answer within 0.3 s" in outcome.why
        assert "next try in" in tier.get([get])[0].why, "nobody waits a second time"
        late = tier.put([Put("b", [memoryview(b"x")])], deadline=time.monotonic() + 0.1)
        assert late[0].state in ("late", "failed")
    in_time(tier.close)


@servers.needs_redis
def test_prefixes_keep_apart(behind: Behind) -> None:
    odd, plain = Resp(behind.url, prefix="a*[b]?\\"), Resp(behind.url, prefix="aXb")
    store(odd, "k", b"odd")
    store(plain, "k", b"plain")
    behind.ask("SET", "aXbNOT A KEY", "foreign")
    assert (list(odd.keys()), list(plain.keys())) == (["k"], ["k"])
    assert (odd.n_bytes, plain.n_bytes) == (3, 5)
    odd.delete(["k"])
    assert odd.settle(10)
    assert_holds(plain, "k", b"plain")
    for tier in (odd, plain):
        tier.check_integrity()
        tier.close()


@servers.needs_redis
def test_what_is_no_string_is_wrong(behind: Behind, tier: Resp) -> None:
    behind.ask("RPUSH", tier._key("list"), "x")
    assert tier.get([Get("list", 0, [aligned(1)])])[0].state == "wrong"
    assert tier.size("list") is None
    store(tier, "list", b"a value")
    assert_holds(tier, "list", b"a value")


@servers.needs_redis
def test_empty_values_are_not_missing(tier: Resp) -> None:
    store(tier, "a", b"")
    assert tier.size("a") == 0
    assert tier.get([Get("a", 0, []), Get("b", 0, [])])[0].ok
    assert [o.state for o in tier.get([Get("a", 0, [aligned(1)]), Get("b", 0, [])])] == [
        "wrong",
        "missing",
    ]


@servers.needs_redis
def test_a_value_that_is_too_large_is_not_sent(tier: Resp) -> None:
    page = memoryview(bytes(1 << 20))
    large = Put("large", [page] * (LARGEST // page.nbytes) + [page[:1]])
    outcomes = tier.put([large, Put("small", [page])])
    assert [outcome.state for outcome in outcomes] == ["failed", "done"]
    assert tier.size("large") is None


@servers.needs_redis
def test_what_another_client_stored_is_found(behind: Behind, tier: Resp) -> None:
    other = Resp(behind.url, prefix=tier._prefix.decode())
    store(other, "theirs", content("theirs", 700))
    store(tier, "ours", content("ours", 50))
    assert tier.n_bytes == 750 and sorted(tier.keys()) == ["ours", "theirs"]
    behind.ask("SET", tier._key("ours"), "shorter")
    with pytest.raises(AssertionError, match=r"'ours': \(50, 7\)"):
        tier.check_integrity()
    store(tier, "ours", b"x")
    other.close()

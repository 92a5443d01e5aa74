"""The tier in object storage: in memory, in a directory, and in S3 as moto has it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import PIP, lack
from store import servers
from store.conformance import Conformance, Make
from store.doubts import Stalling
from store.values import (
    SLACK,
    aligned,
    asking,
    assert_holds,
    content,
    filled,
    in_time,
    put_one,
    store,
)

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import Get, Outcome, Put, Tier
from kvweave.store.tier.s3 import Archive

obstore = pytest.importorskip("obstore", reason=lack("obstore is not installed", PIP, "obstore"))
stores = pytest.importorskip("obstore.store")
NUMBERS = itertools.count()


class Held:
    """obstore, with every request held up: until ``go`` is set, or for ``seconds``, in a way that
    nobody can call off."""

    def __init__(self, seconds: float = 0.0, go: threading.Event | None = None) -> None:
        self.seconds, self.go = seconds, go

    def __getattr__(self, name: str) -> Any:
        real = getattr(obstore, name)
        if not name.endswith("_async"):
            return real

        async def later(*args: Any, **options: Any) -> Any:
            time.sleep(self.seconds)
            while self.go is not None and not self.go.is_set():
                await asyncio.sleep(0.01)
            return await real(*args, **options)

        return later


class TestMemoryStore(Conformance, Stalling):
    @pytest.fixture
    def make(self) -> Make:
        def make(capacity: int | None = None) -> Tier:
            return Archive(stores.MemoryStore())

        return make

    def limited(self, make: Make) -> Tier:
        self._cannot("be full")

    def taken(self, n: int) -> int:
        return n

    def change(self, tier: Tier, key: str, data: bytes) -> None:
        assert isinstance(tier, Archive)
        obstore.put(tier._store, tier.path(key), data)

    def held(self, tier: Tier, key: str) -> bytes:
        assert isinstance(tier, Archive)
        return bytes(obstore.get(tier._store, tier.path(key)).bytes())

    def corrupt(self, tier: Tier, key: str) -> None:
        data = bytearray(self.held(tier, key))
        data[len(data) * 3 // 4] ^= 0x10
        self.change(tier, key, bytes(data))

    def tear(self, tier: Tier, key: str) -> None:
        data = self.held(tier, key)
        self.change(tier, key, data[: len(data) // 2])

    @contextlib.contextmanager
    def slow(self, tier: Tier, seconds: float) -> Iterator[None]:
        assert isinstance(tier, Archive)
        tier._api = Held(seconds)
        yield
        tier._api = obstore

    @contextlib.contextmanager
    def hang(self, tier: Tier) -> Iterator[None]:
        assert isinstance(tier, Archive)
        go = threading.Event()
        tier._api = Held(go=go)
        yield
        go.set()
        tier._api = obstore

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return self.beside(tier)

    def beside(self, tier: Tier) -> Tier:
        assert isinstance(tier, Archive)
        return Archive(tier._store, prefix=tier._prefix)


class TestDirectory(TestMemoryStore):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        self.folder = tmp_path

        def make(capacity: int | None = None) -> Tier:
            return Archive(stores.LocalStore(tmp_path), prefix=f"deep/{next(NUMBERS)}")

        return make

    def lose(self, tier: Tier) -> None:
        shutil.rmtree(self.folder)
        self.folder.write_bytes(b"no directory any more")


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[servers.Server]]:
    """One running server, or none yet; tests kill it."""
    up: list[servers.Server] = []
    yield up
    for server in up:
        server.kill()


def bucket(moto: list[servers.Server], folder: Path) -> Any:
    """Return an S3 bucket behind a server that runs."""
    if not moto or moto[-1].process.poll() is not None:
        moto.append(servers.moto(folder))
        made = servers.put(f"http://127.0.0.1:{moto[-1].port}/kvweave")
        assert made == 200
    return stores.S3Store(
        "kvweave",
        endpoint=f"http://127.0.0.1:{moto[-1].port}",
        access_key_id="nobody",
        secret_access_key="nothing",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 1},
    )


@servers.needs_moto
@pytest.mark.slow
class TestS3(TestMemoryStore):
    tells_who_won = False  # moto looks, then stores: of two at once both may hear that they did

    @pytest.fixture
    def make(self, moto: list[servers.Server], tmp_path: Path) -> Make:
        self.server = moto

        def make(capacity: int | None = None) -> Tier:
            return Archive(bucket(moto, tmp_path), prefix=f"t{next(NUMBERS)}")

        return make

    def slow(self, tier: Tier, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.server[-1].frozen(seconds)

    def hang(self, tier: Tier) -> contextlib.AbstractContextManager[None]:
        return self.server[-1].frozen()

    def lose(self, tier: Tier) -> None:
        self.server[-1].kill()


def test_objects_are_named_by_key(tmp_path: Path) -> None:
    tier = Archive(stores.LocalStore(tmp_path), prefix="/a/b/")
    for key in ("..", "k", "x" * 200):
        store(tier, key, key.encode())
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert names == {"...kv", "k.kv", f"{'x' * 200}.kv"}
    (tmp_path / "a" / "b" / "c").mkdir()
    (tmp_path / "a" / "b" / "c" / "other.kv").write_bytes(b"of another prefix")
    (tmp_path / "a" / "b" / "notes.txt").write_bytes(b"not ours")
    assert sorted(tier.keys()) == ["..", "k", "x" * 200]
    assert tier.n_bytes == 203
    tier.close()


def test_without_a_prefix() -> None:
    tier = Archive(stores.MemoryStore(), prefix="")
    store(tier, "a", b"x")
    obstore.put(tier._store, "deep/b.kv", b"y")
    assert list(tier.keys()) == ["a"] and tier.path("a") == "a.kv"
    tier.close()


def test_ranges_of_one_value_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Archive(stores.MemoryStore())
    data = content("a", 50_000)
    store(tier, "a", data)
    asked: list[object] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(obstore, name)

    tier._api = Counting()
    gets = [asking("a", data, offset, 100) for offset in (0, 40_000, 7)]
    assert [outcome.state for outcome in tier.get(gets)] == ["done"] * 3
    assert [filled(get) for get in gets] == [data[0:100], data[40_000:40_100], data[7:107]]
    assert asked == ["get_ranges_async"]
    gets[1] = Get("a", 60_000, [aligned(10)])
    assert [outcome.state for outcome in tier.get(gets)] == ["done", "wrong", "done"]
    tier.close()


class Failing:
    """An API whose puts fail, or hang until they are called off."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.called_off = False

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    async def put_async(self, *args: Any, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.called_off = True
            raise


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Unable to write: No space left on device (os error 28)", "full"),
        ("InsufficientStorage", "full"),
        ("in 1.1ms - Server returned non-2xx status code: 507 Insufficient Storage: x", "full"),
        ("performing GET http://127.0.0.1:50755/b/k in 507.1ms - HTTP error: sending", "failed"),
        ("permission denied", "failed"),
    ],
)
def test_a_store_that_refuses(text: str, state: str) -> None:
    tier = Archive(stores.MemoryStore())
    store(tier, "old", b"value")
    tier._api = Failing(OSError(text))
    outcome = put_one(tier, "new", b"new")
    assert outcome.state == state and text in outcome.why
    assert list(tier.keys()) == ["old"]
    assert_holds(tier, "old", b"value")
    tier.close()


def test_a_store_that_refuses_to_be_asked() -> None:
    tier = Archive(stores.MemoryStore())

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(obstore, name)

        async def get_async(self, *args: Any, **options: Any) -> None:
            raise OSError("403 Forbidden")

        delete_async = get_ranges_async = get_async

    tier._api = Refusing()
    (found,) = tier.look(["a"])
    assert isinstance(found, Outcome) and found.state == "failed" and "403" in found.why
    assert tier.get([Get("a", 0, [aligned(5)])])[0].state == "failed"
    assert [outcome.state for outcome in tier.discard(["a", "b"])] == ["failed", "failed"]
    tier.close()


def test_what_is_late_is_called_off() -> None:
    tier = Archive(stores.MemoryStore())
    failing = tier._api = Failing()
    puts = [Put("a", [memoryview(b"x")])]
    assert tier.put(puts, deadline=time.monotonic() + 0.1)[0].state == "late"
    end = time.monotonic() + 10
    while not failing.called_off and time.monotonic() < end:
        time.sleep(0.01)
    assert failing.called_off
    tier._api = obstore
    store(tier, "a", b"next")
    assert_holds(tier, "a", b"next")
    tier.close()


def test_nobody_answers() -> None:
    nobody = stores.S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{servers.free_port()}",
        access_key_id="a",
        secret_access_key="b",
        region="r",
        client_options={"allow_http": True},
    )
    tier = Archive(nobody, timeout=0.3)
    begin = time.monotonic()
    assert [put_one(tier, "a", b"x").state for _ in range(8)] == ["failed"] * 8
    assert time.monotonic() - begin < 0.3 + 2 * 0.25 + SLACK, "who comes later does not wait"
    assert tier.get([Get("a", 0, [aligned(1)])])[0].state == "failed"
    for ask in (lambda: list(tier.keys()), lambda: tier.n_bytes):
        with pytest.raises(StoreError) as caught:
            ask()
        assert caught.value.hint
    in_time(tier.close)


@pytest.mark.slow
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidArgument, match="cannot be loaded") as caught:
        Archive(object())
    assert "kvweave[archive]" in caught.value.hint

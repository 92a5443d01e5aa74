"""The disk tier, alone and behind its guard."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store.conformance import Conformance, Make
from store.values import assert_holds, content, put_one, small_device, store

from kvweave.errors import InvalidArgument, StoreError
from kvweave.keep import LRU
from kvweave.store.spec import open_levels
from kvweave.store.tier import aio, files, guarded, owner
from kvweave.store.tier import disk as module
from kvweave.store.tier.base import PAGE, Put, Tier
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.guarded import Guarded
from kvweave.store.tier.owner import claim


def bare(tier: Tier) -> Disk:
    made = tier.tier if isinstance(tier, Guarded) else tier
    assert isinstance(made, Disk)
    return made


class TestDisk(Conformance):
    """As engines have it."""

    gives_back = False

    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
        def make(capacity: int | None = None) -> Guarded:
            if capacity is not None:
                small_device(monkeypatch, tmp_path / "it", capacity)
            return Guarded(Disk(tmp_path / "it"))

        return make

    def taken(self, n: int) -> int:
        return -(-n // PAGE) * PAGE

    def corrupt(self, tier: Tier, key: str) -> None:
        path = bare(tier).path(key)
        data = bytearray(path.read_bytes())
        data[len(data) * 3 // 4] ^= 0x10
        path.write_bytes(data)

    def tear(self, tier: Tier, key: str) -> None:
        path = bare(tier).path(key)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)

    @contextmanager
    def slow(self, tier: Tier, seconds: float) -> Iterator[None]:
        with self._held(threading.Event(), seconds):
            yield

    @contextmanager
    def hang(self, tier: Tier) -> Iterator[None]:
        free = threading.Event()
        try:
            with self._held(free, 60):
                yield
        finally:
            free.set()

    @contextmanager
    def _held(self, free: threading.Event, seconds: float) -> Iterator[None]:
        """Every call of the system waits."""
        names = ("preadv", "pwrite", "fsync", "unlink", "scandir", "fstat", "open")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                real = getattr(os, name)

                def call(*args, real=real, **how):  # type: ignore[no-untyped-def]
                    if threading.current_thread().name == "kvweave-tier":
                        free.wait(seconds)
                    return real(*args, **how)

                patch.setattr(module.os, name, call)
            real_stat = Path.stat

            def stat(self: Path, **how: bool) -> os.stat_result:
                if threading.current_thread().name == "kvweave-tier":
                    free.wait(seconds)
                return real_stat(self, **how)

            patch.setattr(Path, "stat", stat)
            real_call = aio._call

            def call_aside(*args: int) -> int:
                if threading.current_thread().name == "kvweave-tier":
                    free.wait(seconds)
                return real_call(*args)

            patch.setattr(aio, "_call", call_aside)
            yield

    def lose(self, tier: Tier) -> None:
        shutil.rmtree(bare(tier).directory)

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return Guarded(Disk(bare(tier).directory))

    def beside(self, tier: Tier) -> Tier:
        bare(tier).shared = True
        return Guarded(Disk(bare(tier).directory, shared=True))


class TestThroughTheCache(TestDisk):
    """Where there is no O_DIRECT and no file without a name: network file systems."""

    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
        monkeypatch.setattr(files, "O_TMPFILE", 0)

        def make(capacity: int | None = None) -> Guarded:
            if capacity is not None:
                small_device(monkeypatch, tmp_path / "it", capacity)
            return Guarded(Disk(tmp_path / "it", direct=False))

        return make


def test_a_directory_that_is_not_mounted_says_nothing_about_values(tmp_path: Path) -> None:
    tier = Disk(tmp_path / "it")
    store(tier, "a", b"value")
    (tmp_path / "it").rename(tmp_path / "elsewhere")
    (tmp_path / "it").mkdir()
    (there,) = tier.look(["a"])
    assert not isinstance(there, int) and there.state == "failed" and "mounted" in there.why
    with pytest.raises(StoreError, match="another one"):
        list(tier.keys())


@pytest.mark.parametrize("call", ["pwrite", "fsync", "link", "open", "ftruncate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT])
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    tier = Disk(tmp_path)
    store(tier, "before", content("before", 9000))
    with monkeypatch.context() as patch:

        def fail(*args: object, **how: object) -> int:
            raise OSError(number, os.strerror(number))

        patch.setattr(module.os, call, fail)
        outcome = put_one(tier, "a", content("a", 9001), durable=True)
    assert outcome.state == ("full" if number in module.NO_ROOM else "failed") and outcome.why
    assert [p.name for p in tmp_path.iterdir()] == ["before.kv"]
    tier.check_integrity()
    store(tier, "a", content("a", 9001), durable=True)
    assert_holds(tier, "a", content("a", 9001))


def test_a_disk_that_cannot_be_asked_fails_puts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Disk(tmp_path)
    store(tier, "before", content("before", 9000))
    with monkeypatch.context() as patch:

        def fail(*args: object, **how: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(module.os, "stat", fail)
        assert put_one(tier, "a", content("a", 9001)).state == "failed"
        assert put_one(tier, "before", content("before", 9000)).state == "failed"
    store(tier, "a", content("a", 9001))


def test_a_name_that_may_not_be_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's fsync fails once; the next one would say that all is well."""
    tier, fsync = Disk(tmp_path), os.fsync
    with monkeypatch.context() as patch:

        def fail(file: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{file}"):
                raise OSError(errno.EIO, "gone")
            fsync(file)

        patch.setattr(module.os, "fsync", fail)
        assert put_one(tier, "a", content("a", 9001), durable=True).state == "failed"
    assert list(tier.keys()) == []
    store(tier, "a", content("a", 9001), durable=True)


def test_a_durable_put_of_what_is_there_has_it_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Disk(tmp_path)
    store(tier, "a", b"value")
    synced: list[str] = []
    monkeypatch.setattr(
        module.os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    assert tier.put([Put("a", [memoryview(b"value")])], durable=True)[0].state == "exists"
    assert synced == [str(tier.path("a")), str(tmp_path)]


def test_threads_that_hang_are_bounded_and_others_are_late_in_time(tmp_path: Path) -> None:
    suite = TestDisk()
    others = set(threading.enumerate())  # of tiers of other tests, that end still
    tier = Guarded(Disk(tmp_path))
    store(tier, "a", content("a", 9000))
    with suite.hang(tier):
        for _ in range(20):
            assert put_one(tier, "b", b"value", deadline=time.monotonic() + 0.02).state == "late"
    mine = [t for t in threading.enumerate() if t not in others and t.name == "kvweave-tier"]
    assert len(mine) <= 8
    assert_holds(tier, "a", content("a", 9000))
    tier.close()


def test_whose_directory_it_is(tmp_path: Path) -> None:
    mine = claim(tmp_path / "d", "1" * 32, shared=False, inside=False)
    assert mine.relation == "mine"
    with pytest.raises(InvalidArgument, match="open in another process"):
        claim(tmp_path / "d", "1" * 32, shared=False, inside=False)
    for other in ("2" * 32, None):
        with pytest.raises(InvalidArgument, match="belongs to another home"):
            claim(tmp_path / "d", other, shared=False, inside=False)
    mine.close()
    again = claim(tmp_path / "d", "1" * 32, shared=False, inside=False)
    assert again.relation == "mine"
    again.close()
    for index in (None, "1" * 32, "2" * 32):
        assert claim(tmp_path / "s", index, shared=True, inside=False).relation == "shared"
        assert claim(tmp_path / "s", index, shared=False, inside=False).relation == "shared"
    assert claim(tmp_path / "c", None, shared=False, inside=False).relation == "cache"
    (tmp_path / "c" / "somebodys.kv").write_text("value")
    assert claim(tmp_path / "c", "1" * 32, shared=False, inside=False).relation == "cache"
    (tmp_path / "d" / "owner.json").write_text("{")
    with pytest.raises(StoreError, match="does not say whose"):
        claim(tmp_path / "d", "1" * 32, shared=False, inside=True)


def test_what_opens_too_late_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "QUIET", 0.05)
    go, undone = threading.Event(), threading.Event()

    def slow() -> str:
        assert go.wait(10)
        return "opened"

    with pytest.raises(StoreError, match="does not answer") as caught:
        guarded.in_time(slow, tmp_path, lambda made: made == "opened" and undone.set())
    assert caught.value.hint
    go.set()
    assert undone.wait(10)
    with pytest.raises(StoreError, match="cannot open") as caught:
        guarded.in_time(lambda: (tmp_path / "no").stat(), tmp_path, bool)
    assert caught.value.hint


def test_a_directory_that_hangs_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hangs: claiming it, looking at it, listing it; and it opens when it is well again."""
    monkeypatch.setattr(guarded, "QUIET", 60.0)  # what is well answers, however busy the machine is
    spec = f"disk path={tmp_path / 'd'}"
    uuid = "1" * 32

    def opened() -> None:
        (level,) = open_levels((spec,), tmp_path / "home", "m", LRU, uuid)
        try:
            level.adopt({})
        finally:
            level.close()

    opened()
    for where, name in ((owner, "_claim"), (module, "_identity"), (Disk, "_entries")):
        well, wake = getattr(where, name), threading.Event()

        def hangs(*args: Any, wake: threading.Event = wake, well: Any = well) -> Any:
            wake.wait(10)
            return well(*args)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, hangs)
            patch.setattr(guarded, "QUIET", 0.1)
            start = time.monotonic()
            with pytest.raises(StoreError, match="does not answer"):
                opened()
            assert time.monotonic() - start < 5
        wake.set()
        for _ in range(100):  # until what hung has let go
            try:
                opened()
                break
            except InvalidArgument:
                time.sleep(0.05)
        else:
            pytest.fail(f"{name} keeps its lock")


@pytest.mark.parametrize("shared", [False, True])
def test_a_bit_of_whose_it_is_makes_it_nobody_else_s(tmp_path: Path, shared: bool) -> None:
    """Of the directory of a home that was copied, too: one bit of a name in it said that it was not."""
    original, copied, mine = tmp_path / "it", tmp_path / "copy", "1" * 32
    claim(original, mine, shared=shared, inside=False, at="5:6").close()
    shutil.copytree(original, copied)
    file, seen = copied / owner.FILE, set()
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            made = claim(copied, "2" * 32, shared=shared, inside=False, was={mine}, at="7:8")
        except StoreError as error:  # FormatTooNew is one; InvalidArgument is none
            assert error.hint
            seen.add(type(error).__name__)
        else:
            made.close()
            assert made.relation == ("shared" if shared else "mine"), data
            seen.add(made.relation)
    assert seen == {"StoreError", "FormatTooNew", "shared" if shared else "mine"}

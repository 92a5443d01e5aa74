from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from store.conformance import Conformance, Make
from store.values import (
    PATIENCE,
    aligned,
    asking,
    assert_holds,
    content,
    filled,
    put_one,
    store,
)

from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument
from kvweave.store.tier import slab_reads, slab_rows
from kvweave.store.tier.base import PAGE, Get, Put, Tier
from kvweave.store.tier.buffers import flat, runs
from kvweave.store.tier.slab import Slab
from kvweave.store.tier.slab_segments import PIECE, pieces, plan

SEGMENT = 4 << 20


class TestSlab(Conformance):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        numbers = itertools.count()

        def made(capacity: int = 32 << 20) -> Tier:
            folder = tmp_path / f"slab-{next(numbers)}"
            return Slab(folder, capacity, segment=SEGMENT, **self.options)

        self._patches = contextlib.ExitStack()
        with self._patches:
            yield made

    def settle(self, tier: Tier) -> None:
        assert tier.flush() == ""  # type: ignore[attr-defined]

    def taken(self, n: int) -> int:
        return PAGE + -(-n // PAGE) * PAGE

    def corrupt(self, tier: Tier, key: str) -> None:
        path, start, n = place(tier, key)
        overwrite(path, start + PAGE + n * 3 // 4, b"\xff\x00\x55")

    def tear(self, tier: Tier, key: str) -> None:
        path, start, n = place(tier, key)
        overwrite(path, start + PAGE + n // 2, bytes(n - n // 2))

    @contextlib.contextmanager
    def slow(self, tier: Tier, seconds: float) -> Iterator[None]:
        with patched("preadv", lambda: time.sleep(seconds)):
            yield

    def lose(self, tier: Tier) -> None:
        self._patches.enter_context(patched("preadv", broken(errno.EIO)))
        self._patches.enter_context(patched("pwritev", broken(errno.EIO)))

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return Slab(tier.directory, 32 << 20, segment=SEGMENT, **self.options)  # type: ignore[attr-defined]


class TestStrict(TestSlab):
    options: ClassVar[dict[str, Any]] = {"strict": True}

    def test_a_disk_that_hangs(self, tier: Tier) -> None:
        """Twice as many calls as there are threads; all are late in time."""
        data = content("a", 3 * PIECE)
        store(tier, "a", data)
        goes_on = threading.Event()
        with patched("preadv", lambda: goes_on.wait(PATIENCE)):
            try:
                for _ in range(2 * slab_reads.N_THREADS):
                    get = asking("a", data)
                    (outcome,) = tier.get([get], deadline=time.monotonic() + 0.05)
                    assert outcome.state == "late"
                    assert set(filled(get)) == {0xA5}
                assert not goes_on.is_set()
            finally:
                goes_on.set()
        tier.delete(["a"])
        assert_freed(tier)


class TestBuffered(TestSlab):
    """The filesystem knows no O_DIRECT."""

    options: ClassVar[dict[str, Any]] = {"direct": False}


@contextlib.contextmanager
def patched(name: str, first: Callable[[], object]) -> Iterator[None]:
    """Do something before each call of a function of `os`."""
    inner = getattr(os, name)

    def call(*args: object) -> object:
        first()
        return inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def broken(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def place(tier: Any, key: str) -> tuple[Path, int, int]:
    """Return the file, the byte of the header and the length of a value."""
    slot = tier._index[key]
    return slot.segment.path, slot.page * PAGE, slot.n


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # else O_DIRECT reads may not see it


def assert_freed(tier: Any) -> None:
    """All space is given back, soon."""
    end = time.monotonic() + PATIENCE
    tier.flush()
    while tier.n_bytes and time.monotonic() < end:
        time.sleep(0.01)
    assert tier.n_bytes == 0
    tier.check_integrity()


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    made = Slab(tmp_path, 32 << 20, segment=SEGMENT)
    yield made
    if not made._closed:
        made.check_integrity()
    made.close()


def reopened(slab: Slab) -> Slab:
    slab.close()
    return Slab(slab.directory, 32 << 20, segment=SEGMENT)


def test_aligned_memory_is_read_and_written_without_a_copy(slab: Slab) -> None:
    data = content("a", 3 * PIECE)
    store(slab, "a", data)
    get = asking("a", data)
    assert slab.get([get])[0].ok and filled(get) == data
    if slab.stats()["buffered"]:
        pytest.skip("no O_DIRECT here")
    assert slab.stats()["bounced"] == 0
    get = asking("a", data, 100, 9000)
    assert slab.get([get])[0].ok and filled(get) == data[100:9100]
    assert slab.stats()["bounced"] == 3 * PAGE


def test_buffers_that_follow_each_other_are_one_read(slab: Slab) -> None:
    data = content("a", 64 * PAGE)
    store(slab, "a", data)
    into = aligned(len(data))
    parts = [into[at : at + 64 * 7] for at in range(0, len(data), 64 * 7)]
    calls: list[int] = []
    with patched("preadv", lambda: calls.append(1)):
        assert slab.get([Get("a", 0, parts)])[0].ok
    assert bytes(into) == data and len(calls) == 1
    assert slab.stats()["bounced"] == 0 or slab.stats()["buffered"]


def test_a_filesystem_that_turns_out_to_refuse_direct_reads(slab: Slab) -> None:
    data = content("a", 100_000)
    store(slab, "a", data)
    inner, refused = os.preadv, []

    def refuse_once(*args: Any) -> int:
        if not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, "direct? no")
        return inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", refuse_once)
        assert_holds(slab, "a", data)
    assert slab.stats()["buffered"] == 1
    store(slab, "b", content("b", 77_777))
    assert_holds(slab, "b", content("b", 77_777))
    assert_holds(slab, "a", data)


def test_segments_are_made_when_needed_and_unlinked_when_free(slab: Slab) -> None:
    assert slab.stats()["files"] == 0
    for i in range(6):
        store(slab, f"k{i}", content(f"k{i}", 2 << 20))  # one to a segment, with its header
    assert slab.stats()["files"] == 6 * SEGMENT
    assert len(list(slab.directory.glob("seg-*.slab"))) == 6
    slab.delete(["k1", "k2"])
    slab.flush()
    slab.trim(keep=1)
    assert slab.stats()["files"] == 5 * SEGMENT
    slab.trim()
    assert len(list(slab.directory.glob("seg-*.slab"))) == 4
    slab.check_integrity()
    for i in (0, 3, 4, 5):
        assert_holds(slab, f"k{i}", content(f"k{i}", 2 << 20))
    store(slab, "big", content("big", SEGMENT))  # gets a segment of its own size
    assert slab.stats()["files"] == 4 * SEGMENT + SEGMENT + PAGE


def test_deleted_space_is_tidied_up_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_rows, "IDLE", 0.05)
    slab = Slab(tmp_path, 32 << 20, segment=SEGMENT)
    for i in range(4):
        store(slab, f"k{i}", content(f"k{i}", 3 << 20))
    slab.delete([f"k{i}" for i in range(4)])
    end = time.monotonic() + PATIENCE
    while slab.stats()["segments"] > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert slab.stats()["segments"] == 1
    slab.close()


def test_holes_are_given_back_to_the_filesystem(slab: Slab) -> None:
    for i in range(3):
        store(slab, f"k{i}", content(f"k{i}", SEGMENT // 4 + PAGE))
    (path,) = slab.directory.glob("seg-*.slab")
    assert path.stat().st_blocks * 512 >= SEGMENT
    slab.delete(["k0"])
    slab.flush()
    slab.trim()
    assert slab.stats()["punched"] == 0, "less than half is free"
    slab.delete(["k2"])
    slab.flush()
    slab.trim()
    if not slab.stats()["punched"]:
        pytest.skip("this filesystem punches no holes")
    punched = slab.stats()["punched"]
    assert path.stat().st_blocks * 512 <= SEGMENT - punched + (1 << 16)
    slab.trim()
    assert slab.stats()["punched"] == punched, "once is enough"
    slab.check_integrity()
    assert_holds(slab, "k1", content("k1", SEGMENT // 4 + PAGE))
    store(slab, "k3", content("k3", SEGMENT // 3))
    assert_holds(slab, "k3", content("k3", SEGMENT // 3))


def test_a_freed_slot_is_not_written_while_somebody_reads_it(slab: Slab) -> None:
    old = content("a", 3 << 20)
    store(slab, "a", old)
    inside, goes_on = threading.Event(), threading.Event()
    get, outcomes = asking("a", old), []

    def wait() -> None:
        if threading.current_thread() is reader:
            inside.set()
            goes_on.wait(PATIENCE)

    reader = threading.Thread(target=lambda: outcomes.extend(slab.get([get])))
    with patched("preadv", wait):
        reader.start()
        assert inside.wait(PATIENCE)
        slab.delete(["a"])
        assert slab.flush() == ""
        assert slab.n_bytes == (3 << 20) + PAGE, "it is being read"
        for i in range(20):
            store(slab, f"k{i}", content("k", 1 << 20))
        goes_on.set()
        reader.join(PATIENCE)
    assert outcomes[0].ok and filled(get) == old
    slab.delete(list(slab.keys()))
    assert_freed(slab)


def test_a_slot_is_not_reused_before_the_removal_is_committed(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(slab, "a", content("a", 1 << 20), durable=True)
    monkeypatch.setattr(slab._rows, "_write", broken_write)
    slab.delete(["a"])
    assert slab.size("a") is None
    assert "index cannot be written" in slab.flush()
    assert slab.n_bytes == (1 << 20) + PAGE == slab.stats()["leaving"]
    assert "index cannot be written" in put_one(slab, "b", content("b", 10), durable=True).why
    assert list(slab.keys()) == []
    assert put_one(slab, "c", content("c", 10)).ok, "may be lost by a crash, may be kept"
    monkeypatch.undo()
    assert slab.flush() == ""
    assert list(slab.keys()) == ["c"] and slab.n_bytes == 2 * PAGE


def broken_write(final: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_a_durable_put_that_fails_leaves_the_old_value(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(slab, "a", content("a", 5000), durable=True)
    with monkeypatch.context() as patch:
        patch.setattr(slab._rows, "_write", broken_write)
        puts = [Put("a", [memoryview(content("a", 9000, v))]) for v in (1, 2)]
        assert [o.state for o in slab.put(puts, durable=True)] == ["failed", "failed"]
        assert_holds(slab, "a", content("a", 5000))
    slab.check_integrity()
    assert slab.n_bytes == 3 * PAGE
    again = reopened(slab)
    assert_holds(again, "a", content("a", 5000))
    again.close()


def test_a_durable_put_with_too_little_time(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    store(slab, "a", content("a", 5000), durable=True)
    inner, goes_on = slab._rows._write, threading.Event()

    def wait(final: Any) -> None:
        goes_on.wait(PATIENCE)
        inner(final)

    monkeypatch.setattr(slab._rows, "_write", wait)
    data = content("a", 9000, 1)
    outcome = put_one(slab, "a", data, durable=True, deadline=time.monotonic() + 0.1)
    assert outcome.state == "late"
    assert_holds(slab, "a", content("a", 5000))
    goes_on.set()
    slab.check_integrity()
    assert_holds(slab, "a", content("a", 5000))
    assert slab.n_bytes == 3 * PAGE


@pytest.mark.parametrize("what", ["durable put", "delete"])
def test_what_is_durable_has_waited_for_the_disk(
    slab: Slab, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store(slab, "a", content("a", 5000))
    assert slab.flush() == ""
    steps: list[str] = []
    sync, write = os.fdatasync, slab._rows._write

    def synced(file: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    def written(final: Any) -> None:
        steps.append("commit")
        write(final)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(slab._rows, "_write", written)
    if what == "delete":
        slab.delete(["a"])
        slab.flush()
        assert steps == ["commit", "slab.sqlite-wal"]
    else:
        store(slab, "b", content("b", 5000), durable=True)
        assert steps == ["seg-000001.slab", "commit", "slab.sqlite-wal"]


def test_many_durable_puts_share_commits(slab: Slab) -> None:
    commits: list[int] = []
    inner = slab._rows._write

    def count(final: Any) -> None:
        commits.append(len(final))
        inner(final)

    slab._rows._write = count  # type: ignore[method-assign]
    puts = [Put(f"k{i}", [memoryview(content(f"k{i}", 100))]) for i in range(100)]
    assert all(outcome.ok for outcome in slab.put(puts, durable=True))
    assert sum(commits) == 100 and len(commits) < 10


def test_a_read_error_loses_the_value_and_nothing_else(slab: Slab) -> None:
    store(slab, "a", content("a", 5000))
    store(slab, "b", content("b", 5000))
    with patched("preadv", broken(errno.EIO)):
        (outcome,) = slab.get([asking("a", content("a", 5000))])
    assert outcome.state == "failed" and os.strerror(errno.EIO) in outcome.why
    assert list(slab.keys()) == ["b"]
    assert_holds(slab, "b", content("b", 5000))
    slab.flush()
    assert slab.n_bytes == 3 * PAGE


def test_an_error_that_may_pass_keeps_the_value(slab: Slab) -> None:
    store(slab, "a", content("a", 5000))
    with patched("preadv", broken(errno.ENOMEM)):
        assert slab.get([asking("a", content("a", 5000))])[0].state == "failed"
    assert_holds(slab, "a", content("a", 5000))


@pytest.mark.parametrize(("code", "state"), [(errno.ENOSPC, "full"), (errno.EIO, "failed")])
@pytest.mark.parametrize("call", ["pwritev", "posix_fallocate"])
def test_a_disk_that_refuses_writes(slab: Slab, call: str, code: int, state: str) -> None:
    store(slab, "a", content("a", 5000))
    with patched(call, broken(code)):
        for n in (2000, SEGMENT):
            outcome = put_one(slab, "a", content("a", n, 1))
            if call == "pwritev" or n == SEGMENT:
                assert outcome.state == state, outcome
                assert_holds(slab, "a", content("a", 5000))
            else:
                assert outcome.ok
                store(slab, "a", content("a", 5000))
    slab.flush()
    assert slab.n_bytes == 3 * PAGE
    assert len(list(slab.directory.glob("seg-*"))) == 1 if call == "posix_fallocate" else 2


def test_a_nearly_full_disk_gets_smaller_segments(slab: Slab) -> None:
    inner = os.posix_fallocate

    def small_only(file: int, start: int, n: int) -> None:
        if n > 1 << 20:
            raise OSError(errno.ENOSPC, "no space")
        inner(file, start, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", small_only)
        store(slab, "a", content("a", 5000))
        assert slab.stats()["files"] == 1 << 20
        assert put_one(slab, "b", content("b", 2 << 20)).state == "full"


def test_a_value_that_is_another_one_is_missing(slab: Slab) -> None:
    for key in ("a", "b", "c"):
        store(slab, key, content(key, 5000), durable=True)
    (path_a, at_a, _), (path_b, at_b, _) = place(slab, "a"), place(slab, "b")
    slab.close()
    page = path_b.read_bytes()[at_b : at_b + 2 * PAGE]
    overwrite(path_a, at_a, page)
    again = Slab(slab.directory, 32 << 20, segment=SEGMENT)
    (outcome,) = again.get([Get("a", 0, [aligned(5000)])])
    assert outcome.state == "missing" and "it is 'b'" in outcome.why
    assert sorted(again.keys()) == ["b", "c"]
    (outcome,) = again.get([Get("b", 4096, [aligned(10)])])
    assert outcome.ok
    again.check_integrity()
    again.close()
    Slab(slab.directory, 32 << 20, segment=SEGMENT).close()


@pytest.mark.parametrize("byte", [0, 8, 12, 17, 30, 38, 45, 48, 50])
@pytest.mark.parametrize("offset", [0, 4500])
def test_a_torn_header_is_found_at_the_first_read(slab: Slab, byte: int, offset: int) -> None:
    store(slab, "key", content("key", 5000))
    path, at, _ = place(slab, "key")
    slab.close()
    before = path.read_bytes()[at + byte]
    overwrite(path, at + byte, bytes([before ^ 4]))
    again = Slab(slab.directory, 32 << 20, segment=SEGMENT)
    (outcome,) = again.get([Get("key", offset, [aligned(100)])])
    assert outcome.state == "missing", outcome
    assert list(again.keys()) == []
    again.check_integrity()
    again.close()


def test_verify(slab: Slab) -> None:
    data = content("a", 2_500_000)
    store(slab, "a", data)
    store(slab, "none", b"")
    assert slab.verify("a").ok and slab.verify("none").ok
    assert slab.verify("nobody").state == "missing"
    path, at, _ = place(slab, "a")
    overwrite(path, at + PAGE + 2_400_000, b"\x00\x01")
    assert slab.verify("a").state == "wrong"
    overwrite(path, at, b"nonsense")
    assert "there is no header" in slab.verify("a").why
    with patched("preadv", broken(errno.EIO)):
        assert slab.verify("a").state == "failed"


def test_an_empty_value(slab: Slab) -> None:
    assert slab.put([Put("a", [])])[0].ok
    assert slab.size("a") == 0 and slab.n_bytes == PAGE
    assert slab.get([Get("a", 0, [])])[0].ok
    again = reopened(slab)
    assert again.get([Get("a", 0, [])])[0].ok
    again.close()


def change_rows(slab: Slab, *statements: str) -> Slab:
    slab.close()
    with contextlib.closing(sqlite3.connect(slab.directory / "slab.sqlite")) as db, db:
        for statement in statements:
            db.execute(statement)
    return Slab(slab.directory, 32 << 20, segment=SEGMENT)


def test_rows_that_cannot_be_true_are_dropped(slab: Slab) -> None:
    for i in range(8):
        store(slab, f"k{i}", content(f"k{i}", 5000))
    again = change_rows(
        slab,
        "UPDATE slots SET page = page + 1 WHERE key = 'k1'",  # into k2, which is newer
        "UPDATE slots SET page = page - 1 WHERE key = 'k6'",  # into k5, which is older
        "UPDATE slots SET page = 1023 WHERE key = 'k0'",  # over the end of its file
        "UPDATE slots SET segment = 77 WHERE key = 'k3'",
        "INSERT INTO slots VALUES('k8', 1, 8, 5000, 0)",  # begins in k2, is older
        "INSERT INTO slots VALUES('k9', 1, -4, 100, 50)",
    )
    assert sorted(again.keys()) == ["k2", "k4", "k6", "k7"]
    assert again.stats()["dropped"] == 6
    again.check_integrity()
    for key in ("k2", "k4", "k7"):
        assert_holds(again, key, content(key, 5000))
    assert again.get([Get("k6", 0, [aligned(1)])])[0].state == "missing"  # its header is not there
    last = reopened(again)
    assert sorted(last.keys()) == ["k2", "k4", "k7"] and last.stats()["dropped"] == 0
    last.close()


def test_a_file_that_was_cut(slab: Slab) -> None:
    store(slab, "a", content("a", 5000))
    store(slab, "b", content("b", 1 << 20))
    slab.close()
    os.truncate(slab.directory / "seg-000001.slab", 3 * PAGE + 7)
    again = Slab(slab.directory, 32 << 20, segment=SEGMENT)
    assert list(again.keys()) == ["a"]
    assert_holds(again, "a", content("a", 5000))
    again.check_integrity()
    again.close()


def test_files_without_rows_are_removed_on_opening(slab: Slab) -> None:
    store(slab, "a", content("a", 5000))
    again = change_rows(slab, "DELETE FROM slots")
    assert list(again.directory.glob("seg-*")) == []
    store(again, "b", content("b", 5000))
    assert [path.name for path in again.directory.glob("seg-*")] == ["seg-000002.slab"]
    again.check_integrity()
    again.close()


def test_one_process_at_a_time(slab: Slab) -> None:
    with pytest.raises(InvalidArgument, match=f"open in process {os.getpid()}") as caught:
        Slab(slab.directory, 1 << 20)
    assert caught.value.hint
    store(slab, "a", b"123")


def test_an_index_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "slab.sqlite").write_bytes(b"certainly not SQLite" * 500)
    with pytest.raises(CorruptChunk):
        Slab(tmp_path, 1 << 20)
    (tmp_path / "slab.sqlite").unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "slab.sqlite")) as db, db:
        db.execute("CREATE TABLE t(x)")
    with pytest.raises(CorruptChunk, match="some other"):
        Slab(tmp_path, 1 << 20)
    (tmp_path / "slab.sqlite").unlink()
    Slab(tmp_path, 1 << 20).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "slab.sqlite")) as db, db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(FormatTooNew):
        Slab(tmp_path, 1 << 20)
    with contextlib.closing(sqlite3.connect(tmp_path / "slab.sqlite")) as db, db:
        db.execute("PRAGMA user_version = 1")
    Slab(tmp_path, 1 << 20).close()


@pytest.mark.parametrize(("capacity", "segment"), [(0, 1 << 20), (100, 1 << 20), (1 << 20, 1)])
def test_capacity_must_be_something(tmp_path: Path, capacity: int, segment: int) -> None:
    with pytest.raises(InvalidArgument):
        Slab(tmp_path, capacity, segment=segment)


def test_after_closing(tmp_path: Path) -> None:
    slab = Slab(tmp_path, 1 << 20)
    store(slab, "a", b"123")
    slab.close()
    assert put_one(slab, "b", b"123").state == "failed"
    assert slab.get([Get("a", 0, [aligned(3)])])[0].state == "missing"
    slab.delete(["a"])
    assert slab.flush() == ""


def test_memory_that_cannot_be_written(slab: Slab) -> None:
    store(slab, "a", content("a", 5000))
    (outcome,) = slab.get([Get("a", 0, [memoryview(bytes(5000))])])
    assert outcome.state == "failed"
    assert_holds(slab, "a", content("a", 5000))


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_covers_the_range_once_and_only_pages_go_straight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    position = int(rng.integers(0, 3 * PAGE))
    if seed % 3 == 0:
        position -= position % PAGE
    file = rng.integers(0, 255, 60 * PAGE, dtype=np.uint8)
    sizes = rng.choice([1, 7, 64, 4000, 4096, 4097, 8192, 20_000], rng.integers(1, 6))
    shifts = rng.choice([0, 0, 0, 1, 64, (position % PAGE)], len(sizes))
    arrays = [flat(aligned(int(n), int(s))) for n, s in zip(sizes, shifts, strict=True)]
    elements, copies, n = plan(position, arrays)
    memory, at, where = np.zeros(n, np.uint8), 0, position // PAGE * PAGE
    for element in elements:
        if isinstance(element, int):
            assert element % PAGE == 0
            memory[at : at + element] = file[where : where + element]
            at, where = at + element, where + element
        else:
            assert element.ctypes.data % PAGE == 0 and element.size % PAGE == 0
            element[:] = file[where : where + element.size]
            where += element.size
    assert at == n and where == -(-(position + sizes.sum()) // PAGE) * PAGE
    for start, part in copies:
        part[:] = memory[start : start + part.size]
    assert np.array_equal(np.concatenate(arrays), file[position : position + sizes.sum()])


@pytest.mark.parametrize(("position", "sizes"), [(0, [100, 50]), (37, [20, 9000, 1]), (5, [8187])])
def test_pieces_end_at_pages(position: int, sizes: list[int]) -> None:
    found = list(pieces(position, runs([aligned(n) for n in sizes]), 2 * PAGE))
    where = position
    for start, parts in found:
        assert start == where and parts
        where += sum(map(len, parts))
    assert where == position + sum(sizes)
    assert all(start % (2 * PAGE) == 0 for start, _ in found[1:])

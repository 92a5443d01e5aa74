"""A device under an index that hangs: whoever waits for it is told in time, and nothing is lost by it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.chunk import file, rebuild
from kvweave.chunk.file import IndexFile
from kvweave.chunk.table import Table
from kvweave.errors import InvalidArgument, StoreError

WAIT = 0.2


class Device:
    """What of it hangs, until it is well again."""

    def __init__(self) -> None:
        self.well = threading.Event()
        self.asked = threading.Semaphore(0)

    def hang(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hanging(*args: Any, **words: Any) -> Any:
            self.asked.release()
            assert self.well.wait(20)
            return call(*args, **words)

        return hanging


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.well.set()


def refused(call: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(StoreError) as told:
        call()
    assert told.value.hint and time.monotonic() - begun < WAIT + 5  # a machine may be busy


def add(table: Table, n: int) -> None:
    with table.transaction():
        id, _ = table.add([n, 2, 3], digest=bytes([n]) * 16)
        table.bind(f"c/{n}", id)


def test_a_sync_that_hangs_is_refused_and_later_ones_write_all_anew(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    with Table(path) as table:
        add(table, 1)
        with monkeypatch.context() as patched:
            patched.setattr(file, "PATIENCE", WAIT)
            patched.setattr(file, "fsync", device.hang(rebuild.fsync))
            refused(table.sync)
            add(table, 2)  # what needs no device goes on
            assert table.resolve("c/1").n_tokens == 3
            refused(table.sync)
        device.well.set()
        deadline = time.monotonic() + 10
        while table._rows._file._flushing.locked() and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.01)
        rewritten = []
        real = IndexFile._rewrite
        monkeypatch.setattr(
            IndexFile, "_rewrite", lambda self, db: rewritten.append(1) or real(self)
        )
        table.sync()
        assert rewritten, "what the device took while nobody looked is not believed"
    with Table(path) as table:
        assert table.names() == ["c/1", "c/2"]


def test_threads_may_sync_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Table(tmp_path / "index.sqlite") as table:
        real = rebuild.fsync
        monkeypatch.setattr(file, "fsync", lambda path: (time.sleep(0.05), real(path)))
        failed: list[BaseException] = []

        def put(n: int) -> None:
            try:
                add(table, n)
                table.sync()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=put, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and len(table.names()) == 4


def well_again(device: Device, table: Table) -> None:
    """What hung goes on; then the same table is as good as before."""
    device.well.set()
    deadline = time.monotonic() + 10
    while True:
        try:
            table.names()
            return
        except StoreError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_checkpoint_that_hangs_loses_nothing(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    monkeypatch.setattr(file, "CHECKPOINT_BYTES", 0)
    with Table(path) as table:
        with monkeypatch.context() as patched:
            patched.setattr(file, "PATIENCE", WAIT)
            patched.setattr(IndexFile, "_checkpoint", device.hang(IndexFile._checkpoint))
            while len(table.names()) < 40:
                try:
                    add(table, len(table.names()) + 1)
                except StoreError as error:  # every so many writes
                    assert "nobody knows" in error.hint
                    break
            refused(lambda: add(table, 99))
            refused(lambda: table.resolve("c/40"))
        well_again(device, table)
        made = table.names()
        assert "c/99" not in made
        add(table, 100)
        table.check_integrity()
    with Table(path) as again:
        assert again.names() == sorted([*made, "c/100"]) and "c/31" in again.names()


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_of_a_commit_that_hangs_nobody_knows(
    when: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said so, and when the device is well the same table knows what came of it."""
    path, freed = tmp_path / "index.sqlite", []
    with Table(path) as table:
        table.on_free = freed.append
        for n in (1, 2, 3):
            add(table, n)
        one, two = table.resolve("c/1").id, table.resolve("c/2")
        table.hold(two.id, "talk")
        table.unbind("c/2")

        def change() -> None:
            with table.transaction():
                table.unbind("c/1")
                table.release(two.id, "talk")
                table.bind("other", table.resolve("c/3").id)
                add(table, 4)

        real = IndexFile._commit

        def commit(self: IndexFile, db: sqlite3.Connection) -> None:
            if when != "after":
                device.hang(lambda: None)()
            if when == "never":
                raise sqlite3.OperationalError("disk I/O error")
            real(self, db)
            if when == "after":
                device.hang(lambda: None)()

        with monkeypatch.context() as patched:
            patched.setattr(file, "PATIENCE", WAIT)
            patched.setattr(IndexFile, "_commit", commit)
            with pytest.raises(StoreError) as told:
                change()
            assert "nobody knows" in told.value.hint
            for call in (change, lambda: table.resolve("c/3"), table.check_integrity):
                refused(call)
        assert not freed
        well_again(device, table)
        if when == "never":  # and did not: KV that chunk 4 may have got is let go of
            assert table.resolve("c/1").id == one and freed == [4]
            assert table.names() == ["c/1", "c/3"]
            return
        # It was given to the device, and came to be.
        assert table.lookup("c/1") is None and table.resolve("other").names == ("c/3", "other")
        assert set(freed) == {one, two.id} and table.resolve("c/4").n_tokens == 3
        table.release(two.id, "talk")  # by a context that thinks it has it
        add(table, 5)
        table.check_integrity()
    with Table(path) as again:
        assert again.names() == ["c/3", "c/4", "c/5", "other"]


def test_what_hangs_before_its_commit_is_taken_back(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large index every statement may wait for the device."""
    path = tmp_path / "index.sqlite"
    monkeypatch.setattr(file, "WARM_PAGES", 0)
    with Table(path) as table:
        add(table, 1)
        with monkeypatch.context() as patched:
            patched.setattr(file, "PATIENCE", WAIT)
            patched.setattr(file, "set_meta", device.hang(rebuild.set_meta))
            refused(lambda: add(table, 2))
            refused(lambda: add(table, 3))
        well_again(device, table)
        assert table.names() == ["c/1"]
        add(table, 2)
        table.check_integrity()
    with Table(path) as again:
        assert again.names() == ["c/1", "c/2"]


def test_closing_behind_what_hangs_lets_go_when_that_ends(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not earlier: what hangs may still write."""
    path = tmp_path / "index.sqlite"
    table = Table(path)
    add(table, 1)
    with monkeypatch.context() as patched:
        patched.setattr(file, "PATIENCE", WAIT)
        patched.setattr(IndexFile, "_commit", device.hang(IndexFile._commit))
        refused(lambda: add(table, 2))
        refused(table.close)
        table.close()  # it is closed
        with pytest.raises(InvalidArgument, match="is open in process"):
            Table(path)
    device.well.set()
    with opened(path) as again:
        assert again.names() == ["c/1", "c/2"]


def opened(path: Path) -> Table:
    """Open it when the late call has let go of it."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return Table(path)
        except (StoreError, InvalidArgument):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("what", ["_take", "_open", "_close_sealed"])
def test_opening_and_closing_end(
    what: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    with Table(path) as table:
        add(table, 1)
    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, what, device.hang(getattr(IndexFile, what)))
        if what == "_close_sealed":
            table = Table(path)
            add(table, 2)
        patched.setattr(file, "PATIENCE", 5 * WAIT)  # of which some that does not hang takes a part
        refused(table.close if what == "_close_sealed" else lambda: Table(path))
    device.well.set()
    with opened(path) as again:
        assert "c/1" in again.names()
        assert ("c/2" in again.names()) == (what == "_close_sealed")

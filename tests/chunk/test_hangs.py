"""A device under an index that hangs: whoever waits for it is told in time, and nothing is lost by it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
        while table._rows._file._syncing.locked() and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.01)
        rewritten = []
        real = IndexFile._rewrite
        monkeypatch.setattr(IndexFile, "_rewrite", lambda self: rewritten.append(1) or real(self))
        table.sync()
        assert rewritten, "what the device took while nobody looked is not believed"
    with Table(path) as table:
        assert table.names() == ["c/1", "c/2"]


def test_a_checkpoint_that_hangs_takes_the_connection_with_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.sqlite"
    monkeypatch.setattr(file, "CHECKPOINT_BYTES", 0)
    table = Table(path)
    add(table, 1)  # its commit began the log
    with monkeypatch.context() as patched:
        patched.setattr(file, "PATIENCE", WAIT)
        alone = IndexFile._alone
        patched.setattr(IndexFile, "_alone", lambda self, call: alone(self, device.hang(call)))
        for n in range(2, 33):  # every so many writes
            add(table, n)
    refused(lambda: add(table, 40))
    refused(lambda: table.resolve("c/40"))
    refused(table.close)
    device.well.set()
    with Table(path) as again:  # what was committed is there, and the lock is free
        assert len(again.names()) == 32


def test_a_commit_that_begins_a_log_ends(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite syncs the head of a log in the commit that begins one."""
    path = tmp_path / "index.sqlite"
    table = Table(path)
    with monkeypatch.context() as patched:
        patched.setattr(file, "PATIENCE", WAIT)
        alone = IndexFile._alone
        patched.setattr(IndexFile, "_alone", lambda self, call: alone(self, device.hang(call)))
        refused(lambda: add(table, 1))
    refused(lambda: table.resolve("c/1"))
    with suppress(StoreError):
        table.close()
    device.well.set()
    with Table(path) as again:  # it was not confirmed: it may be there or not
        assert again.names() in ([], ["c/1"])


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
    deadline = time.monotonic() + 10
    while True:
        try:
            with Table(path) as again:
                assert "c/1" in again.names()
                assert ("c/2" in again.names()) == (what == "_close_sealed")
                return
        except (StoreError, InvalidArgument, sqlite3.Error):  # the late call has it still
            assert time.monotonic() < deadline
            time.sleep(0.05)

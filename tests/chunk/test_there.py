"""What cannot be looked at is not gone."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from kvweave.chunk import log as logs
from kvweave.chunk.background import within
from kvweave.chunk.rebuild import there
from kvweave.chunk.salvage import salvage
from kvweave.chunk.table import Table
from kvweave.errors import StoreError

SOURCE = Path(__file__).parents[2] / "src" / "kvweave"
ANY_NAME = {
    "guard.py": 1,
    "rebuild.py": 1,
}  # a name that is free; a pipe that is written to as it is


def test_only_what_is_known_to_be_gone_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert there(file) and there(tmp_path)
    assert not there(tmp_path / "none") and not there(file / "in a file")

    def refused(*args: object, **options: object) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        with pytest.raises(OSError, match="Input/output"):
            there(file)


def test_nothing_of_a_home_asks_another_way() -> None:
    """`Path.exists` is False for what cannot be looked at, from Python 3.14 on."""
    for folder in ("chunk", "store"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            n = len(re.findall(r"\.exists[(,]", path.read_text()))
            assert n == ANY_NAME.get(path.name, 0), path


def test_a_salvage_that_ended_half_way_is_done_again_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between keeping the log aside and the new index: the log is no longer beside the old one."""
    path = tmp_path / "index.sqlite"
    pid = os.fork()
    if pid == 0:  # dies with all of it in the log
        table = Table(path)
        for n in range(40):
            table.bind(f"n/{n}", table.add([n, 1, 2], digest=n.to_bytes(16, "little"))[0])
        table.sync()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "index.sqlite-wal").stat().st_size > 10_000

    def interrupted(new: Path, path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvweave.chunk.salvage.put_in_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            salvage(path)
    assert not (tmp_path / "index.sqlite-wal").exists()
    report = salvage(path)
    assert (report.n_chunks, report.n_names) == (40, 40) and not report.lost_chunks
    with Table(path) as table:
        assert len(table) == 40


def killed(path: Path, *names: str) -> None:
    """Write an index, and die with all of that in its log."""
    path.parent.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        table = Table(path)
        for n, name in enumerate(names):
            table.bind(name, table.add([n, 1, 2], digest=(name * 16).encode())[0])
        table.sync()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR_READ])
def test_a_log_that_cannot_be_looked_at_now_is_put_into_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Too many open files, for a moment: whose the log is was not asked, and two indexes became one."""
    mine, other = tmp_path / "mine" / "index.sqlite", tmp_path / "other" / "index.sqlite"
    killed(mine, "a")
    with Table(mine):
        pass
    shutil.copytree(mine.parent, other.parent)
    killed(other, "b", "c", "d")
    with Table(mine) as table:
        table.bind("e", table.add([9], digest=bytes(16))[0])
    log = logs.log_of(mine)
    shutil.copy(logs.log_of(other), log)
    before, connect, n = log.read_bytes(), sqlite3.connect, 0

    class Refused:
        def __getattr__(self, name: str) -> object:
            return getattr(sqlite3, name)

        def connect(self, *args: object, **words: object) -> sqlite3.Connection:
            nonlocal n
            n += 1
            if n == 1:
                error = sqlite3.OperationalError("unable to open database file")
                error.sqlite_errorcode = code
                raise error
            return connect(*args, **words)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(logs, "sqlite3", Refused())
        with pytest.raises(StoreError) as caught:
            Table(mine)
        assert n and caught.value.hint
    assert log.read_bytes() == before
    with Table(mine) as table:
        assert sorted(table.names()) == ["a", "e"]
    assert before in [path.read_bytes() for path in mine.parent.glob("*damaged*")]


def test_what_comes_behind_a_ctrl_c_is_undone() -> None:
    """A notebook goes on: what nobody took (the lock of a directory) was kept for good."""
    made, begun = [], threading.Event()

    def call() -> str:
        begun.set()
        time.sleep(0.2)
        return "a lock"

    def stop() -> None:
        begun.wait()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=stop).start()
        with pytest.raises(KeyboardInterrupt):
            within(5.0, call, "it", made.append)
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(500):
        if made:
            break
        time.sleep(0.01)
    assert made == ["a lock"]

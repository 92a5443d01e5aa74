"""What cannot be looked at is not gone."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from kvweave.chunk.rebuild import there
from kvweave.chunk.salvage import salvage
from kvweave.chunk.table import Table

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

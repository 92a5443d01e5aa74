"""What a command writes is there whole, or what was there before still is: a disk may be full, a process killed.

python -m pytest tests/test_written_whole.py
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvweave.chunk.rebuild import write_json
from kvweave.cli.app import main
from kvweave.probe.trace import TraceHeader, TraceSteps
from kvweave.probe.trace import write as record
from kvweave.simulate import Shape, generate, write

SIMULATE = ["simulate", "generated", "--sessions", "2", "--sizes", "1GiB", "--plot"]


def reporting(tmp: Path, out: Path) -> int:
    trace = tmp / "a.kvt"
    if not trace.exists():
        mass = np.random.default_rng(0).random((4, 30, 30)).astype(np.float32)
        header = TraceHeader(4, ((0, 0), (0, 1), (1, 0), (1, 1)), 100)
        record(trace, header, [TraceSteps(0, np.arange(30, dtype=np.int32), mass, mass > 0.5)])
    return main(["probe", "report", str(trace), "-q", "--out", str(out)])


WRITERS: dict[str, Callable[[Path, Path], int]] = {
    "report.html": reporting,
    "report.pdf": reporting,
    "front.png": lambda tmp, out: main([*SIMULATE, str(out)]),
    "front.svg": lambda tmp, out: main([*SIMULATE, str(out)]),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.slow
def test_what_was_there_stays_where_there_is_no_room(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / name
    out.parent.mkdir()
    assert WRITERS[name](tmp_path, out) == 0
    before = out.read_bytes()
    assert len(before) > 4096
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert WRITERS[name](tmp_path, out) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr()
    assert "no space left" in told.err and out.name in told.err
    assert out.read_bytes() == before and list(out.parent.iterdir()) == [out]
    assert ("blocks hit" in told.out) == name.startswith("front"), "what was found is told"


def test_a_trace_is_written_whole(tmp_path: Path) -> None:
    out, trace = tmp_path / "trace.jsonl", generate(Shape(4), 0)
    write(trace, out)
    before = out.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write(trace, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_a_figure_of_no_known_kind_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "x.foo"]) == 1
    told = capsys.readouterr()
    assert "x.foo" not in told.out and ".foo" in told.err and "svg" in told.err


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link.json", tmp_path / "there" / "file.json"
    file.write_text("0")
    link.symlink_to(file)
    write_json(link, [1])
    assert link.is_symlink() and file.read_text() == "[1]"

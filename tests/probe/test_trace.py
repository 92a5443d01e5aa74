"""The file: what is written is read, by us and by ten lines of numpy; damage is told."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from probe import synthetic

from kvweave.errors import FormatTooNew, InvalidArgument
from kvweave.keep.tokens.access import Rule
from kvweave.probe.trace import ONE, PageTrace, TraceHeader, TraceWriter, joined, write


def some(seed: int = 0, n: int = 21) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mass = rng.random((4, 9, n)) * (rng.random((4, 9, n)) < 0.4)
    return mass / np.maximum(mass.sum(1, keepdims=True), 1)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = synthetic.steps(some())
    trace = synthetic.trace(tmp_path / "a.kvt", wanted, size=8, text="so well", milestones=[3])
    assert trace.complete and (trace.n_steps, trace.n_pages) == (21, 9)
    assert trace.notes == {"text": "so well", "milestones": [3]}
    found = trace.whole()
    assert np.abs(found.mass - wanted.mass).max() <= 0.5 / ONE + 1e-7
    assert (found.access == wanted.access).all() and (found.tokens == wanted.tokens).all()
    assert [block.first for block in trace] == [0, 8, 16]
    assert trace.header.rule == Rule("cover", 0.95)


def test_numpy_reads_it_in_ten_lines(tmp_path: Path) -> None:
    wanted = synthetic.steps(some(1))
    path = synthetic.trace(tmp_path / "a.kvt", wanted, size=8).path
    data, found = path.read_bytes(), []
    n = struct.unpack_from("<I", data, 4)[0]
    header, at = json.loads(data[8 : 8 + n]), 8 + n
    while at < len(data):
        kind, size = data[at : at + 1], struct.unpack_from("<I", data, at + 1)[0]
        block, at = zstandard.decompress(data[at + 9 : at + 9 + size]), at + 9 + size
        if kind == b"S":
            _, steps, pages = struct.unpack_from("<III", block)
            mass = np.frombuffer(block, "<u2", len(header["heads"]) * pages * steps, 12 + 4 * steps)
            found.append(mass.reshape(-1, pages, steps) / 65535)
    assert np.allclose(np.concatenate(found, -1), wanted.mass, atol=1e-5)


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(some()), size=8).path
    whole = path.read_bytes()
    seen = set()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        try:
            trace = PageTrace(path)
        except InvalidArgument:
            assert cut < 400, "only a cut in the header is refused"
            continue
        seen.add(trace.n_steps)
        assert sum(block.n for block in trace) == trace.n_steps
        assert not trace.complete or trace.n_steps in (0, 8, 16, 21)
    assert seen == {0, 8, 16, 21}


def test_each_flipped_byte_is_told_or_changes_nothing_that_is_read(tmp_path: Path) -> None:
    path = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(some()), size=8).path
    whole, wanted = path.read_bytes(), PageTrace(path).whole()
    start = 8 + struct.unpack_from("<I", whole, 4)[0]
    for at in range(start, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            trace = PageTrace(path)
            found = trace.whole()
        except InvalidArgument:
            continue
        upto = found.n
        assert upto < wanted.n or not trace.complete or trace.notes == {}
        assert (found.mass == wanted.mass[:, : found.mass.shape[1], :upto]).all()


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kvt"
    with pytest.raises(InvalidArgument, match="no file"):
        PageTrace(path)
    path.write_bytes(b"KVT9" + bytes(20))
    with pytest.raises(FormatTooNew):
        PageTrace(path)
    for content in (b"", b"KV", b"hello there", b"KVT1\xff\xff\xff\xff{}"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument):
            PageTrace(path)


def test_pages_come_as_they_are_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.kvt", TraceHeader(4, ((0, 0),), 4)) as writer:
        writer.steps(synthetic.steps(np.ones((1, 2, 3)) / 2))
        writer.steps(synthetic.steps(np.ones((1, 5, 2)) / 5, first=3))
    whole = PageTrace(tmp_path / "a.kvt").whole()
    assert whole.mass.shape == (1, 5, 5) and (whole.mass[0, 2:, :3] == 0).all()
    assert joined([], 2, 3).mass.shape == (2, 3, 0)


def test_what_fails_leaves_an_older_trace_as_it_was(tmp_path: Path) -> None:
    """Where there is none, what was written up to there stays."""
    header, step = TraceHeader(4, ((0, 0),), 4), synthetic.steps(np.ones((1, 2, 3)) / 2)
    for name in ("a.kvt", "b.kvt"):
        before = write(tmp_path / "a.kvt", header, [step, step]).read_bytes()
        with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / name, header) as writer:
            writer.steps(step)
            raise KeyboardInterrupt
        assert (tmp_path / "a.kvt").read_bytes() == before
    assert PageTrace(tmp_path / "b.kvt").n_steps == 3
    writer = TraceWriter(tmp_path / "a.kvt", header)
    assert (tmp_path / "a.kvt").read_bytes() == before
    writer.steps(step)
    writer.discard()
    write(tmp_path / "b.kvt", header, [step, step])
    assert (tmp_path / "b.kvt").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.kvt", "b.kvt"]


GOLDEN = Path(__file__).parent / "golden.kvt"


def test_files_of_before_are_read() -> None:
    """Of version 1; a new version has to read it, and gets a file of its own."""
    wanted = synthetic.steps(some(7, 19))
    found = PageTrace(GOLDEN)
    assert found.notes == {"text": "golden"} and found.header.page == 4
    assert (found.whole().access == wanted.access).all()
    assert np.abs(found.whole().mass - wanted.mass).max() < 1e-5

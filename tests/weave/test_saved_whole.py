"""What an engine reads at its start is written whole, or not at all: a disk may be full, a process killed.

python -m pytest tests/weave/test_saved_whole.py
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from weaving import flat

from kvweave.errors import CorruptChunk, NoSpace
from kvweave.weave.audit import AuditCell, Auditor
from kvweave.weave.calibration import Calibration
from kvweave.weave.learned import write_learned

CELL = AuditCell("none", 0.0, False, "raw", "raw", "forget")


@contextmanager
def full() -> Iterator[None]:
    """Let no file of this process be longer than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["calibration", "audits"])
def test_what_was_there_stays_where_there_is_no_room(tmp_path: Path, what: str) -> None:
    file = tmp_path / "saved.json"
    calibration = flat(s25=0.1)
    auditor = Auditor()
    auditor.saw(CELL, 0.1, None)

    def save() -> Any:
        if what == "calibration":
            return calibration.save(file)
        return write_learned(file, auditor.told(calibration.fingerprint))

    def read() -> object:
        if what == "calibration":
            return Calibration.load(file)
        return [report.n_audits for report in Auditor.load(file, calibration.fingerprint).report()]

    save()
    before = read()
    with full(), pytest.raises((NoSpace, OSError)):
        save()
    assert read() == before and os.listdir(tmp_path) == [file.name]
    file.unlink()
    with full(), pytest.raises((NoSpace, OSError)):
        save()
    assert os.listdir(tmp_path) == []


def test_a_calibration_goes_into_what_is_no_file_too(tmp_path: Path) -> None:
    flat(s25=0.1).save(Path("/dev/null"))
    assert not Path("/dev/null").is_file()


def test_a_calibration_that_is_none_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(CorruptChunk) as failed:
        Calibration.load(tmp_path / "calibration.json")
    assert "calibrate" in failed.value.hint

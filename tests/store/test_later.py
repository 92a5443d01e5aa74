"""What a later kvweave wrote is refused, and stays as it is: also by `kvweave fsck --repair`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import tiny
from weaving import text

from kvweave import Engine
from kvweave.cli.app import main
from kvweave.errors import FormatTooNew


def put(home: Path, *tiers: str, seed: int = 0) -> None:
    with Engine(tiny(), home=home, repair="none", tiers=tiers or None) as engine:
        engine.put("n", text(20, seed))
        engine.place("n", "disk")


def bytes_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path): path.read_bytes() for path in files}


def test_a_directory_whose_owner_a_later_one_wrote_is_nobody_elses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, owner = tmp_path / "there", tmp_path / "there" / "owner.json"
    put(tmp_path / "theirs", spec := f"disk path={there}")
    put(tmp_path / "mine", seed=7)
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"format": 2}))
    before = bytes_of(there) | bytes_of(tmp_path / "mine")
    with pytest.raises(FormatTooNew):
        put(tmp_path / "theirs", spec)
    assert main(["fsck", str(tmp_path / "mine"), "--tier", spec]) == 1
    assert "upgrade kvweave" in capsys.readouterr().out
    command = ["fsck", str(tmp_path / "mine"), "--tier", spec, "--repair", "--discard-strays"]
    assert main(command) == 1
    assert before == bytes_of(there) | bytes_of(tmp_path / "mine")
    assert main(["fsck", str(tmp_path / "mine"), "--tier", f"{spec} shared=yes", "--repair"]) == 1
    assert before == bytes_of(there) | bytes_of(tmp_path / "mine")


def test_a_model_that_a_later_one_told_more_of_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = tmp_path / "home", tmp_path / "home" / "model.json"
    put(home)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantised": "fp4"}))
    before = bytes_of(home)
    with pytest.raises(FormatTooNew, match="quantised"):
        put(home)
    for more in ([], ["--repair", "--discard-strays"]):
        assert main(["fsck", str(home), *more]) == 1
        assert "upgrade kvweave" in capsys.readouterr().err
    assert before == bytes_of(home)

"""The bench of splices: what it edits is what it says, full repair loses nothing, and intervals hold the mean."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from benches import on_path


@pytest.fixture(scope="module")
def splices() -> ModuleType:
    with on_path():
        import splices

        return splices


@pytest.mark.usefixtures("looks")
def test_what_is_lost_is_told_by_splice_and_method(
    splices: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    out = tmp_path / "splices.json"
    monkeypatch.setattr(splices, "METHODS", (("none", 0.0), ("auto", 0.3), ("full", 1.0)))
    monkeypatch.setattr(splices, "CHUNK", 24)
    splices.main(["--models", "llama-prose", "--sizes", "192", "--n", "2", "--json", "--out", str(out)])  # fmt: skip
    found = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == found
    rows = {(r["splice"], r["method"]): r for r in found["rows"]}
    assert len(rows) == 9 and found["machine"]["commit"]
    for how in splices.SPLICES:
        none, some, full = (rows[how, each] for each in ("none", "auto", "full"))
        assert full["kl"][0] < 1e-9 < none["kl"][0], "nothing is lost where all is repaired"
        assert none["rows"] == 0 < some["rows"] < full["rows"]
        assert none["left"] == [1.0, 1.0, 1.0] and full["left"][0] < 1e-3
        for row in (none, some):
            assert row["n"] == 2 and row["kl"][1] <= row["kl"][0] <= row["kl"][2]


def test_a_splice_that_is_another_one_is_refused(
    splices: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splices, "splice", lambda context, how, other, n: context.drop(1))
    with pytest.raises(AssertionError, match="another text"):
        splices.main(["--models", "llama-prose", "--sizes", "384", "--n", "1", "--out", str(tmp_path / "x")])  # fmt: skip

"""The commands, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.cli import main, probe_arguments
from kvweave.probe import PageTrace
from kvweave.probe.classes import CLASSES
from kvweave.probe.findings import find
from kvweave.probe.report import page

PROMPT = "Anna's river is cold . so well Omar's metal is hot . what about Anna's river"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("probe")
    path = home / "a.kvt"
    args = [
        "--out",
        str(path),
        "--max-tokens",
        "40",
        "--page",
        "2",
        "--ignore-eos",
        "--label",
        "river",
    ]
    assert main(["probe", "record", PROMPT, *args, "--home", str(home / "h"), "-q"]) == 0
    return path


def test_record(recorded: Path) -> None:
    trace = PageTrace(recorded)
    assert (
        trace.n_steps == 39 and trace.notes["label"] == "river" and trace.notes["prompt"] == PROMPT
    )
    assert trace.header.page == 2 and "weights" in trace.header.model


def test_report(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    assert main(["probe", "report", str(recorded), "--out", str(out), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["label"] == "river" and 0 < found["recall"]["recent"] <= found["recall"]["oracle"]
    html = out.read_text()
    assert html.count("<svg") == 3 and "river" in html and "nan" not in html
    assert main(["probe", "report", str(recorded)]) == 0
    assert "oracle" in capsys.readouterr().out


def test_a_label_is_text_in_a_page(recorded: Path) -> None:
    trace = PageTrace(recorded)
    trace.notes["label"] = "<script>alert(1)</script>"
    assert "<script>alert" not in page([find(trace)])


def test_milestones_of_a_file_are_noted_and_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KU4 of a recorded trace, from the shell alone."""
    said, path = tmp_path / "marks.json", tmp_path / "a.kvt"
    said.write_text('[3, 9, {"name": "the river", "first": 9, "stop": 12}]')
    args = ["--out", str(path), "--max-tokens", "30", "--page", "2", "--ignore-eos", "-q"]
    args += ["--milestones", str(said), "--label", "marked"]
    assert main(["probe", "record", PROMPT, *args]) == 0
    trace = PageTrace(path)
    assert trace.notes["milestones"] == [3, 9, 10, 11]
    assert trace.notes["milestone_names"] == [{"name": "the river", "first": 9, "stop": 12}]
    capsys.readouterr()
    assert main(["probe", "report", str(path)]) == 0
    pages = {(trace.header.prompt + step) // 2 for step in (3, 9, 10, 11)}
    assert f"marked: of {len(pages)} pages with a milestone" in capsys.readouterr().err
    assert main(["probe", "report", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["milestones"]["n_milestones"] == len(pages)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "is no JSON"), ("[]", "no list"), ('{"a": [3]}', "no list"), ("[1.5]", "no step"), ("[true]", "no step"),
        ("[-1]", "within 30"), ("[30]", "within 30"), ('[{"first": 3}]', "no span"), ('[{"name": 3, "first": 3, "stop": 4}]', "no span"),
        ('[{"first": 4, "stop": 4}]', "within 30"), ('[{"first": 4, "last": 5}]', "no step and no span"),
    ],
)  # fmt: skip
def test_milestones_that_are_none_are_told_before_a_file_is_there(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, path = tmp_path / "marks.json", tmp_path / "a.kvt"
    said.write_text(text)
    args = ["--out", str(path), "--max-tokens", "30", "--milestones", str(said)]
    assert main(["probe", "record", PROMPT, *args]) != 0
    assert says in capsys.readouterr().err and not path.exists()


def test_replay(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "replay", str(recorded), "--ranking", "recent,oracle", "--json"]) == 0
    rows = {r["ranking"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert [*rows] == ["recent", "oracle"] and rows["oracle"]["miss_rate"] <= 1
    plain = rows["recent"]
    args = ["--ranking", "milestone", "--json", "--deadline", "1e-9"]
    assert main(["probe", "replay", str(recorded), *args]) == 0
    (late,) = json.loads(capsys.readouterr().out)["results"]
    assert late["miss_rate"] > 0 and plain["miss_rate"] > 0  # nothing comes in a nanosecond


def test_ablate(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["probe", "ablate", str(recorded), "--share", "0.5", "--classes", "early,late"]
    assert main([*args, "--tokens", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["class"]: row for row in found["results"]}
    assert [*rows] == ["none", "early", "late"] and found["tokens"] == 9 and found["step"] == 20
    assert rows["early"]["bytes"] == rows["late"]["bytes"] > 0 and rows["none"]["free"] == 1
    assert main([*args, "--quiet"]) == 0
    assert "first wrong" in capsys.readouterr().out
    assert main(["probe", "ablate", str(recorded)]) == 0
    assert "left out: milestone" in capsys.readouterr().err


def test_names_of_arguments_are_those_there_are() -> None:
    assert probe_arguments.CLASSES == tuple(CLASSES)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["report", "missing.kvt"], "no file"),
        (["replay", "missing.kvt"], "no file"),
        (["ablate", "missing.kvt"], "no file"),
        (["record", "so well", "--out", "a.kvt", "--rule", "cober:1"], "did you mean cover"),
    ],
)
def test_what_cannot_be_is_told(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *args]) != 0
    assert says in capsys.readouterr().err

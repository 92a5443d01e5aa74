"""The commands, as they are typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from probe import synthetic

from kvweave.cli import main, probe_arguments
from kvweave.probe import PageTrace
from kvweave.probe.classes import CLASSES
from kvweave.probe.findings import find
from kvweave.probe.heads import stability
from kvweave.probe.places import POLICIES
from kvweave.probe.predict import RANKINGS
from kvweave.probe.recalling import recall
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


def test_record_takes_as_many_tokens_as_the_bundled_model_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no --url, and a server that the environment names is none of its business."""
    monkeypatch.setenv("KVWEAVE_URL", "http://127.0.0.1:9")
    path = tmp_path / "a.kvt"
    args = ["--out", str(path), "--ignore-eos", "--home", str(tmp_path / "h"), "-q"]
    assert main(["probe", "record", PROMPT, *args]) == 0
    assert PageTrace(path).n_steps == 31


def test_report(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    assert main(["probe", "report", str(recorded), "--out", str(out), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["label"] == "river" and 0 < found["recall"]["recent"] <= found["recall"]["oracle"]
    html = out.read_text()
    assert html.count("<svg") == 3 and "river" in html and "nan" not in html
    assert main(["probe", "report", str(recorded)]) == 0
    assert "oracle" in capsys.readouterr().out


@pytest.mark.slow
def test_report_beside_a_control_and_as_pdf(recorded: Path, tmp_path: Path) -> None:
    page, paper = tmp_path / "r.html", tmp_path / "r.pdf"
    args = ["probe", "report", str(recorded), "--control", str(recorded), "-q", "--out"]
    assert main([*args, str(page)]) == 0 and main([*args, str(paper)]) == 0
    assert "<td>+0.00 [+0.00, +0.00]</td>" in page.read_text()
    written = paper.read_bytes()
    assert written.startswith(b"%PDF") and written.count(b"/Type /Page ") == 6


def test_a_trace_of_another_model_is_not_set_beside_another(recorded: Path, tmp_path: Path) -> None:
    other = synthetic.trace(
        tmp_path / "b.kvt",
        synthetic.steps(np.random.default_rng(0).random((4, 30, 30))),
        prompt=100,
    )
    html = page([find(PageTrace(recorded))], find(other))
    assert "another model" in html


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


def test_phases_of_a_file_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, path, out = tmp_path / "p.json", tmp_path / "a.kvt", tmp_path / "r.html"
    args = ["--out", str(path), "--max-tokens", "30", "--page", "2", "--ignore-eos", "-q"]
    args += ["--phases", str(said)]
    for wrong in (
        "[3]",
        '[{"name": "a", "first": 0, "stop": 9}, {"name": "a", "first": 9, "stop": 20}]',
    ):
        said.write_text(wrong)
        assert main(["probe", "record", PROMPT, *args]) != 0
        assert "a name of its own" in capsys.readouterr().err and not path.exists()
    said.write_text(
        '[{"name": "<i>", "first": 0, "stop": 9}, {"name": "b", "first": 9, "stop": 30}]'
    )
    assert main(["probe", "record", PROMPT, *args]) == 0
    capsys.readouterr()
    assert main(["probe", "report", str(path), "--json", "--out", str(out)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    one, two = found["phases"]["<i>"], found["phases"]["b"]
    assert (one["steps"], two["steps"]) == (9, 20)
    whole = PageTrace(path).whole()
    assert two["alike"] == pytest.approx(stability(whole, 9, 29).mean(), abs=1e-4)
    # steps in which no page counts are in neither
    recalled = recall(PageTrace(path), names=["recent"]).mass["recent"]
    assert two["recent"] == pytest.approx(np.nanmean(recalled[9:]), abs=1e-4)
    assert ": &lt;i&gt;</td>" in out.read_text()


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


def test_replay_past_several_tiers(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--tiers", "dram:0.1:25e9:1e-5,ssd:1:3e9:1e-4", "--budget", "0.1"]
    args = ["probe", "replay", str(recorded), *tiers]
    n_layers = len(set(PageTrace(recorded).header.layers.tolist()))
    sizes = ",".join(["8192"] * n_layers)
    assert main([*args, "--page-bytes", sizes, "--json"]) == 0
    rows = {r["ranking"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert [*rows] == [*probe_arguments.RANKINGS, *probe_arguments.POLICIES]
    assert rows["recent"]["misses"].keys() == {"dram", "ssd"} and rows["recent"]["sunk_a_step"] > 0
    assert main(args) == 0
    assert "ssd" in capsys.readouterr().out
    for wrong, says in (
        (["--bandwidth", "1e9"], "one of the two"),
        (["--page-bytes", "8192,1"], "one for each layer"),
        (["--page-bytes", "x"], "one for each layer"),
        (["--tiers", "dram"], "NAME:SHARE"),
    ):
        assert main([*args, *wrong]) != 0
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_cost(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["probe", "cost", str(recorded), "--ranking", "recent,oracle"]
    assert main([*args, "--json"]) == 0
    rows = {r["ranking"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert 0 <= rows["oracle"]["missed"] < rows["recent"]["missed"] and rows["recent"]["error"] > 0
    assert main([*args, "--budget", "1", "-q"]) == 0
    assert "off by" in capsys.readouterr().out


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
    assert probe_arguments.RANKINGS == tuple(RANKINGS)
    assert probe_arguments.POLICIES == tuple(POLICIES)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["report", "missing.kvt"], "no file"),
        (["replay", "missing.kvt"], "no file"),
        (["ablate", "missing.kvt"], "no file"),
        (["cost", "missing.kvt"], "no file"),
        (["record", "so well", "--out", "a.kvt", "--rule", "cober:1"], "did you mean cover"),
    ],
)
def test_what_cannot_be_is_told(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *args]) != 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--vllm"], "vLLM is not here"),
        (["--vllm", "7"], "no JSON object"),
        (["--vllm", "--gguf", "a.gguf"], "one of them"),
    ],
)
def test_what_cannot_be_recorded_inside_vllm_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    more: list[str],
    says: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    args = ["--out", str(tmp_path / "a.kvt"), "--home", str(tmp_path / "h"), *more]
    assert main(["probe", "record", PROMPT, *args]) != 0
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())

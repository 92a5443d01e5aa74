"""Rows, tables, the figure, the command and the bench."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
from benches import on_path
from loaded import saved_short
from needs import need

from kvweave.cli import suite
from kvweave.cli.app import main
from kvweave.cli.parser import parse
from kvweave.cli.show import Out
from kvweave.run.model import Runner
from kvweave.suite import calibrate, plot, report
from kvweave.suite.exam import Trial
from kvweave.suite.method import FULL, Method
from kvweave.weave.calibration import FILE, Calibration
from kvweave.weave.repair import Auto

NONE, QUERY = Method(), Method("query", 0.15)


def outcomes(right, method=FULL, mode="", protocol="P1", kind="recall", **more):
    """One case for each list in `right`."""
    return [
        Trial(protocol, c, i, kind, mode, method, float(r), 0.1 * (method != FULL), 1.0, **more)
        for c, case in enumerate(right)
        for i, r in enumerate(case)
    ]


def test_a_row():
    full = outcomes([[1, 1], [1, 1]])
    none = outcomes([[1, 0], [1, 1]], NONE.label, candidates=100, repaired=15)
    first, row = report.summarise([*none, *full], [NONE])
    assert first["method"] == FULL and first["accuracy"] == [1, 1, 1] and first["counts"]
    assert row["method"] == "none 0%" and row["strategy"] == "none" and row["base"] is True
    assert row["accuracy"] == [0.75, 0.5, 1.0] and row["relative"] == [0.75, 0.5, 1.0]
    assert (row["n"], row["cases"], row["repaired"], row["candidates"]) == (4, 2, 0.15, 100.0)
    assert row["kl"] == [0.1, 0.1, 0.1] and row["kl_p95"] == 0.1
    assert report.cells(row) == (
        "none 0%", "-", "15.0%", "0.75 [0.5, 1]", "0.75 [0.5, 1]", "0.1 [0.1, 0.1]", "0.1",
    )  # fmt: skip
    assert len(report.cells(row)) == len(report.head(row))


def test_a_protocol_the_model_cannot_do_does_not_count():
    rows = report.summarise(outcomes([[1], [0]]), [])
    assert report.warning(rows) == "does not count: full prefill scores 50.0%"
    assert report.warning(report.summarise(outcomes([[1], [1]]), [])) == ""


@pytest.mark.parametrize("knows", [0, 1])
def test_leaks_count_when_what_is_left_is_known(knows):
    found = outcomes([[knows], [1]], protocol="P5", kind="retained")
    found += outcomes([[0], [0]], protocol="P5", kind="leak-fact")
    tables = report.tables(report.summarise(found, []))
    wanted = "" if knows else "does not count: full prefill scores 50.0%"
    assert {report.warning(rows) for rows in tables.values()} == {wanted}


def test_leaks_are_told_apart_and_compared_with_never():
    found = []
    for kind in ("retained", "leak-fact", "leak-alias"):
        leaked = [[kind == "leak-fact"], [0]]
        for method, mode in ((FULL, ""), (NONE.label, "forget"), (NONE.label, "never")):
            right = [[0], [0]] if mode == "never" else leaked
            found += outcomes(right, method, mode, "P5", kind)
    tables = report.tables(report.summarise(found, [NONE]))
    assert list(tables) == ["P5 leak", "P5 leak-alias", "P5 leak-fact", "P5 retained"]
    _, forget, never = tables["P5 leak-fact"]
    assert forget["mode"] == "forget" and forget["accuracy"][0] == 0.5
    assert forget["over_never"][0] == 0.5 and never["over_never"] == [0, 0, 0]
    assert forget["relative"] is None and report.head(forget)[3:5] == ("leaked", "over never")
    assert tables["P5 leak-alias"][1]["over_never"] == [0, 0, 0]


def test_streams_have_a_slope_and_prose_a_perplexity():
    made = [Trial("P6", s, i, "recall", m, n, 1, 0.01 * i, 1, prunes=i) for s in (0, 1)
            for i in range(1, 9) for n, m in ((FULL, ""), (NONE.label, "forget"))]  # fmt: skip
    row = report.summarise(made, [NONE])[1]
    assert row["kl_per_prune"] == [0.01, 0.01, 0.01] and "KL a prune" in report.head(row)
    prose = report.summarise(outcomes([[0.5]], protocol="prose", kind="prose"), [])[0]
    assert prose["perplexity"] == pytest.approx([2.71828] * 3, rel=1e-4) and prose["counts"]


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path):
    need("matplotlib")
    full = [
        o for p in ("P1", "P2", "P3", "P4", "P8", "P9") for o in outcomes([[1], [1]], protocol=p)
    ]
    none = [o for p in ("P1", "P2", "P9") for o in outcomes([[1], [0]], NONE.label, protocol=p)]
    query = outcomes([[1], [1]], QUERY.label, candidates=100, repaired=15)
    rows = report.summarise([*full, *none, *query], [NONE, QUERY])
    assert plot.draw(rows, ["query", "random"], tmp_path / "x.png", ": test")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_command(capsys):
    words = ["check", "--suite", "--protocols", "P1,P5", "--n", "4", "--shares", "0.1", "-q"]
    assert main([*words, "--strategies", "none,first_k"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("P1\nmethod") and "first_k 10%" in text and "P5 leak-fact" in text
    assert main([*words[:3], "P1", "--n", "4", "--strategies", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["method"] for r in found["rows"]] == [FULL, "none 0%"]
    assert found["rows"][0]["accuracy"][0] == 1


@pytest.mark.slow
def test_the_command_calibrates(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "BINS", 1)
    file, model = tmp_path / "c.json", str(saved_short(tmp_path / "model"))
    words = ["check", "--suite", "--n", "12", "--protocols", "P1,P2", "--strategies", "none", "-q"]
    words += ["--model", model]
    assert main([*words, "--calibrate", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {r["method"] for r in found["rows"]} >= {"none 0%", "auto 5%", "auto 15%", "auto 30%"}
    about = found["calibration"]
    assert about["file"] == str(file) and about["questions"] == 24
    halves = [(h["fit_on"], h["tested_on"], h["max_drift"]) for h in about["held_out"]]
    assert halves == [
        (a, b, d) for a, b in ((["P1"], ["P2"]), (["P2"], ["P1"])) for d in (None, 0.1)
    ]
    assert all(0 <= h["under"] <= 1 and h["n"] == 12 for h in about["held_out"])
    made = Calibration.load(file)
    assert made.starts() == list(calibrate.SHARES) and made.n == 24


@pytest.mark.slow
def test_the_suite_goes_by_what_the_calibration_has_of_auto(capsys, monkeypatch, tmp_path):
    """`auto` is measured as a user has it; bounds made anew keep it, unless another way is asked for."""
    monkeypatch.setattr(calibrate, "BINS", 1)
    woven, real = set(), Auto._repair

    def watched(self, passes, wish):
        woven.add((self.draft, round(3 * self.hedge), self.rounds))
        return real(self, passes, wish)

    monkeypatch.setattr(Auto, "_repair", watched)
    mine, file = ((0.05, "0@2@1"),), tmp_path / FILE
    model = str(saved_short(tmp_path / "model"))
    Calibration(Runner.load(model).fingerprint, 0.0, 0, (), recipes=mine).save(file)
    words = ["check", "--suite", "--protocols", "P1", "--home", str(tmp_path), "-q"]
    words += ["--model", model]
    assert main([*words, "--n", "12", "--strategies", "none", "--calibrate"]) == 0
    made = Calibration.load(file)
    assert woven == {(0, 2, 1)} and made.recipes == mine and made.curves
    woven.clear()
    few = [*words, "--n", "4", "--strategies", "auto", "--shares", "0.05", "--auto", "2@0@2"]
    assert main(few) == 0 and woven == {(2, 0, 2)} and Calibration.load(file) == made
    replace(made, recipes=(*mine, (0.3, "0@3@1"))).save(file)
    capsys.readouterr()
    assert main([*words, "--n", "12", "--calibrate"]) == 2
    assert "other options of auto at each share" in capsys.readouterr().err


def test_a_calibration_is_shown_and_goes_beside_the_checkpoint(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("KVWEAVE_HOME", raising=False)
    args = parse(["check", "--suite", "--calibrate"])
    assert suite.file_of(args.calibrate, args, str(tmp_path)) == tmp_path / FILE
    at_home = parse(["check", "--suite", "--calibrate", "--home", str(tmp_path / "home")])
    assert suite.file_of(at_home.calibrate, at_home, str(tmp_path)) == tmp_path / "home" / FILE
    half = {"tested_on": ["P1", "P3"], "max_drift": 0.1, "under": 0.97, "within": 0.99,
            "repaired": 0.2, "full": 0.01, "right": 1.0}  # fmt: skip
    shown = {
        "file": "c.json",
        "questions": 500,
        "held_out": [half, half | {"max_drift": None, "within": None}],
    }
    suite.print_calibration(shown, Out())
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["P1,P3", "0.1", "97.0%", "99.0%", "20.0%", "1.0%", "100.0%"]
    assert lines[3].split()[1:4] == ["-", "97.0%", "-"]
    assert lines[4] == "wrote c.json: calibrated on 500 questions"
    suite.print_calibration(shown | {"held_out": None}, Out())
    assert capsys.readouterr().out.startswith("held out: unknown")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check"], "no TEMPLATE"),
        (["check", "x", "--suite"], "takes no TEMPLATE"),
        (["check", "--suite", "--protocols", "P11"], "no protocol 'P11'"),
        (["check", "--suite", "--shares", "0.1,2"], "not a number from 0 to 1"),
        (["check", "--suite", "--n", "0"], "not a whole number"),
        (["check", "--suite", "--max-drift", "0.1"], "--suite takes no --max-drift"),
        (["check", "x", "--calibrate", "c.json"], "--calibrate belongs to --suite"),
        (["check", "x", "--auto", "2@0@2"], "--auto belongs to --suite"),
        (["check", "--suite", "--auto", "3@0@2"], "'3@0@2' is not DRAFT@THIRDS@ROUNDS"),
        (["check", "--suite", "--calibrate", "--n", "10"], "160 are the least; raise --n"),
        (["check", "--suite", "--calibrate", "/nowhere/c.json"], "cannot write /nowhere/c.json"),
    ],
)
def test_wrong_usage(words, says, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_strategy_is_refused_before_the_model_loads(capsys):
    assert main(["check", "--suite", "--strategies", "quer", "--model", "/nowhere"]) == 1
    assert "quer" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bench_resumes(tmp_path, monkeypatch, capsys):
    words = ["--quick", "--workers", "1", "--protocols", "P1,P6", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fidelity", *words, "--out", str(tmp_path / "x.json")])
    results = []
    with on_path():
        import fidelity

        for _ in range(2):
            fidelity.main()
            results.append(json.loads((tmp_path / "x.json").read_text()))
    first, second = results
    assert first["rows"] == second["rows"] and "commit" in first["machine"]
    assert len(first["taken"]) == 4 and second["taken"] == []
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "x.png").exists() == drawn and "no-base" in capsys.readouterr().out
    labels = [m.label for m in fidelity.all_methods()]
    assert len(labels) == len(set(labels)) > 20

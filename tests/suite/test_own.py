"""Cases of a user's own text and prompts, and a calibration from them."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from loaded import bundled_runner, saved_short
from serving import BUNDLED

from kvweave import Engine
from kvweave.cli.app import main
from kvweave.cli.calibrate import _as_it_is
from kvweave.cli.command import UsageError
from kvweave.demo import world
from kvweave.errors import InvalidArgument
from kvweave.suite import own
from kvweave.suite.calibrate import bins_of
from kvweave.weave.calibration import STRATEGY, Calibration, Curve, fitting, measured
from kvweave.weave.repair import strategy


@pytest.fixture(scope="module")
def maker():
    with Engine(bundled_runner()) as engine:
        yield engine.maker


def words(n: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(world.ENTITIES + world.VALUES, k=n))


def test_text_is_cut_into_chunks_one_of_which_is_pruned(maker):
    papers = own.of_texts(maker, [words(900), words(700, 1), "short"], 12)
    assert {p.protocol for p in papers} == set(own.KINDS) and 8 <= len(papers) <= 12
    for paper in papers:
        names = [name for name, _ in paper.notes]
        assert len(set(names)) == len(names) == own.CHUNKS - 1
        assert 1 <= paper.dropped < len(names)
        [question] = paper.questions
        assert len(question.asked) == own.GIVEN
        assert len(question.expected) == own.CHUNK - own.GIVEN
    texts = [[t for _, note in p.notes for t in note] for p in papers]
    whole = maker.tokens(words(900))
    as_they_stand = [t == whole[whole.index(t[0]) :][: len(t)] for t in texts]
    assert not all(as_they_stand), "some stand in each other's place"


def test_of_prompts_every_reply_behind_something_is_a_case(maker):
    said = [words(30, i) for i in range(6)]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    lines = [json.dumps({"messages": messages}), "", json.dumps(messages[1:])]
    papers = own.of_prompts(maker, lines, 10, 4096)
    assert [len(p.notes) for p in papers] == [3, 2]
    for paper in papers:
        [question] = paper.questions
        assert list(question.expected) == maker.tokens(said[4])[: own.MOST_REPLY]
        assert list(question.asked) == maker.tokens(
            maker.chat.message("user", said[3]) + maker.chat.header()
        )
    assert own.of_prompts(maker, lines[:1], 10, 4096)[0].protocol in own.KINDS


@pytest.mark.parametrize("line", ["{", "{}", "3", '[{"role": "user"}]', '{"messages": []}'])
def test_what_is_no_prompt_is_refused(maker, line):
    with pytest.raises(InvalidArgument):
        own.of_prompts(maker, [line], 10, 4096)
    with pytest.raises(InvalidArgument, match="no document"):
        own.of_texts(maker, ["short"], 10)


def test_each_bin_of_few_questions_has_what_a_bound_takes():
    assert [bins_of(n) for n in (10, 40, 100, 1000)] == [2, 2, 5, 16]


def test_a_calibration_is_of_one_strategy():
    curve = Curve(0.05, 0.05, (0.0,) * 6, (1.0,), (0.1,), (-9.0,) * 5, (9.0,) * 5)
    recipes = ((0.05, "0@3@1"), (0.3, "2@0@1"))
    known = Calibration(bundled_runner().fingerprint, 0.95, 10, (curve,), recipes=recipes)
    assert fitting(known, strategy("auto").measured_as) is known
    assert measured(known, strategy("auto:evidence").measured_as, 0.04) == (known, "0@3@1")
    shares = (0.0, 0.05, 0.2, 1.0)
    assert [measured(known, STRATEGY, at)[1] for at in shares] == ["0@3@1"] * 2 + ["2@0@1"] * 2
    for other in ("auto:0", "auto:2@0", "auto:2@1@2", "first_k", "query"):
        mine = strategy(other).measured_as
        assert fitting(known, mine) is None and measured(known, mine, 0.05) == (None, None)
    assert measured(replace(known, recipes=()), STRATEGY, 0.05)[1] is None
    assert measured(None, STRATEGY, 0.05) == (None, None)
    assert fitting(None, STRATEGY) is None
    assert fitting(replace(known, curves=()), STRATEGY) is None  # it bounds nothing


@pytest.mark.slow
def test_the_command_writes_what_max_drift_takes(tmp_path: Path, capsys):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(words(800, i))
    file = tmp_path / "mine.json"
    texts = [str(tmp_path / f"{i}.txt") for i in range(2)]
    model = str(saved_short(tmp_path / "model"))
    common = ["--model", model, "--home", str(tmp_path / "home"), "--json"]
    command = ["calibrate", "--text", *texts, "--n", "24", "--only", "bounds", "--out", str(file)]
    assert main([*command, *common]) == 0
    told = json.loads(capsys.readouterr().out)["calibration"]
    assert told["questions"] >= 20 and told["file"] == str(file)
    made = Calibration.load(file)
    assert (made.source, made.strategy, made.recipes) == ("text", STRATEGY, ())
    with Engine(model, calibration=str(file), max_drift=0.5, repair="auto") as engine:
        for i in range(2):
            engine.put(f"docs/{i}", words(200, 10 + i))
        context = engine.compose("{a}{b}" + words(8, 3), a=["docs/0"], b=["docs/1"])
        plan = context.weave()
        assert plan.drift is not None and plan.drift <= 0.5
        assert plan.drift_by in ("calibration", "exact")
    assert main(["calibrate", *common]) != 0
    assert main(["calibrate", "--text", texts[0], "--prompts", texts[1], *common]) != 0


def test_bounds_alone_are_of_auto_as_it_is_and_it_stays(tmp_path: Path) -> None:
    """What `--only rows` had chosen was written over, and bounds were those of another way."""
    mine, file = bundled_runner().fingerprint, tmp_path / "mine.json"
    one, several = ((0.05, "0@3@1"), (0.3, "0@3@1")), ((0.05, "0@3@1"), (0.3, "2@0@1"))
    assert _as_it_is(file, mine) == ()
    for known, found in (
        (Calibration(mine, 0.0, 0, (), recipes=one), one),
        (Calibration(mine, 0.0, 0, (), "auto:2:1", recipes=one), ()),
        (Calibration(replace(mine, weights="other"), 0.0, 0, (), recipes=one), ()),
    ):
        known.save(file)
        assert _as_it_is(file, mine) == found
    Calibration(mine, 0.0, 0, (), recipes=several).save(file)
    with pytest.raises(UsageError, match="at each share"):
        _as_it_is(file, mine)
    file.write_text("{")
    assert _as_it_is(file, mine) == ()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (["--vllm"], "give --out FILE"),
        (["--vllm", "[7]", "--out", "f.json"], "no JSON object"),
        (["--vllm", "--out", "f.json"], "vLLM"),
    ],
)
def test_what_is_measured_inside_vllm_is_kept_apart(capsys, monkeypatch, tmp_path, said, says):
    monkeypatch.delenv("KVWEAVE_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text(words(300))
    assert main(["calibrate", "--text", "a.md", *said, "--model", str(BUNDLED)]) != 0
    assert says in capsys.readouterr().err and not list(tmp_path.glob("*.json"))

"""The bench of token policies does what an engine does, and docs/keep.md has its numbers."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benches import on_path

from kvweave import Engine
from kvweave.run.model import Runner
from kvweave.weave.answer import request_from

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benches as modules; they import each other as scripts do."""
    with on_path():
        import common
        import long_decode
        import policies_tokens
        import streaming

        yield {
            "common": common, "policies_tokens": policies_tokens, "streaming": streaming,
            "long_decode": long_decode,
        }  # fmt: skip


@pytest.fixture(scope="module")
def runner(bench: dict[str, ModuleType]) -> Runner:
    return Runner.load(str(bench["policies_tokens"].MODEL), device="cpu")


def test_the_page_has_the_measured_numbers() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        made = runpy.run_path(str(ROOT / "docs" / "kept.py"))
    finally:
        sys.path.remove(str(ROOT / "docs"))
    numbers = made["PAGE"].read_text().split(made["BEGIN"])[1].split(made["END"])[0]
    found = made["kept"](*map(made["load"], made["NUMBERS"]))
    assert numbers == found, "run `python docs/kept.py`"


@pytest.mark.slow
def test_rows_are_those_that_an_engine_keeps(bench: dict[str, ModuleType], runner: Runner) -> None:
    """One prefill watched by all policies, then a choice each: as if each had its own context."""
    tokens_bench = bench["policies_tokens"]
    exam = tokens_bench.Exam(runner, None, evidence=False)
    paper = next(tokens_bench.world(exam, "P3", 1))
    head = [*exam.words.head, *(t for _, tokens in paper.notes for t in tokens)]
    tokens = np.array([*head, *paper.questions[0].asked], np.int64)
    names = [*tokens_bench.NAMES, *tokens_bench.VARIANTS]
    made = tokens_bench.Bench(exam, names, (0.1, 0.3)).kept(tokens)
    exam.close()
    with Engine(runner, base="", repair="none", denoise="never") as engine:
        for name in names:
            context = engine.context("c", keep=tokens_bench.spec(name, "0.3"))
            context.append(tokens.tolist())
            context.generate(max_tokens=1)
            rows, mine = context.session.state.rows, made[name, 0.3]
            assert rows.n == mine.n, name
            for layer in range(len(runner.layers)):
                for a, b in zip(rows.kept(layer), mine.kept(layer), strict=True):
                    assert a.tolist() == b.tolist(), (name, layer)
            engine.close_context("c")


def test_a_case_gives_a_score_for_every_cell(
    bench: dict[str, ModuleType], runner: Runner, tmp_path: Path
) -> None:
    tokens_bench = bench["policies_tokens"]
    exam = tokens_bench.Exam(runner, None, evidence=False)
    paper = next(tokens_bench.world(exam, "P1", 1))
    found = tokens_bench.Bench(exam, ("keydiff", "snapkv"), (0.1, 0.5)).sit(paper)
    exam.close()
    assert found["full"] == [1.0] * 5
    assert all(abs(found["bytes"][f"keydiff:{s}"] - s) < 0.01 for s in (0.1, 0.5))
    for cells in found["scores"].values():
        assert len(cells) == 4 and all(len(scores) == 5 for scores in cells.values())
    made = tokens_bench.quality({"P1": [found]})
    of: dict[Any, float] = {
        (r["mode"], r["policy"], r["share"]): r["kl"][0] for r in made["rows"] if r["on"] == "world"
    }
    for mode in (tokens_bench.ONCE, tokens_bench.OF_ONE):
        assert 0 <= of[mode, "keydiff", 0.5] < of[mode, "keydiff", 0.1]


@pytest.mark.slow
def test_overhead_is_of_steps_in_turns(bench: dict[str, ModuleType]) -> None:
    shape = bench["common"].Shape.tiny()
    found = bench["policies_tokens"].overhead(200, 64, shape, ("0.3",))
    rows = {r["policy"]: r for r in found["rows"]}
    assert rows["none"]["cpu_over_none"] == [1.0, 1.0, 1.0] and rows["none"]["rows"] == 264
    for name, row in rows.items():
        if name != "none":
            assert row["cpu_over_none"][0] > 0, name
            assert row["over_page"] < 1.2 or name == "flexicache", name  # unstable heads keep all
            assert row["rows"] <= 79 or name in bench["policies_tokens"].DIVIDED


@pytest.mark.slow
def test_a_stream_that_is_cut_says_so(bench: dict[str, ModuleType], runner: Runner) -> None:
    found = bench["streaming"].stream(runner, "streaming:64,every=16", 400, 10.0)
    assert found["complete"] and found["decoded"] == 400 and len(found["tenths"]) == 10
    assert found["tenths"][-1]["rows_bytes"] == found["tenths"][3]["rows_bytes"]
    found = bench["streaming"].stream(runner, "streaming:64,every=16", 10**5, 0.01)
    assert not found["complete"] and found["decoded"] < 10**5
    found = bench["streaming"].stream(runner, "streaming:64,every=16", 10**5, 0.0)
    assert not found["complete"] and found["decoded"] < 1000


@pytest.mark.slow
def test_rows_that_no_choice_frees_are_charged(bench: dict[str, ModuleType]) -> None:
    """All that an answer adds is accounted before, as `kvzip` reads what it decodes again."""
    common = bench["common"]
    pair = common.model_pair(common.Shape.tiny(), "float32", "cpu", 2048)
    with Engine(pair.runner, base="", budget="1GiB", repair="none", denoise="never") as engine:
        context = engine.context("c", keep="kvzip:32,every=16")
        context.append(common.random_ids(100, pair.shape.vocab, 1))
        turn = context.begin(*request_from(600, {"ignore_eos": True}))
        while not turn.done:
            engine.loop.step()
            state = context.session.state
            assert state.n_bytes <= dict(engine.shelf.charged())[state.name]
        turn.finish()


@pytest.mark.slow
def test_tokens_that_are_given_are_decoded_as_an_engine_decodes_them(
    bench: dict[str, ModuleType], runner: Runner
) -> None:
    """In passes up to the next choice, behind one prefill that all watched: the same rows stay, and the
    same tokens are the likeliest."""
    long, every, n_new = bench["long_decode"], bench["long_decode"].PAGE, 150
    prompt = [8 + i * i % 200 for i in range(120)]
    names = [n for n in long.NAMED if n != "random"]  # it is drawn from the rows' slots
    with Engine(runner, base="", repair="none", denoise="never") as engine:
        contexts = [engine.context(f"{i}", keep=long.spec(name, 40, every)) for i, name in enumerate(names)]  # fmt: skip
        for context in contexts:
            context.append(prompt)
        answers = engine.generate_many(contexts, n_new, ignore_eos=True)
        for name, context, answer in zip(names, contexts, answers, strict=True):
            tokens = np.array([*prompt, *answer.tokens], np.int64)
            ((keeper, rows),) = long.prefilled(runner, np.array(prompt, np.int64), [(name, 40)])
            (found,) = long.forced(runner, tokens, [(name, 40)], len(prompt))
            assert np.mean(found["hits"]) > 0.98, name  # sums differ in the last bit
            run = long.Forced(keeper, rows, tokens[:-1])
            while run.n < len(tokens) - 1:
                work = run.work()
                runner.forward([work])
                run.ran(work)
            mine, its = run.rows, context.session.state.rows
            assert mine.n == its.n and mine.forms == its.forms, name
            same = total = 0
            for layer in range(len(runner.layers)):
                for a, b in zip(mine.kept(layer), its.kept(layer), strict=True):
                    same, total = same + len(np.intersect1d(a, b)), total + len(b)
            assert same > 0.97 * total, (name, same, total)
            engine.close_context(context.name)


def test_long_decodes_are_told_with_all_that_is_asked(
    bench: dict[str, ModuleType], runner: Runner
) -> None:
    """A talk under a policy that keeps everything is that without one; a budget of nothing is not."""
    long = bench["long_decode"]
    exam = long.opened("P1")
    talk = next(long.talks(exam, "P1", 1, 4))
    full, much, little = long.talked(
        exam.runner, talk, [(long.FULL, 1.0), ("keydiff", 4.0), ("streaming", 0.1)]
    )
    exam.close()
    assert full.right == much.right == [1.0] * 4 and full.length == much.length
    assert sum(little.right) < 4 and little.bytes < 0.4 * full.bytes
    assert full.choices == 0 and much.choices >= 4
    row = long.row_of("P1", ("keydiff", 4.0), [much], [full])
    assert row["length"] == [1.0, 1.0, 1.0] and row["endless"] == 0 and row["right"][0] == 1


@pytest.mark.slow
def test_long_decode(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "long.json"
    bench["long_decode"].main(["--quick", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["machine"]["commit"]
    right = {
        (part, r["on"], r["policy"]): r["right"][0]
        for part in ("talks", "traces")
        for r in found[part]["rows"]
    }
    assert right["talks", "P1", "no policy"] == 1
    assert right["traces", "P1", "kvzip"] > right["traces", "P1", "streaming"]
    for row in found["prose"]["rows"]:
        assert row["kl"][1] <= row["kl"][0] <= row["kl"][2] and row["choices"] == 4
        assert 0 < row["bytes"] < 1 and row["kl"][0] > 0

"""Rows the question needs and the rows those need: python -m pytest tests/weave/test_rollout.py"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from run.backend import drive
from weaving import EXACT, chat, rows, same_rows, text

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Steps
from kvweave.run.model import Runner
from kvweave.suite.exam import Exam
from kvweave.suite.method import Method
from kvweave.suite.protocols import cases
from kvweave.weave.passes import ASKS, Floats, Look, Passes
from kvweave.weave.repair import Rollout, Verdict, View, Wish
from kvweave.weave.repair.rollout import follow

Make = Callable[..., Engine]


def view(budget: int, reads: dict[int, list[float]], asked: list[list[int]]) -> View:
    """Eight candidates at slots 10 to 17, each of which reads what the table says."""

    class Told(View):
        def reads(self, slots: Ints, weights: Floats) -> Steps[Floats]:
            yield from ()
            asked.append(slots.tolist())
            return weights @ np.array([reads.get(int(s), [0.0] * 8) for s in slots])

    none: Any = None
    return Told(none, (), np.arange(10, 18), budget, np.random.default_rng(0))


def followed(view: View, mass: Floats, rounds: int) -> list[int]:
    none: Any = None
    return drive(none, follow(view, mass, rounds)).tolist()


def test_the_second_round_takes_what_the_first_one_reads() -> None:
    asked: list[list[int]] = []
    mass = np.array([0.0, 0.0, 0.0, 0.9, 0.1, 0.3, 0.0, 0.0])
    reads = {13: [0, 0.9, 0, 0, 0, 0, 0, 0], 15: [0, 0, 0, 0, 0, 0, 0.9, 0]}
    assert followed(view(5, reads, asked), mass, 2) == [11, 13, 14, 15, 16]
    assert asked == [[13, 15]]  # a third of the budget
    # what the row with more weight reads comes first
    assert followed(view(4, reads, asked), mass, 2) == [11, 13, 15, 16]


def test_one_round_is_the_question_alone() -> None:
    asked: list[list[int]] = []
    mass = np.array([0.0, 0.0, 0.0, 0.9, 0.1, 0.3, 0.0, 0.0])
    assert followed(view(3, {}, asked), mass, 1) == [13, 14, 15]
    assert asked == []
    with pytest.raises(InvalidArgument, match="below 1"):
        Rollout(0)


class Spy(Rollout):
    passes: Passes
    compares = False

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        self.passes = passes
        passes.compares = self.compares
        return (yield from super().repair(passes, wish))


def woven(engine: Engine, lookahead: int = 0, name: str = "c", compares: bool = False) -> Passes:
    """What a weave of 5 + 6 + 6 rows and a question of 4 looked at."""
    spy = Spy(2, lookahead)
    spy.compares = compares
    context = chat(engine, name, [6, 6], repair=spy, share=0.0)
    context.append(text(4, 99))
    context.weave()
    return spy.passes


def looked(passes: Passes) -> Look:
    assert passes.looked is not None
    return passes.looked


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_budget_is_kept(engines: Make, share: float) -> None:
    engine = engines()
    context = chat(engine, "c", [20, 20, 20], repair="rollout", share=share)
    context.append(text(4, 99))
    assert context.weave().repaired == round(share * 40)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_attention_is_a_distribution_and_weights_count(engines: Make, name: str) -> None:
    """Each row pays 1 in every head of every layer that counts, times its weight: of all but the
    first, and for the rows that are read again but the last."""
    engine = engines(name)
    passes = woven(engine)
    heads, n_layers = engine.runner.config.num_attention_heads, len(engine.runner.layers)
    paid = 4 * ASKS * heads * (n_layers - 1)
    assert looked(passes).mass.sum() == pytest.approx(paid, rel=1e-5)
    everything = np.arange(17)
    before = passes.placed_values(everything)
    slots = np.array([12, 14])
    mass = drive(engine.runner, passes.reads(slots, np.array([1.0, 0.25])))
    assert mass.sum() == pytest.approx(1.25 * heads * (n_layers - 2), rel=1e-5)
    assert mass[15:].sum() == 0  # nobody sees what comes later
    found = passes.placed_values(everything)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert not torch.equal(passes.rows.read(1, slots)[1][1], before[1][14])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_the_draft_is_what_the_unrepaired_context_would_write(engines: Make, name: str) -> None:
    engine = engines(name)
    look = looked(woven(engine, 3))
    plain = chat(engine, "plain", [6, 6], repair="none")
    plain.append(text(4, 99))
    assert tuple(look.draft.tolist()) == plain.generate(max_tokens=3, ignore_eos=True).tokens
    heads = engine.runner.config.num_attention_heads * (len(engine.runner.layers) - 1)
    mass = look.mass.sum() / heads
    assert 4 * ASKS < mass < 4 * ASKS + 3  # what the draft pays to itself is left out
    assert look.mass.shape == (21,) and look.logits.shape[0] == 1 + 3
    whole = looked(woven(engine, 3, "whole", compares=True))
    assert whole.logits.shape[0] == 4 + 3 and np.array_equal(whole.draft, look.draft)
    assert oracle.relative(whole.logits[3:], look.logits) < EXACT


def test_a_draft_leaves_no_trace(engines: Make) -> None:
    with_draft, without = (  # of two engines: one would give the second the first one's exact rows
        chat(engines(), "c", [20, 20], repair=f"rollout:1@{n}", share=1.0) for n in (4, 0)
    )
    for context in (with_draft, without):
        context.append(text(4, 99))
        assert context.weave().prefilled == 4
    assert same_rows(rows(with_draft), rows(without))


def test_a_draft_ends_where_the_reply_or_the_positions_do(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    first = int(looked(woven(engine, 3)).draft[0])
    monkeypatch.setattr(engine.runner, "ends", frozenset({first}))
    ended = looked(woven(engine, 3, "d"))
    assert ended.draft.tolist() == [] and ended.logits.shape[0] == 1
    monkeypatch.setattr(engine.runner, "ends", frozenset())
    monkeypatch.setattr(engine.runner, "limit", 23)
    assert len(looked(woven(engine, 3, "e")).draft) == 2
    with pytest.raises(InvalidArgument, match="below 0"):
        Rollout(lookahead=-1)


def test_a_value_that_came_over_two_rows_is_mended(bundled: Path) -> None:
    """P2 on the bundled model: `query` repairs the row that is asked for and not the one it read."""
    exam = Exam(Runner.load(str(bundled)))
    right = {"none 0%": 0.0, "query 15%": 0.0, "rollout 15%": 0.0, "auto 15%": 0.0}
    methods = [Method(label.split()[0], 0.15 * (label != "none 0%")) for label in right]
    papers = [exam.words.paper(c, i) for i, c in enumerate(islice(cases("P2", "test"), 6))]
    for outcome in (o for paper in papers for o in exam.sit(paper, methods)):
        if outcome.method in right:
            right[outcome.method] += outcome.right / 24
    exam.close()
    assert right["none 0%"] < 0.1 and right["query 15%"] < 0.6
    assert right["rollout 15%"] > 0.9 and right["auto 15%"] > 0.9

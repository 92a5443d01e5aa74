"""Rows the question needs and the rows those need: python -m pytest tests/weave/test_rollout.py"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weaving import chat, rows, same_rows, text

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.suite.exam import Exam
from kvweave.suite.method import Method
from kvweave.suite.protocols import cases
from kvweave.weave.repair import Rollout, View
from kvweave.weave.repair.rollout import follow
from kvweave.weave.scores import ASKS, Scores
from kvweave.weave.weaver import Weaver

Make = Callable[..., Engine]


def view(budget: int, reads: dict[int, list[float]], asked: list[list[int]]) -> View:
    """Eight candidates at slots 10 to 17, each of which reads what the table says."""

    def read(slots: Tensor, weights: Tensor) -> Tensor:
        asked.append(slots.tolist())
        rows = [torch.tensor(reads.get(int(s), [0.0] * 8)) for s in slots]
        return torch.stack([w * r for w, r in zip(weights, rows, strict=True)]).sum(0)

    none = torch.zeros(8)
    return View(
        placed=(), spans=(), candidates=torch.arange(10, 18), budget=budget,
        deviation=lambda layer, what: none, attention=lambda: none, dependence=lambda: none,
        needs=lambda: none, reads=read, generator=torch.Generator(),
    )  # fmt: skip


def test_the_second_round_takes_what_the_first_one_reads() -> None:
    asked: list[list[int]] = []
    mass = torch.tensor([0.0, 0.0, 0.0, 0.9, 0.1, 0.3, 0.0, 0.0])
    reads = {13: [0, 0.9, 0, 0, 0, 0, 0, 0], 15: [0, 0, 0, 0, 0, 0, 0.9, 0]}
    chosen = follow(view(5, reads, asked), mass, 2)
    assert asked == [[13, 15]]  # a third of the budget
    assert chosen.tolist() == [
        11,
        13,
        14,
        15,
        16,
    ]  # what the row with more weight reads comes first
    assert follow(view(4, reads, asked), mass, 2).tolist() == [11, 13, 15, 16]


def test_one_round_is_the_question_alone() -> None:
    asked: list[list[int]] = []
    mass = torch.tensor([0.0, 0.0, 0.0, 0.9, 0.1, 0.3, 0.0, 0.0])
    assert follow(view(3, {}, asked), mass, 1).tolist() == [13, 14, 15]
    assert asked == []
    with pytest.raises(InvalidArgument, match="below 1"):
        Rollout(0)


def woven(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    repair: str = "rollout:2@0",
    name: str = "c",
) -> Scores:
    """What a weave of 5 + 6 + 6 rows and a question of 4 looked at."""
    kept: list[Scores] = []
    choose = Weaver._choose

    def keep(self, state, scores, strategy, share):  # type: ignore[no-untyped-def]
        kept.append(scores)
        return choose(self, state, scores, strategy, share)

    monkeypatch.setattr(Weaver, "_choose", keep)
    context = chat(engine, name, [6, 6], repair=repair, share=0.0)
    context.append(text(4, 99))
    context.weave()
    return kept[-1]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_budget_is_kept(engines: Make, share: float) -> None:
    engine = engines()
    context = chat(engine, "c", [20, 20, 20], repair="rollout", share=share)
    context.append(text(4, 99))
    assert context.weave().repaired == round(share * 40)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_attention_is_a_distribution_and_weights_count(
    engines: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row pays 1 in every head of every layer but the first, times its weight."""
    engine = engines(name)
    scores = woven(engine, monkeypatch)
    heads = engine.runner.config.num_attention_heads * (len(engine.runner.layers) - 1)
    assert float(scores.needs().sum()) == pytest.approx(4 * ASKS * heads, rel=1e-5)
    before = [v[:17].clone() for v in scores.rows.v]
    slots = torch.tensor([12, 14])
    mass = scores.reads(slots, torch.tensor([1.0, 0.25]))
    assert float(mass.sum()) == pytest.approx(1.25 * heads, rel=1e-5)
    assert mass[15:].sum() == 0  # nobody sees what comes later
    found = scores.placed_values(torch.arange(17))
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert not torch.equal(scores.rows.v[1][14], before[1][14])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_the_draft_is_what_the_unrepaired_context_would_write(
    engines: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(name)
    scores = woven(engine, monkeypatch, "rollout:2@3")
    look = scores.look()
    plain = chat(engine, "plain", [6, 6], repair="none")
    plain.append(text(4, 99))
    assert tuple(look.draft.tolist()) == plain.generate(max_tokens=3, ignore_eos=True).tokens
    heads = engine.runner.config.num_attention_heads * (len(engine.runner.layers) - 1)
    mass = look.mass.sum() / heads
    assert 4 * ASKS < float(mass) < 4 * ASKS + 3  # what the draft pays to itself is left out
    assert look.mass.shape == (21,) and look.logits.shape[0] == 4 + 3


def test_a_draft_leaves_no_trace(engines: Make) -> None:
    engine = engines()
    with_draft, without = (
        chat(engine, name, [20, 20], repair=f"rollout:1@{n}", share=1.0)
        for name, n in (("a", 4), ("b", 0))
    )
    for context in (with_draft, without):
        context.append(text(4, 99))
        context.weave()
    assert same_rows(rows(with_draft), rows(without))


def test_a_draft_ends_where_the_reply_or_the_positions_do(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    first = int(woven(engine, monkeypatch, "rollout:2@3").look().draft[0])
    monkeypatch.setattr(engine.runner, "ends", frozenset({first}))
    assert woven(engine, monkeypatch, "rollout:2@3", "d").look().draft.tolist() == []
    monkeypatch.setattr(engine.runner, "ends", frozenset())
    monkeypatch.setattr(engine.runner, "limit", 23)
    assert woven(engine, monkeypatch, "rollout:2@3", "e").look().draft.numel() == 2
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

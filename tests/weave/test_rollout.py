"""Rows the question needs and the rows those need: python -m pytest tests/weave/test_rollout.py"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from weaving import EXACT, chat, rows, same_rows, text

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Observer, Steps, Work
from kvweave.run.model import Runner
from kvweave.suite.exam import Exam
from kvweave.suite.method import Method
from kvweave.suite.protocols import cases
from kvweave.weave import passes as passing
from kvweave.weave.parts import Placement
from kvweave.weave.passes import ASKS, Floats, Look, Passes
from kvweave.weave.repair import Rollout, Verdict, View, Wish, rollout
from kvweave.weave.repair.base import SETTLED
from kvweave.weave.repair.rollout import follow
from kvweave.weave.rereading import at_once

Make = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are sure of nothing."""
    monkeypatch.setattr(passing, "SURE", 0.0)


def view(budget: int, reads: dict[int, list[float]], asked: list[list[int]]) -> View:
    """Eight candidates at slots 10 to 17, each of which reads what the table says."""

    class Told(View):
        def change(self) -> Floats:
            return np.ones(8)

        def reads(self, slots: Ints, weights: Floats) -> Steps[Floats]:
            yield from ()
            asked.append(slots.tolist())
            return weights @ np.array([reads.get(int(s), [0.0] * 8) for s in slots])

    none: Any = None
    return Told(none, (), np.arange(10, 18), budget, np.random.default_rng(0))


def followed(view: View, mass: Floats, rounds: int) -> list[int]:
    none: Any = None
    return at_once(none, follow(view, mass, rounds)).tolist()


def test_the_second_round_takes_what_the_first_one_reads() -> None:
    asked: list[list[int]] = []
    mass = np.array([0.0, 0.0, 0.0, 0.9, 0.05, 0.3, 0.0, 0.0])
    reads = {13: [0, 0.9, 0, 0, 0, 0, 0, 0], 15: [0, 0, 0, 0, 0, 0, 0.9, 0]}
    assert followed(view(5, reads, asked), mass, 2) == [11, 13, 14, 15, 16]
    assert asked == [[13, 15]]  # a third of the budget
    # what the row with more weight reads comes first
    assert followed(view(4, reads, asked), mass, 2) == [11, 13, 15, 16]


def test_a_round_takes_a_third_of_the_budget() -> None:
    asked: list[list[int]] = []
    followed(view(8, {}, asked), np.full(8, 0.1), 3)
    assert asked == [[10, 11, 12], [13, 14, 15]]


def test_first_rows_of_chunks_count_more_than_those_behind_them(engines: Make) -> None:
    """Of rows that the question needs alike; not of rows that were computed among others."""
    engine = engines()
    passes = woven(engine)
    changes = View(
        passes, passes.placed[1:3], np.arange(5, 17), 4, np.random.default_rng(0)
    ).change()
    assert changes[:6].tolist() == changes[6:].tolist()  # six rows a chunk
    assert changes[0] == 1 and (np.diff(changes[:6]) < 0).all() and changes[5] > SETTLED
    among = [replace(p, origin="own") for p in passes.placed[1:3]]
    flat = View(passes, among, np.arange(5, 17), 4, np.random.default_rng(0)).change()
    assert flat == pytest.approx(SETTLED)


def test_nothing_is_read_again_where_no_row_is_left_to_choose() -> None:
    asked: list[list[int]] = []
    assert followed(view(1, {}, asked), np.arange(8.0), 2) == [17]
    assert asked == []


def test_a_round_takes_few_rows_of_a_large_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "ROUND", 2)
    asked: list[list[int]] = []
    assert followed(view(8, {}, asked), np.full(8, 0.1), 2) == list(range(10, 18))
    assert asked == [[10, 11]]


def test_rows_taken_before_count_in_the_budget() -> None:
    taken = np.zeros(8, bool)
    taken[[0, 7]] = True
    none: Any = None
    mass = np.array([0.0, 0.0, 0.0, 0.9, 0.1, 0.3, 0.0, 0.9])
    found = at_once(none, follow(view(4, {}, []), mass, 1, taken))
    assert found.tolist() == [10, 13, 15, 17]


def twice(engines: Make, n: int) -> Spy:
    """Return a spy that has seen a context in which a chunk stands twice before ``n`` tokens of new text."""
    spy = Spy(1, 0)
    context = chat(engines(), "c", [6, 6], repair=spy, share=0.0)
    context.append_chunk("c/1")
    context.append(text(n, 99))
    context.weave()
    return spy


def test_both_copies_of_a_row_are_chosen_where_a_chunk_stands_twice(engines: Make) -> None:
    """A reader pays each a part of what it would pay one. Halves of one chunk are no copies."""
    spy = twice(engines, 4)
    mass = np.zeros(12)
    mass[[2, 8, 5]] = [0.3, 0.2, 0.4]  # one row of each copy, and another of the first

    def chosen(spans: Sequence[Placement]) -> list[int]:
        view = View(spy.passes, spans, np.arange(11, 23), 2, np.random.default_rng(0))
        return [slot - 11 for slot in followed(view, mass, 1)]

    first, second = spy.passes.placed[2:4]
    assert (first.part.id, first.slot) == (second.part.id, second.slot - 6)
    assert chosen([first, second]) == [2, 8]
    behind = replace(second, part=replace(second.part, start=6))
    assert chosen([first, behind]) == [2, 5]


def test_new_text_is_no_copy_where_a_chunk_stands_twice(engines: Make) -> None:
    """Rows of it that a look computes early are candidates too, and needed each by itself."""
    spy = twice(engines, 20)
    early, spans = spy.passes.early, spy.passes.placed[2:4]
    assert early.tolist() == [23, 24, 25, 26]
    mass = np.zeros(16)
    mass[[0, 12, 13, 14, 15]] = [0.1, 0.2, 0.2, 0.2, 0.3]
    seen = View(spy.passes, spans, np.arange(11, 27), 2, np.random.default_rng(0)).pooled(mass)
    assert seen.tolist() == [*[0.1, 0, 0, 0, 0, 0] * 2, 0.2, 0.2, 0.2, 0.3]


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


class Whole(Observer):
    """Keeps every attention weight: ``paid`` [layer, row, slot], heads squared and added up."""

    def __init__(self, n_layers: int, n_rows: int, n: int) -> None:
        self.paid, self.ones = np.zeros((n_layers, n_rows, n)), np.zeros((n_layers, n_rows))

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        return 0, n

    def see(self, layer: int, first: int, begin: int, weights: torch.Tensor) -> None:
        shown = weights.double().cpu().numpy()
        rows, slots = slice(first, first + shown.shape[1]), slice(begin, begin + shown.shape[2])
        self.paid[layer, rows, slots] += np.square(shown).sum(0)
        self.ones[layer, rows] += shown.sum((0, 2))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_a_look_and_a_reading_add_up_squares(engines: Make, name: str) -> None:
    """What an observer that keeps everything sees, squared and weighed by hand: of all layers but the
    first, and for the rows that are read again but the last."""
    engine = engines(name)
    heads, n_layers = engine.runner.config.num_attention_heads, len(engine.runner.layers)
    passes = woven(engine)
    assert passes.unready.tolist() == [17, 18, 19, 20]
    asked = Whole(n_layers, 4, 21)
    at_once(engine.runner, one(passes.work(passes.unready, observer=asked)))
    assert asked.ones == pytest.approx(heads, rel=1e-5)
    needed = np.array([ASKS, ASKS, ASKS, 1.0]) @ asked.paid[1:].sum(0)
    assert looked(passes).mass == pytest.approx(needed, rel=1e-4, abs=1e-9)
    everything = np.arange(17)
    before = passes.placed_values(everything)
    slots, counts = np.array([12, 14]), np.array([1.0, 0.25])
    reads = at_once(engine.runner, passes.reads(slots, counts))
    assert reads[15:].sum() == 0  # nobody sees what comes later
    again = Whole(n_layers, 2, 17)
    at_once(engine.runner, one(passes.work(slots, observer=again)))
    assert reads[:17] == pytest.approx(counts @ again.paid[1:-1].sum(0), rel=1e-4, abs=1e-9)
    found = passes.placed_values(everything)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert not torch.equal(passes.rows.read(1, slots)[1][1], before[1][14])


def one(work: Work) -> Steps[None]:
    yield work


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_drafted_token_counts_as_much_as_the_model_is_sure_of_it(
    engines: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(name)
    without, drafted = (looked(woven(engine, n, f"c{n}")) for n in (0, 2))
    forward = engine.runner.forward

    def sure(works: Sequence[Work], *rest: Any, **named: Any) -> list[torch.Tensor]:
        """The same winners, ever surer of them."""
        return [
            logits * 1e6 if len(logits) else logits for logits in forward(works, *rest, **named)
        ]

    def unsure(works: Sequence[Work], *rest: Any, **named: Any) -> list[torch.Tensor]:
        """The same winners, by a hair."""
        return [
            logits * 1e-9 if len(logits) else logits for logits in forward(works, *rest, **named)
        ]

    monkeypatch.setattr(engine.runner, "forward", sure)
    whole = looked(woven(engine, 2, "sure"))
    monkeypatch.setattr(engine.runner, "forward", unsure)
    none = looked(woven(engine, 2, "unsure"))
    assert none.draft.tolist() == whole.draft.tolist() == drafted.draft.tolist()
    part = [(each.mass - without.mass).sum() for each in (none, drafted, whole)]
    vocab = engine.runner.config.vocab_size
    assert part[0] < part[1] < part[2]
    assert part[0] < 2 * part[2] / vocab


def test_a_reply_that_the_model_is_not_sure_of_is_not_drafted(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the look is what evidence is taken of: its rows are the same for all answers then."""
    engine = engines()
    first = float(looked(woven(engine, 2)).logits[0].softmax(-1).max())
    for i, (sure, n_drafted) in enumerate([(first - 1e-3, 2), (first + 1e-3, 0)]):
        monkeypatch.setattr(passing, "SURE", sure)
        assert len(looked(woven(engine, 2, f"c{i}")).draft) == n_drafted
        assert len(looked(woven(engine, 2, f"d{i}", compares=True)).draft) == 2


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_the_draft_is_what_the_unrepaired_context_would_write(engines: Make, name: str) -> None:
    engine = engines(name)
    look = looked(woven(engine, 3))
    plain = chat(engine, "plain", [6, 6], repair="none")
    plain.append(text(4, 99))
    assert tuple(look.draft.tolist()) == plain.generate(max_tokens=3, ignore_eos=True).tokens
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


@pytest.mark.slow
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

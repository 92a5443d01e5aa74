"""Rows that `auto` repairs whatever it sees: python -m pytest tests/weave/test_hedge.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from weaving import again, chat, passes_of, rows, text

from kvweave import Context, Engine
from kvweave.run.base import Work
from kvweave.weave.calibration import FILE, STRATEGY, Calibration
from kvweave.weave.repair import Auto

Make = Callable[..., Engine]
AHEAD = [25, 26, 45]  # of a budget of ten: a third, the first rows of the chunks at 25 and at 45


def asked(engine: Engine, share: float = 0.25, n: int = 4, **options: object) -> Context:
    """Forty stale rows, in two chunks behind an exact one, and a question."""
    context = chat(engine, "c", [20, 20, 20], repair="auto:0", share=share, **options)
    context.append(text(n, 99))
    return context


def test_the_first_rows_of_chunks_are_computed_with_the_look_and_not_again(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    with passes_of(engine, monkeypatch) as seen:
        context = asked(engine)
        plan = context.weave()
    look, last = seen[-3], seen[-1]
    assert look == [*AHEAD, 65, 66, 67, 68]
    assert not {*AHEAD} & {*last} and len(last) == 10 - 3 + 4
    assert plan.repaired == 10 and [s.n_repaired > 1 for s in plan.spans[2:4]] == [True, True]
    assert context.session.state.repaired[AHEAD].all()
    assert not any(s.exact for s in plan.spans[2:])
    with passes_of(engine, monkeypatch) as seen:  # nor for the next question
        context.append(text(4, 98))
        context.weave()
    assert not {*AHEAD} & {slot for slots in seen for slot in slots}


def test_they_are_those_of_a_pass_over_the_rows_as_they_were_placed(engines: Make) -> None:
    engine = engines()
    context = asked(engine)
    context.weave()
    other = again(engine, "twin", context, repair="none")
    other.append(text(4, 99))
    other.weave()
    slots = np.array(AHEAD)
    ids = np.array(other.tokens(), np.int64)[slots]
    engine.runner.forward([Work(rows(other), ids, slots, slots)])
    for layer in range(len(engine.runner.layers)):
        for mine, its in zip(
            rows(context).read(layer, slots), rows(other).read(layer, slots), strict=True
        ):
            assert torch.allclose(mine, its, atol=1e-12)


def test_a_question_longer_than_the_budget_is_looked_at_too(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    context = asked(engine, share=0.1, n=5)
    with passes_of(engine, monkeypatch) as seen:
        plan = context.weave()
    assert seen[0] == [25, 65, 66, 67, 68, 69] and len(seen) == 3 and plan.repaired == 4


def test_where_all_rows_are_to_be_repaired_nobody_looks(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    context = asked(engine, share=1.0)
    with passes_of(engine, monkeypatch) as seen:
        assert context.weave().repaired == 40
    assert seen == [list(range(25, 69))] and context.check().kl < 1e-12


def test_what_a_context_keeps_for_itself_is_computed_by_the_last_pass(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants the unrotated rows of what was repaired, and these come with the last pass."""
    engine = engines()
    context = asked(engine, prune="evict")
    with passes_of(engine, monkeypatch) as seen:
        assert context.weave().repaired == 10
    assert {*AHEAD} <= {*seen[-1]} and len(seen[-1]) == 10 + 4


def test_the_bundled_calibration_is_of_this_choice(bundled: Path) -> None:
    assert Calibration.load(bundled / FILE).strategy == STRATEGY
    assert Auto().draft == int(STRATEGY.split(":")[1])

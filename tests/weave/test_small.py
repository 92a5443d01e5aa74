"""Contexts so small that to look at them takes as long as to repair all: python -m pytest tests/weave/test_small.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
import torch
from conftest import tiny
from weaving import chat, flat, passes_of, text

from kvweave import Context, Engine
from kvweave.weave.repair.auto import ROUND, ROWS_A_PASS
from kvweave.weave.repair.rollout import LOOKAHEAD

Make = Callable[..., Engine]
ASKED = 6
MOST = ASKED + LOOKAHEAD + ROUND + 4 * ROWS_A_PASS  # stale rows, and the share of them besides


def asked(engine: Engine, stale: int, **options: object) -> Context:
    """A context of which so many rows are stale; the first chunk is exact."""
    context = chat(engine, "c", [20, stale // 2, stale - stale // 2], **options)
    context.append(text(ASKED, 99))
    return context


@pytest.mark.parametrize("share", [0.02, 0.15])
def test_it_is_repaired_whole_in_one_pass_and_exact(
    engines: Make, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(repair="auto", share=share)
    context = asked(engine, MOST)
    with passes_of(engine, monkeypatch) as seen:
        answer = context.generate(4, ignore_eos=True)
    assert (
        answer.plan.repaired == MOST and answer.plan.drift == 0 and answer.plan.drift_by == "exact"
    )
    assert [len(slots) for slots in seen[:4]] == [MOST + ASKED, 1, 1, 1], (
        "the repair, then three tokens"
    )
    ids = torch.tensor(context.tokens()[: 25 + MOST + ASKED])
    wanted = oracle.full_prefill(engine.runner, ids)[-1]
    assert answer.tokens[0] == int(wanted.argmax()) and context.check().kl < oracle.EXACT


def test_a_row_more_and_it_is_looked_at(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(repair="auto", share=0.02)
    n = MOST + 2 + 1  # two rows are the share
    context = asked(engine, n)
    with passes_of(engine, monkeypatch) as seen:
        plan = context.weave()
    assert plan.repaired == 2 and plan.drift is None and len(seen) > 1


def test_it_computes_no_more_rows_and_passes_than_looking_would(engines: Make) -> None:
    """The claim, by the price of a pass: the largest context that is repaired whole, against the way by its name."""
    counted = []
    for i, repair in enumerate(("auto", "auto:2@1@2")):
        engine = engines(repair=repair, share=0.15)
        context = asked(engine, MOST)
        with pytest.MonkeyPatch.context() as patch, passes_of(engine, patch) as seen:
            context.weave()
        counted.append(sum(map(len, seen)) + ROWS_A_PASS * len(seen))
        assert (len(seen) == 1) == (i == 0)
    assert counted[0] <= counted[1] * 1.1


@pytest.mark.parametrize("recipe", ["0@3@1", "2@2@1", "0@0@1"])
def test_another_way_that_was_learned_or_calibrated_changes_nothing(
    engines: Make, recipe: str
) -> None:
    engine = engines(repair="auto", share=0.15)
    engine.weaver.calibration = replace(flat(), recipes=((0.15, recipe),))
    assert asked(engine, 40).weave().drift == 0
    other = engines(repair="auto", share=0.15, audit=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other.shadow.auditor.learner, "recipe", lambda *_: recipe)
        assert asked(other, 40).weave().drift == 0


def test_who_asks_for_just_that_gets_it(engines: Make) -> None:
    for repair in ("auto:2@1@2", "auto:0", "auto:evidence", "query", "first_k"):
        plan = asked(engines(repair=repair, share=0.15), 40).weave()
        assert plan.repaired <= 6 and plan.drift is None, repair


def test_a_bound_is_kept_by_what_is_exact(engines: Make) -> None:
    engine = engines(repair="auto", share=0.25)
    engine.weaver.calibration = flat(s25=5.0)
    plan = asked(engine, 40, max_drift=1e-9).weave()
    assert plan.repaired == 40 and plan.drift == 0
    assert tiny().fingerprint == engine.runner.fingerprint

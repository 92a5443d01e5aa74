"""Answers of whose like nothing is known are audited before time was put by: python -m pytest tests/weave/test_early.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from weave.test_trying import AUTO
from weave.test_trying import asked as asked_of_auto
from weave.test_trying_fair import loop_of

from kvweave import Engine
from kvweave.weave import learning
from kvweave.weave.shadow import EARLY
from kvweave.weave.shift import LEAST

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
BROKE: Any = loop_of(1e9)  # so much was spent on audits that none can be afforded


def made(make: Make, **more: object) -> Engine:
    engine = make(**(AUTO | {"audit": 0.01} | more))
    engine.shadow._random.random = lambda: 0.0  # type: ignore[method-assign]
    return engine


def answer(engine: Engine, seed: int = 0, **settings: Any) -> None:
    """One answer over chunks that are reused, which waits for its audit."""
    context = asked_of_auto(engine, f"c{seed}", **settings)
    context.generate(3, ignore_eos=True)
    engine.close_context(context.name)
    assert len(engine.shadow) == 1


def test_one_is_due_until_a_drift_is_promised_and_a_way_chosen(engines: Make) -> None:
    engine = made(engines)
    auditor, shadow = engine.shadow.auditor, engine.shadow
    answer(engine)
    cell, share = shadow._waiting[0].cell, shadow._waiting[0].again.share  # type: ignore[union-attr]
    for i in range(max(LEAST, learning.LEAST)):
        assert shadow.is_due(BROKE), f"{i} are known"
        auditor.saw(cell, 0.1, None)
        auditor.learner.saw(cell.tenant, share, dict.fromkeys(learning.WAYS, (0.1, 0.1)))
    assert auditor.promise(cell).bound and not auditor.learner.knows_little(cell.tenant, share)
    assert not shadow.is_due(BROKE) and shadow.is_due(loop_of(0.01))


def test_either_is_reason_enough(engines: Make) -> None:
    engine = made(engines)
    auditor, shadow = engine.shadow.auditor, engine.shadow
    answer(engine)
    sample = shadow._waiting[0]
    for _ in range(LEAST):
        auditor.saw(sample.cell, 0.1, None)
    assert shadow.is_due(BROKE)  # no way was chosen
    sample.again = None
    assert not shadow.is_due(BROKE)
    auditor._cells.clear()
    assert shadow.is_due(BROKE)  # nothing can be promised


def test_what_a_calibration_promises_or_an_alarm_broke_is_not_new(engines: Make) -> None:
    engine = made(engines)
    answer(engine)
    [sample] = engine.shadow._waiting
    sample.again, sample.promised = None, 0.1
    assert not engine.shadow.is_due(BROKE)
    sample.promised = None
    assert engine.shadow.is_due(BROKE)
    engine.shadow.auditor.saw(sample.cell, 0.1, None)
    engine.shadow.auditor._cells[sample.cell].alarm = True
    assert not engine.shadow.is_due(BROKE)


def test_early_ones_are_few_and_take_no_time_from_others(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(engines)
    shadow, loop = engine.shadow, engine.loop
    monkeypatch.setattr("kvweave.weave.shadow.EARLY", 3)
    answer(engine)
    assert len(engine.audit()) == 1 and not shadow._n_early  # the first needs no time
    spent = loop.seconds["audit"]
    assert spent > 0.01 * loop.seconds[""]
    for seed in range(1, 4):
        answer(engine, seed)
        assert len(engine.audit()) == 1 and shadow._n_early == seed
    assert loop.seconds["audit"] - shadow._ahead == pytest.approx(spent)
    answer(engine, 5)
    assert not shadow.is_due(loop)
    loop.seconds[""] = 100 * spent
    assert shadow.is_due(loop)  # as if there had been no early ones
    assert EARLY >= LEAST + learning.LEAST  # the next way's bound, too


def test_of_those_that_wait_the_new_one_goes_first_where_there_is_no_time(engines: Make) -> None:
    engine = made(engines)
    shadow = engine.shadow
    for seed in range(3):
        context = asked_of_auto(engine, f"c{seed}")
        context.generate(3, ignore_eos=True)
        engine.close_context(context.name)
    assert len(shadow) == 3
    old, new, _ = shadow._waiting
    old.again, old.promised = None, 0.1
    engine.loop.seconds["audit"] = 1e9
    engine.audit()
    assert new not in shadow._waiting and old in shadow._waiting
    engine.loop.seconds["audit"] = 0.0
    engine.audit()
    assert old not in shadow._waiting

"""`auto` with the options that its model was measured with: python -m pytest tests/weave/test_recipes.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conftest import tiny
from weaving import again, chat, flat, passes_of, text

from kvweave import Context, Engine
from kvweave.errors import InvalidArgument
from kvweave.weave.approximate import cell_of
from kvweave.weave.calibration import RANKED, Calibration, options
from kvweave.weave.plan import Plan
from kvweave.weave.recipes import RECIPES, USUAL
from kvweave.weave.repair import Auto, strategy

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")


def told(recipe: str, **bounds: float) -> Calibration:
    known = flat(**bounds) if bounds else Calibration(tiny().fingerprint, 0.0, 0, ())
    return replace(known, recipes=((0.25, recipe),))


def repaired(context: Context, plan: Plan) -> list[int]:
    found = np.flatnonzero(context.session.state.repaired[:65])  # behind these stands the question
    assert plan.repaired == len(found)
    return [int(slot) for slot in found]


def woven(
    make: Make, repair: str, known: Calibration | None = None, n: int = 4, **options: object
) -> list[int]:
    """The rows that a weave of forty stale ones repairs."""
    engine = make(share=0.25)
    engine.weaver.calibration = known
    context = chat(engine, "c", [20, 20, 20], repair=repair, **options)
    context.append(text(n, 99))
    return repaired(context, context.weave())


@pytest.mark.slow
def test_each_recipe_is_what_it_is_asked_for_by_name(engines: Make) -> None:
    found = {r: woven(engines, f"auto:{r}") for r in RECIPES}
    for recipe, rows in found.items():
        assert woven(engines, "auto", told(recipe)) == rows, recipe
        assert woven(engines, "auto:evidence", told(recipe)) == woven(
            engines, f"auto:{recipe}@evidence"
        )
    assert woven(engines, "auto") == woven(engines, "auto", told(USUAL)) == found[USUAL]
    assert len({tuple(rows) for rows in found.values()}) > 3


def test_who_names_options_gets_them(engines: Make) -> None:
    for named in ("auto:0", f"auto:{USUAL}", "auto:2@0", "query", "first_k"):
        assert woven(engines, named, told("0@3@1")) == woven(engines, named)


def test_a_round_more_is_a_pass_more(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    n_passes = []
    for i, rounds in enumerate((1, 2, 3)):
        engine = engines(share=0.25)
        context = chat(engine, f"c{i}", [20, 20, 20], repair=f"auto:0@0@{rounds}")
        context.append(text(4, 99))
        with passes_of(engine, monkeypatch) as seen:
            context.weave()
        n_passes.append(len(seen))
    assert n_passes == [2, 3, 4]


@pytest.mark.parametrize("rounds, each", [(0, 5), (1, 11)])  # the four of the question, two drafted
def test_three_thirds_are_first_rows_and_nobody_looks(  # and six of a round are twelve more
    engines: Make, monkeypatch: pytest.MonkeyPatch, rounds: int, each: int
) -> None:
    engine = engines(share=0.25)
    context = chat(engine, "c", [20, 20, 20], repair=f"auto:0@3@{rounds}")
    context.append(text(4, 99))
    with passes_of(engine, monkeypatch) as seen:
        plan = context.weave()
    first = [*range(25, 25 + each), *range(45, 45 + each)]
    assert plan.repaired == 2 * each and seen == [[*first, 65, 66, 67, 68]]


def test_three_thirds_of_a_wide_share_are_all_rows(engines: Make) -> None:
    engine = engines(share=0.25)
    context = chat(engine, "c", [20, 20, 20])
    whole = again(engine, "whole", context, repair="auto:0@3@1", share=0.9)
    whole.append(text(4, 98))
    assert whole.weave().repaired == 40 and whole.check().kl < 1e-12


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bound_takes_no_more_rows_than_the_share(engines: Make, recipe: str) -> None:
    """All that was hedged is more than what probes leave of the budget."""
    engine = engines(repair="auto", share=0.25)
    engine.weaver.calibration = told(recipe, _25=0.5)
    context = chat(engine, "c", [20, 20, 20])
    context.append(text(4, 99))
    plan = context.weave()
    assert 8 <= plan.repaired <= 12 and plan.drift == 0.5 and plan.evidence is not None
    assert all(np.isfinite(value) for value in plan.evidence.values())
    engine.weaver.calibration = told(recipe)  # without bounds nothing can be promised
    with pytest.raises(InvalidArgument, match="no calibration"):
        again(engine, "twin", context, repair="auto", max_drift=0.5).weave()


@pytest.mark.parametrize("recipe", [None, USUAL, "0@3@1", "0@0@1"])
@pytest.mark.parametrize("sizes, n", [([20, 20, 20], 4), ([20, 20, 20], 50), ([90, 90, 90], 4)])
def test_who_wants_nothing_repaired_pays_for_nothing(
    engines: Make, monkeypatch: pytest.MonkeyPatch, recipe: str | None, sizes: list[int], n: int
) -> None:
    """It looked all the same; what that would have computed went to first rows; few rows were repaired whole."""
    engine = engines(repair="auto", share=0.0)
    engine.weaver.calibration = None if recipe is None else told(recipe)
    monkeypatch.setattr(Auto, "weighs", True)
    context = chat(engine, "c", sizes)
    context.append(text(n, 99))
    with passes_of(engine, monkeypatch) as seen:
        plan = context.weave()
    assert plan.repaired == 0 and [len(slots) for slots in seen] == [n] and plan.drift is None


@pytest.mark.parametrize("name", RANKED)
def test_a_way_that_is_a_strategy_chooses_and_computes_as_it(
    engines: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = []
    for repair, known in ((name, None), (f"auto:{name}", None), ("auto", told(name))):
        engine = engines(share=0.25)
        engine.weaver.calibration = known
        context = chat(engine, "c", [20, 20, 20], repair=repair)
        context.append(text(4, 99))
        with passes_of(engine, monkeypatch) as passes:
            context.weave()
        seen.append(passes)
    assert seen[0] == seen[1] == seen[2] and sum(map(len, seen[0])) > 4
    assert options(name) == name and strategy(f"auto:{name}").measured_as == ""
    for wrong in ("auto:rollout", f"auto:2@1@2@{name}", f"auto:{name}@1@1@1"):
        with pytest.raises(InvalidArgument, match="thirds or rounds"):
            strategy(wrong)


def test_no_round_is_for_who_does_not_look() -> None:
    assert options("0@3@0") == "0@3@0" and strategy("auto:0@3@0").measured_as == ""
    with pytest.raises(ValueError, match="no options of auto"):
        options("2@2@0")
    for recipe in ("2@2@0", "2@0@0"):
        with pytest.raises(InvalidArgument, match="0 is below 1"):
            strategy(f"auto:{recipe}")


def test_rows_that_stood_among_others_come_after_those_that_did_not(engines: Make) -> None:
    engine = engines(share=0.25)
    context = chat(engine, "c", [20, 20, 20], repair="auto:0@3@1", prune="evict")
    context.append(text(4, 99))
    assert context.weave().repaired == 22
    context.drop(2)
    context.append(text(4, 98))
    assert context.weave().n_tokens == context.n_tokens


def test_audits_of_one_choice_say_nothing_of_another(engines: Make) -> None:
    engine = engines(repair="auto", share=0.25)
    context = chat(engine, "c", [20, 20, 20])
    context.append(text(4, 99))
    session, cells = context.session, []
    plan = context.weave()
    for recipe in ("0@3@1", "2@0@1", None):
        engine.weaver.calibration = None if recipe is None else told(recipe)
        wish = session.wish(session.strategy, 0.25, None)
        cells.append(cell_of(plan, session.strategy, wish, session.state))
    assert len(set(cells)) == 3 and {c.strategy for c in cells if c is not None} == {"auto"}

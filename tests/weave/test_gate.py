"""The gate: what it saw, what it bounds, and that a bound is kept or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weaving import EXACT, WIDE, ZERO, chat, flat, rows, tensors, text

from kvweave import Context, Engine
from kvweave.errors import CorruptChunk, InvalidArgument, ModelMismatch
from kvweave.weave.calibration import Calibration, Curve, Evidence
from kvweave.weave.repair.auto import PROBES

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
SEEN = Evidence(0.25, 0.1, 0.2, 0.3, 0.4, 0.5)


def gated(make: Make, calibration: Calibration | None = None, **options: object) -> Context:
    engine = make(share=0.25, repair="auto")
    engine.weaver.calibration = calibration
    context = chat(engine, "c", [20, 20, 20], **options)  # behind its base the first is exact
    context.append(text(4, 99))
    return context


def test_a_bound_is_that_of_the_first_edge_not_below_the_score() -> None:
    weights = (1.0, 0.0, 0.0, 0.0, 0.0, 2.0)  # the logarithm of `moved`, plus 2
    curve = Curve(0.05, 0.15, weights, (0.5, 1.5), (0.01, 0.2), *WIDE)
    moved = [replace(SEEN, moved=m) for m in (0.01, 0.1, 1.0)]
    assert [curve.bound(e) for e in moved] == [0.01, 0.2, float("inf")]


def test_of_evidence_unlike_what_was_calibrated_nothing_is_known(engines: Make) -> None:
    curve = Curve(0.25, 0.25, ZERO, (0.0,), (0.01,), (-9.0,) * 5, (9.0, 9.0, -3.0, 9.0, 9.0))
    assert curve.bound(replace(SEEN, stale=1e-4)) == 0.01
    assert curve.bound(SEEN) == float("inf")
    strange = replace(flat(), curves=(curve,))
    context = gated(engines, strange)
    plan = context.weave()
    assert plan.evidence is not None and plan.evidence["stale"] > 1e-3
    assert plan.drift is None and plan.repaired == 10
    assert gated(engines, strange, max_drift=0.1).weave().repaired == 40


def test_without_a_calibration_the_drift_is_unknown_and_evidence_is_there_for_who_asks(
    engines: Make,
) -> None:
    assert gated(engines).weave().evidence is None, "nothing would be made of it"
    context = gated(engines, repair="auto:evidence")
    plan = context.weave()
    assert plan.drift is None and plan.counts()["drift"] is None and "drift unknown" in str(plan)
    assert plan.evidence is not None and plan.evidence["share"] == 0.25
    assert plan.repaired == 10 and plan.prefilled == 4  # random rows are among the share
    assert 0 < plan.evidence["moved"] <= plan.evidence["moved_max"]
    assert 0 < plan.evidence["left"] < 1 and plan.evidence["stale"] > 0


def test_the_random_rows_are_an_unbiased_few() -> None:
    assert 0 < PROBES <= 10 // 2


def test_under_the_bound_nothing_more_is_repaired(engines: Make) -> None:
    context = gated(engines, flat(_25=0.01, _50=0.005), max_drift=0.02)
    plan = context.weave()
    assert plan.repaired == 10 and plan.drift == 0.01
    assert "drift at most 0.01" in plan.explain()


def test_over_the_bound_the_smallest_share_that_keeps_it_is_taken(engines: Make) -> None:
    context = gated(engines, flat(_25=0.5, _50=0.05, _75=0.01), max_drift=0.1)
    plan = context.weave()
    assert 20 <= plan.repaired <= 20 + PROBES and plan.drift == 0.05


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_where_no_share_keeps_the_bound_all_rows_are_repaired_and_exact(
    engines: Make, name: str
) -> None:
    engine = engines(name, share=0.25, repair="auto")
    engine.weaver.calibration = flat(_25=0.5, _50=0.5)
    context = chat(engine, "c", [20, 20, 20], max_drift=0.1)
    context.append(text(4, 99))
    plan = context.weave()
    found = context.check()
    assert plan.repaired == 40 and plan.drift == 0.0 and all(s.exact for s in plan.spans)
    assert found.kl < 1e-12 and max(*found.k_error, *found.v_error) < EXACT


def test_a_bound_for_one_request_only(engines: Make) -> None:
    context = gated(engines, flat(_25=0.5))
    assert context.generate(max_tokens=2, max_drift=0.1).plan.repaired == 40
    context.drop("c/0")
    context.append(text(4, 98))
    answer = context.generate(max_tokens=2)
    assert 0 < answer.plan.repaired < 40 and answer.usage["kv"]["drift"] == 0.5  # type: ignore[index]


def test_without_a_question_a_bound_takes_all_rows(engines: Make) -> None:
    engine = engines(share=0.25, repair="auto")
    engine.weaver.calibration = flat(_25=0.01)
    context = chat(engine, "c", [20, 20], max_drift=0.1)
    assert context.weave().repaired == 20 and context.plan.drift == 0.0
    other = chat(engine, "d", [20, 20])
    assert other.weave().repaired == 5 and other.plan.drift is None


def test_answers_are_those_of_the_rows_in_place(engines: Make) -> None:
    """The gate computes rows ahead of the request; the answer must be that of these rows."""
    context = gated(engines)
    answer = context.generate(max_tokens=6)
    twin = gated(engines)
    twin.weave()
    again = twin.generate(max_tokens=6)  # only the last row is computed again
    assert answer.tokens == again.tokens
    assert len(context.tokens()) == len(twin.tokens()) == 75
    for mine, other in zip(tensors(rows(context)), tensors(rows(twin)), strict=True):
        assert torch.allclose(mine[:69], other[:69], atol=1e-12)


def test_a_new_question_repairs_what_earlier_ones_left(engines: Make) -> None:
    context = gated(engines)
    first = context.weave()
    context.append(text(4, 98))
    second = context.weave()
    assert first.repaired == 10 and second.repaired == round(0.25 * (40 - 10))
    assert second.prefilled == 4 and second.moved == 0


def test_all_exact_is_drift_zero_and_repairs_nothing(engines: Make) -> None:
    engine = engines(repair="auto", share=0.25)
    context = engine.context("c")
    context.append(text(9, 1))
    plan = context.weave()
    assert plan.repaired == 0 and plan.drift == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_drift": 0.1, "repair": "query"}, "repairs a fixed share"),
        ({"max_drift": 0.1, "share": 0.4}, "not calibrated for 0.4"),
        ({"max_drift": 0.1, "prune": "evict"}, "evict keeps"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(
    engines: Make, options: dict[str, object], message: str
) -> None:
    context = gated(engines, flat(_25=0.01), **options)
    before = context.tokens()
    for call in (context.weave, lambda: context.generate(max_tokens=2)):
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert context.tokens() == before and context.session.state.woven == []


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_a_bound_that_is_no_number_from_zero_up_is_refused(engines: Make, bound: float) -> None:
    context = gated(engines, flat(_25=0.01))
    before = context.tokens()
    for call in (
        lambda: gated(engines, flat(_25=0.01), max_drift=bound),
        lambda: context.weave(max_drift=bound),
        lambda: context.generate(max_tokens=2, max_drift=bound),
    ):
        with pytest.raises(InvalidArgument, match=r"max_drift: .* is not a number"):
            call()
    assert context.tokens() == before and context.session.state.woven == []


def test_a_bound_without_a_calibration_is_refused(engines: Make) -> None:
    with pytest.raises(InvalidArgument, match="no calibration") as error:
        engines(max_drift=0.1, repair="auto")
    assert "--calibrate" in str(error.value.hint)


def test_a_calibration_is_found_in_the_home_and_belongs_to_one_model(
    engines: Make, tmp_path: Path
) -> None:
    made = flat(_25=0.01)
    file = tmp_path / "home" / "calibration.json"
    file.parent.mkdir()
    made.save(file)
    assert Calibration.load(file) == made
    assert engines(home=file.parent).weaver.calibration == made
    assert engines("qwen3", calibration=None).weaver.calibration is None
    with pytest.raises(ModelMismatch):
        engines("qwen3", calibration=str(file))


@pytest.mark.parametrize("change", ["", "[]", '{"n": 1}', "curves"])
def test_a_damaged_calibration_is_refused(engines: Make, tmp_path: Path, change: str) -> None:
    file = tmp_path / "calibration.json"
    flat(_25=0.01).save(file)
    if change == "curves":
        data = json.loads(file.read_text())
        data["curves"][0]["weights"] = "no"
        change = json.dumps(data)
    file.write_text(change)
    with pytest.raises(CorruptChunk, match="not a calibration"):
        engines(calibration=str(file))

"""Answers woven again in other ways while nobody waits, and what is learned of it:
python -m pytest tests/weave/test_trying.py"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import tiny
from weaving import chat, flat, text

from kvweave import Context, Engine
from kvweave.run.base import Work
from kvweave.weave.calibration import Calibration
from kvweave.weave.learning import EARNED, EVERY, LEAST, MOST, SELDOM, WAYS, Learner
from kvweave.weave.recipes import NONE, RECIPES, USUAL
from kvweave.weave.shadow import AUDITS
from kvweave.weave.trying import Again

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
AUTO: dict[str, object] = {"repair": "auto", "share": 0.25, "audit": 1.0}
BLIND = "0@3@1"
LIKE = ("llama", "qwen3", "gemma3", "gpt_neox", "mixtral")


def asked(engine: Engine, name: str, seed: int = 0, **options: object) -> Context:
    context = chat(engine, name, [20, 20, 20], first=10 * seed, **options)
    context.append(text(6, 500 + seed))
    return context


def waiting(engine: Engine) -> Any:
    """The one answer that waits for its audit."""
    [sample] = engine.shadow._waiting
    return sample


def woven_again(engine: Engine, sample: Any, recipe: str) -> tuple[torch.Tensor, float]:
    rows = engine.runner.new_rows()
    rows.reserve(len(sample.tokens) + 2)
    steps = engine.shadow._aside(
        engine.loop, rows, 0, sample.again.weaving(rows, sample.tokens, len(sample.logits), recipe)
    )
    found = engine.loop.finish(steps)
    assert found is not None
    return found


def teaching(told: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {way: (told.get(way, 0.1), 0.05) for way in WAYS}


def taught(
    learner: Learner, n: int, tenant: str = "", share: float = 0.25, **told: float
) -> list[str]:
    """What is best after each of ``n`` answers in which first rows alone are nearest, where it changes."""
    found = teaching(told or {BLIND: 0.01})
    return [best for _ in range(n) if (best := learner.saw(tenant, share, found)) is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIKE)
def test_an_answer_woven_again_as_it_was_is_the_answer(
    engines: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept when its tokens were sampled went through the weaver, the session and the loop."""
    engine, seen = engines(name, **AUTO), set[bytes]()
    learner = engine.shadow.auditor.learner
    for i, recipe in enumerate(RECIPES):
        with monkeypatch.context() as patch:
            patch.setattr(learner, "recipe", lambda *_, recipe=recipe: recipe)
            context = asked(engine, f"c{i}")
            context.generate(5, ignore_eos=True)
        found, cost = woven_again(engine, waiting(engine), recipe)
        wanted = waiting(engine).logits
        assert found.shape == wanted.shape == (5, engine.runner.n_vocab)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9), recipe
        assert 0.05 < cost < 1.5, (recipe, cost)
        seen.add(found.numpy().round(9).tobytes())
        engine.shadow.spare()
        engine.close_context(context.name)
    assert len(seen) > 2, "the ways are all the same"


def test_what_it_costs_is_what_it_computes(engines: Make) -> None:
    """Of 71 rows, a quarter of forty is repaired. First rows alone are that and what a look is reckoned with:
    six rows of the question, a draft of two, six of a round. One round without a draft is a look
    and a pass more."""
    engine = engines(**AUTO)
    asked(engine, "c").generate(5, ignore_eos=True)
    sample = waiting(engine)
    assert woven_again(engine, sample, BLIND)[1] == pytest.approx((10 + 6 + 2 + 6) / 71)
    assert woven_again(engine, sample, "0@0@1")[1] == pytest.approx((10 + 6) / 71 + 0.004)


def test_it_leaves_no_trace(engines: Make) -> None:
    engine = engines(**AUTO)
    context = asked(engine, "c")
    context.generate(5, ignore_eos=True)
    rows = context.session.state.rows
    used = {int(r.id): (r.n_uses, r.last_used) for r in engine.table}
    ranks, charged = list(engine.shelf.policy.victims()), dict(engine.shelf.charged())
    before = [t.clone() for layer in range(len(rows.infos)) for t in rows.read(layer)]
    charged.pop(AUDITS)
    [audit] = engine.audit()
    assert engine.shadow.auditor.learner.report()[0]["n"] == 1 and audit.drift > 0
    assert {int(r.id): (r.n_uses, r.last_used) for r in engine.table} == used
    assert list(engine.shelf.policy.victims()) == ranks
    assert dict(engine.shelf.charged()) == charged and not engine.loop.requests
    after = [t for layer in range(len(rows.infos)) for t in rows.read(layer)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def answers(engine: Engine, n: int, first: int = 0, **options: object) -> None:
    for seed in range(first, first + n):
        context = asked(engine, f"c{seed}", seed, **options)
        context.generate(3, ignore_eos=True)
        engine.close_context(context.name, context.namespace)
        engine.audit(8)


def test_the_way_that_came_nearest_is_taken(engines: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: how near each way came. From then on rows are those of that way, and their audits a cell of
    their own."""
    engine = engines(**AUTO)
    names = iter(WAYS * 99)
    made = Again.weaving

    def planted(self: Again, rows: Any, tokens: Any, n_last: int, way: str) -> Any:
        assert way == next(names)
        found, _ = yield from made(self, rows, tokens, n_last, way)
        return found + (0 if way == BLIND else 1e3 * torch.eye(*found.shape)), 0.05

    learner = engine.shadow.auditor.learner
    with monkeypatch.context() as patch:
        patch.setattr(Again, "weaving", planted)
        patch.setattr("kvweave.weave.learning.LEAST", 4)
        patch.setattr("kvweave.weave.learning.EVERY", 4)
        answers(engine, 3)
        assert learner.recipe("", 0.25) is None
        answers(engine, 1, 3)
        assert learner.recipe("", 0.25) == BLIND and learner.recipe("", 0.3) is None
        answers(engine, 1, 50)
        assert f"auto:{BLIND}" in {r.cell.repair for r in engine.shadow.auditor.report()}
    asked(engine, "d", 51).generate(3, ignore_eos=True)
    found, _ = woven_again(engine, waiting(engine), BLIND)
    assert torch.allclose(found, waiting(engine).logits, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        ({"repair": "auto:2@1@2"}, {}),
        ({"repair": "query"}, {}),
        ({"rows": "int8"}, {}),
        ({}, {"prune": "evict"}),
        ({}, {"keep": "streaming:32"}),
    ],
    ids=str,
)
def test_nothing_is_tried_where_it_would_teach_nothing(
    engines: Make, options: dict[str, object], opened: dict[str, object]
) -> None:
    engine = engines(**(AUTO | options))
    learner = engine.shadow.auditor.learner
    taught(learner, LEAST)
    answers(engine, 2, **opened)
    assert learner.report()[0]["n"] == LEAST
    assert engine.shadow.auditor.report() is not None


def test_what_was_calibrated_stays(engines: Make) -> None:
    engine = engines(**AUTO)
    taught(engine.shadow.auditor.learner, LEAST)
    context, state = asked(engine, "c"), asked(engine, "d").session.state
    wish = engine.weaver.wish(state, context.session.strategy, 0.25, None)
    assert wish.recipe == BLIND
    engine.weaver.calibration = replace(flat(), recipes=((0.25, "0@0@1"),))
    assert engine.weaver.wish(state, context.session.strategy, 0.25, None).recipe == "0@0@1"
    engine.weaver.calibration = Calibration(tiny().fingerprint, 0.0, 0, (), "suite:1")
    assert engine.weaver.wish(state, context.session.strategy, 0.25, None).recipe is None
    answers(engine, 1)
    assert engine.shadow.auditor.learner.report()[0]["n"] == LEAST


def test_what_is_gone_from_memory_is_not_tried(engines: Make, tmp_path: Path) -> None:
    engine = engines(**AUTO, home=tmp_path)
    context = asked(engine, "c")
    context.generate(3, ignore_eos=True)
    engine.place("c/2", "disk")
    [audit] = engine.audit()
    assert audit.drift > 0 and not len(engine.shadow.auditor.learner)
    assert engine.shelf.tier(int(engine.table.resolve("c/2").id)) == "disk", "and nobody fetched it"
    other = asked(engine, "d", 1)
    other.generate(3, ignore_eos=True)
    engine.close_context("d")
    engine.files.rm("d/11")
    [audit] = engine.audit()
    assert audit.drift > 0 and not len(engine.shadow.auditor.learner)


def test_one_that_is_called_off_teaches_nothing_and_is_still_an_audit(engines: Make) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    task = engine.shadow.audit(engine.loop)
    request = next(task)
    for _ in range(5):  # the prefill, then four of the ways
        engine.loop.add(request)
        engine.loop.run(lambda request=request: not request.running)
        request = task.send(None)  # type: ignore[arg-type]
    engine.loop.add(request)
    engine.shadow.spare()
    assert not request.running
    with pytest.raises(StopIteration) as ended:
        task.send(None)  # type: ignore[arg-type]
    assert ended.value.value.drift > 0 and not len(engine.shadow.auditor.learner)
    assert not engine.loop.requests and AUDITS not in dict(engine.shelf.charged())


def test_a_pass_that_fails_costs_only_the_trial(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)

    def failing(*_: object) -> Iterator[Work]:
        raise OSError(errno.EIO, "planted")
        yield

    monkeypatch.setattr(Again, "_repairing", failing)
    [audit] = engine.audit()
    assert audit.drift > 0 and engine.shadow.auditor.n_failed == 0
    assert not len(engine.shadow.auditor.learner) and not engine.loop.requests


# ---- what is known


def test_chance_chooses_nothing_and_what_changes_is_followed() -> None:
    learner = Learner()
    assert taught(learner, LEAST - 1) == [] and learner.recipe("", 0.25) is None
    assert taught(learner, 1) == [BLIND] and learner.recipe("", 0.25) == BLIND
    assert taught(learner, 200) == [], "it is no news"
    assert taught(learner, 80, **{"0@0@1": 0.001}) == ["0@0@1"], "what is long ago counts less"
    assert taught(learner, 80, **dict.fromkeys(RECIPES, 0.01)) == [], "what is as good stays"
    alike = dict.fromkeys(RECIPES, 1e-07) | {BLIND: 1e-9}
    assert taught(learner, 40, "else", **alike) == [], "below a ten-thousandth all are alike"


def test_each_tenant_and_each_share_learns_alone() -> None:
    learner = Learner()
    taught(learner, LEAST, "a")
    assert learner.recipe("a", 0.25) == BLIND
    assert (
        learner.recipe("b", 0.25) is learner.recipe("a", 0.05) is learner.recipe("", 0.25) is None
    )


def test_many_tenants_do_not_fill_the_memory_and_take_nothing_from_who_is_known() -> None:
    learner = Learner()
    taught(learner, LEAST, "a")
    for i in range(200):
        taught(learner, 1, f"t{i}")
    assert len(learner) == 64 and learner.recipe("a", 0.25) == BLIND


def test_who_is_known_is_tried_seldom() -> None:
    learner = Learner()
    assert all(learner.wants("", 0.25) for _ in range(9))
    taught(learner, MOST)
    assert sum(learner.wants("", 0.25) for _ in range(40)) == 40 // SELDOM
    assert all(learner.wants("b", 0.25) for _ in range(9))


def test_what_is_no_number_teaches_nothing() -> None:
    learner = Learner()
    for wrong in (float("nan"), float("inf")):
        assert learner.saw("", 0.25, teaching({BLIND: wrong})) is None
    assert learner.saw("", 0.25, {USUAL: (0.1, 0.1)}) is None and not len(learner)


def test_it_is_kept_with_the_audits(tmp_path: Path) -> None:
    def reopened() -> Engine:
        return Engine(tiny(), home=tmp_path, **AUTO)  # type: ignore[arg-type]

    with reopened() as engine:
        answers(engine, 2)
        taught(engine.shadow.auditor.learner, LEAST, "a")
        told = engine.shadow.auditor.learner.report()
    with reopened() as engine:
        assert engine.shadow.auditor.learner.report() == told and len(told) == 2
        assert engine.shadow.auditor.learner.recipe("a", 0.25) == BLIND
    file = tmp_path / "audit.json"
    whole = json.loads(file.read_text())
    del whole["sum"]  # as before there was one
    assert whole["tried"][1]["tenant"] == "a" and len(whole["tried"][1]["roots"]) == len(WAYS)
    of_others = [{**whole["tried"][0], "roots": {"9@9@9": 1.0}, "costs": {"9@9@9": 1.0}}]
    for tried in ({}, {"tried": of_others}):  # an older one's, and of other ways
        file.write_text(json.dumps({k: v for k, v in whole.items() if k != "tried"} | tried))
        with reopened() as engine:
            assert not len(engine.shadow.auditor.learner) and len(engine.shadow.auditor) == 1


@pytest.mark.parametrize(
    "change", [{"n": -1}, {"n": 1e9}, {"share": float("nan")}, {"roots": 3}, {"n": None}, {"roots": {"2@1@2": "x"}}],
    ids=str,
)  # fmt: skip
def test_what_was_never_learned_is_refused(change: dict[str, Any]) -> None:
    learner = Learner()
    taught(learner, 3)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Learner.of([learner.report()[0] | change])
    assert Learner.of(learner.report()).report() == learner.report()


def test_a_choice_is_made_every_few_answers() -> None:
    learner = Learner()
    taught(learner, LEAST + 1, **dict.fromkeys(RECIPES, 0.1))
    assert taught(learner, EVERY - 2, **{BLIND: 1e-6}) == []
    assert taught(learner, 1, **{BLIND: 1e-6}) == [BLIND]


def test_what_computes_less_is_compared_at_what_the_usual_way_computes() -> None:
    """Half as near by half the work is no reason to change, nor is a little nearer by as much."""
    learner, told = Learner(), dict.fromkeys(WAYS, (0.09, 0.2)) | {NONE: (1.0, 0.0)}
    told |= {BLIND: (0.03, 0.4), "query": (0.06, 0.1)}
    assert [learner.saw("a", 0.1, told) for _ in range(LEAST)][-1] == "query"
    told |= {BLIND: (0.03, 0.2)}
    assert [learner.saw("b", 0.1, told) for _ in range(LEAST)][-1] == "query", "by half the work"
    told |= {"query": (0.06, 0.2)}
    assert [learner.saw("c", 0.1, told) for _ in range(LEAST)][-1] == BLIND


def test_a_way_is_taken_for_what_it_saved_and_left_when_that_is_lost() -> None:
    """As near by half the work saves nothing; what is seldom asked may need the usual way."""
    learner, told = Learner(), dict.fromkeys(WAYS, (0.01, 0.2)) | {NONE: (1.0, 0.0)}
    told[BLIND] = (0.01, 0.1)
    assert [learner.saw("a", 0.1, told) for _ in range(100)] == [None] * 100
    told[BLIND] = (0.005, 0.1)
    until = [learner.saw("b", 0.1, told) for _ in range(48)]
    assert until.index(BLIND) + 1 in (40, 48) and EARNED / 0.005 == 40
    assert learner.saw("b", 0.1, told | {BLIND: (2.0, 0.1)}) == USUAL
    assert [learner.saw("b", 0.1, told) for _ in range(48)] == [None] * 48


@pytest.mark.parametrize("rare", [0.01, 0.03, 0.1])
def test_questions_that_are_seldom_asked_cost_no_more_than_a_few_nats(rare: float) -> None:
    """Random worlds, in which most ways but the usual one are lost where a question is rare: over the usual
    one, what is learned costs a few nats in all where it does not save (90 if ways need earn nothing)."""
    worst, saved = 0.0, []
    for seed in range(12):
        random, learner, more = Random(seed), Learner(), 0.0
        plain = {way: random.uniform(0.002, 0.05) for way in WAYS}
        lost = {way: random.choice((0.0, 1.7, 1.7, 1.7)) for way in WAYS} | {USUAL: 0.0}
        for _ in range(1200):
            seldom = random.random() < rare
            found = {
                way: (plain[way] * random.uniform(0.5, 2) + seldom * lost[way], float(way != NONE))
                for way in WAYS
            }
            more += found[learner.recipe("", 0.1) or USUAL][0] - found[USUAL][0]
            learner.saw("", 0.1, found)
        worst = max(worst, more)
        saved.append(-more)
    assert worst < 10, (worst, saved)
    assert sum(saved) > 250, "it still learns what is nearer everywhere"


def test_without_a_repair_is_what_no_strategy_makes(engines: Make) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(5, ignore_eos=True)
    sample = waiting(engine)
    found, cost = woven_again(engine, sample, NONE)
    with Engine(tiny(), repair="none", audit=1.0) as other:
        asked(other, "c").generate(5, ignore_eos=True)
        first = waiting(other).logits[0]
    assert torch.allclose(found[0], first, rtol=1e-9, atol=1e-9) and cost == 0

"""`check` measures the rows that the answer saw, or says what it says where there was no answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from weaving import chat, text

from kvweave import Context, Engine
from kvweave.weave.check import Check
from kvweave.weave.session import NO_ANSWER

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")


def answered(engine: Engine, seed: int, **options: object) -> Context:
    context = chat(engine, "c", [20, 20, 12], first=10 * seed, **options)
    context.append(text(6, 500 + seed))
    context.generate(8, ignore_eos=True)
    return context


def without_an_answer(engine: Engine, context: Context) -> Check:
    """What is said of the same rows by a context that does not know the answer."""
    twin = engine.fork(context, "twin")
    assert twin.session.answered == NO_ANSWER
    found = twin.check()
    engine.close_context("twin")
    return found


VERBS = ["auto", "query", "first_k", "full", "none", "same", "lost", "drop", "tail", "more"]


def disturb(engine: Engine, context: Context, verb: str) -> None:
    """Do something after which the rows may not be those that the answer saw."""
    before = context.snapshot()
    engine.table.hold(before.parts[-1].id, "test")
    if verb == "lost":
        for part in context.parts[1:]:
            engine.shelf.drop(int(part.id))
        context.weave("full")
    elif verb == "drop":
        context.drop(2)
        context.weave()
    elif verb == "tail":
        context.drop(-1)
        context.weave()
    elif verb == "more":
        context.append(text(3, 9))
        context.weave()
    else:
        context.weave(None if verb == "same" else verb, None if verb == "same" else 0.3)
    if verb in ("drop", "tail", "more"):
        context.restore(before)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("repair", ["auto", "query", "none"])
@pytest.mark.sampled
def test_after_a_weave_it_is_the_audit_or_what_no_answer_has(
    engines: Make, repair: str, verb: str
) -> None:
    engine = engines(repair=repair, share=0.3 * (repair != "none"), audit=1.0)
    context = answered(engine, 1, denoise=verb != "lost")
    [audit] = engine.audit()
    disturb(engine, context, verb)
    twin = without_an_answer(engine, context)
    found = context.check()
    assert found.n_compared in (1, 8)
    if found.n_compared == 8:
        assert found.kl == pytest.approx(audit.drift, rel=1e-6)
    else:
        assert found.kl == pytest.approx(twin.kl, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_after_many_of_them_too(engines: Make, seed: int) -> None:
    order = random.Random(seed)
    engine = engines(repair="auto", share=0.3, audit=1.0)
    context = answered(engine, seed)
    [audit] = engine.audit()
    for _ in range(4):
        disturb(engine, context, order.choice([v for v in VERBS if v != "lost"]))
        twin, found = without_an_answer(engine, context), context.check()
        wanted = audit.drift if found.n_compared == 8 else twin.kl
        assert found.kl == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_an_answer_of_which_nothing_stays_is_not_the_one_before(engines: Make) -> None:
    engine = engines(repair="auto", share=0.3, audit=1.0)
    context = answered(engine, 1)
    [audit] = engine.audit()
    twin = engine.fork(context, "next")
    stop = twin.generate(1, ignore_eos=True).tokens[0]
    parts = context.parts
    said = context.generate(4, stop_tokens=(stop,))
    assert said.finish == "stop" and said.plan.repaired and context.parts == parts
    wanted, found = without_an_answer(engine, context), context.check()
    assert found.n_compared == 1 and found.kl == pytest.approx(wanted.kl, rel=1e-6)
    assert found.kl != pytest.approx(audit.drift, rel=1e-3)

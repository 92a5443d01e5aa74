"""Audits take what nobody else wants, and alarms reach whom they concern: found by a review."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from weaving import text

from kvweave import Engine, Sampling
from kvweave.run.base import Steps, Work
from kvweave.run.loop import Request, new_key
from kvweave.serve.guard.quota import Quota
from kvweave.weave.shadow import AUDITS

Make = Callable[..., Engine]


def ask(engine: Engine, i: int, sizes: tuple[int, ...] = (20, 20, 20), **more: Any) -> Any:
    """An answer over stored chunks of its own."""
    space = more.pop("namespace", "")
    context = engine.context(f"c{i}", denoise=False, namespace=space)
    for j, size in enumerate(sizes):
        name = f"d/{i}-{j}"
        engine.put(name, text(size, 7 * i + j), namespace=space)
        if size < 3:
            engine.place(name, "disk", codec="int4")
        context.append_chunk(name)
    context.append(text(4, 500 + i))
    answer = context.generate(3, ignore_eos=True, **more)
    engine.close_context(context.name, space)
    return answer


def alarmed(engine: Engine) -> Any:
    """Break the promise of the one cell there is."""
    [(_, known)] = engine.shadow.auditor._cells.items()
    for _ in range(30):
        known.saw(1e-5, None)
    while not known.alarm:
        known.saw(5.0, None)
    return known


def test_an_audit_under_way_slows_nobodys_prefill() -> None:
    def steps_to_first_token(audited: bool) -> int:
        engine = Engine(tiny(), repair="none", audit=1.0)
        loop = engine.loop
        loop.schedule.beside = 16  # while answers decode

        def put(n: int, background: bool, tokens: int) -> Request:
            rows = engine.runner.new_rows()
            rows.reserve(n + 50)
            slots = np.arange(n)

            def steps() -> Steps[torch.Tensor | None]:
                logits = yield Work(rows, slots % 50, slots, slots, slots[-1:])
                return None if background else logits[-1]

            sampling = None if background else Sampling(max_tokens=tokens, ignore_eos=True)
            tenant = "" if background else "b"
            made = Request(new_key(), rows, steps(), sampling, tenant, background=background)
            loop.add(made)
            return made

        if audited:
            put(300, True, 0)
        put(200, False, 400)
        for _ in range(3):
            loop.step()
        second, n = put(400, False, 5), 0
        while not second.prepared and n < 300:
            loop.step()
            n += 1
        for key in list(loop.requests):
            loop.cancel(key)
        engine.close()
        return n

    assert steps_to_first_token(True) == steps_to_first_token(False)


def test_no_chunk_loses_its_kv_to_an_audit() -> None:
    engine = Engine(tiny(), repair="none", audit=1.0, budget=2_000_000)
    n = 0
    while engine.shelf.room >= 190 * engine.runner.row_bytes:
        engine.put(f"d/{n}", text(40, n))
        n += 1
    context = engine.context("c", denoise=False)
    for i in range(3):
        context.append_chunk(f"d/{i}")
    context.append(text(4, 999))
    context.generate(4, ignore_eos=True)
    assert engine.audit() == [] and engine.shadow.auditor.n_failed == 1
    assert sum(engine.shelf.tier(r.id) != "none" for r in engine.table) >= n
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("under_way", [False, True])
def test_what_audits_hold_is_let_go_of_for_an_answer(under_way: bool) -> None:
    engine = Engine(tiny(), repair="none", audit=1.0, budget=1_000_000)
    ask(engine, 0, (60, 60))
    task = engine.shadow.audit(engine.loop)
    if under_way:
        engine.loop.add(next(task))
    context = engine.context("b", denoise=False)
    context.append(text(430, 5))
    assert len(context.generate(4, ignore_eos=True).tokens) == 4
    if under_way:
        assert not engine.loop.requests
        with pytest.raises(StopIteration):
            next(task)
    assert not len(engine.shadow) or not under_way
    engine.check_integrity()
    engine.close()


def test_a_tenants_quota_is_not_for_audits() -> None:
    engine = Engine(tiny(), repair="none", audit=1.0)
    Quota(n_bytes=120 * engine.runner.row_bytes).bound_rows(engine.shelf)
    for i in range(9):
        ask(engine, i, (20, 20), namespace="anna")
    charged = dict(engine.shelf.charged())["||audit"]
    assert charged == sum(s.n_bytes for s in engine.shadow._waiting)
    assert engine.audit(1)
    engine.close()


def test_whatever_putting_aside_raises_the_answer_is_given(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(repair="none", audit=1.0)

    def broken(*given: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(engine.shadow, "take", broken)
    assert len(ask(engine, 0).tokens) == 3


def test_an_alarm_is_for_the_answers_it_was_raised_by(tmp_path: Path) -> None:
    """Tiny chunks in a lossy codec are repaired wholly: the answer's cell is the one it was asked in."""
    engine = Engine(tiny(), repair="first_k", share=0.3, audit=1.0, home=tmp_path)
    ask(engine, 0, (20, 1, 20))
    engine.audit(9)
    known = alarmed(engine)
    told = [ask(engine, i, (20, 1, 20)).plan.alarm for i in range(1, 9)]
    assert sum(told) == 6 and known.n_answers == 8  # the others are probes
    engine.close()


def test_without_audits_a_saved_alarm_repairs_nothing(tmp_path: Path) -> None:
    with Engine(tiny(), repair="query", share=0.2, audit=1.0, home=tmp_path) as engine:
        ask(engine, 0)
        engine.audit()
        alarmed(engine)
    with Engine(tiny(), repair="query", share=0.2, home=tmp_path) as engine:
        assert engine.shadow.auditor.alarmed
        assert not any(ask(engine, i).plan.alarm for i in range(1, 5))


def test_without_a_base_no_chunk_is_of_another(engines: Make) -> None:
    with Engine(tiny(), repair="none") as engine:
        assert set(ask(engine, 0).plan.approximate) == {"reuse"}


def test_a_fork_is_audited_as_much_as_its_original(engines: Make) -> None:
    engine = engines(repair="none", audit=1.0)
    context = engine.context("c", denoise=False)
    context.session.audited = False
    assert not engine.fork(context, "twin").session.audited


def test_what_an_answer_under_way_is_chosen_from_is_charged_and_goes_first() -> None:
    engine = Engine(tiny(), repair="none", audit=1.0)
    context = engine.context("c", denoise=False)
    engine.put("d", text(9, 1))
    context.append(text(4, 2))
    context.append_chunk("d")
    turn = context.begin(Sampling(max_tokens=5, ignore_eos=True))
    held = dict(engine.shelf.charged())[AUDITS]
    assert held == engine.runner.n_vocab * engine.runner.dtype.itemsize * 64
    engine.shadow.spare()
    assert dict(engine.shelf.charged()).get(AUDITS, 0) == 0
    turn.run()
    assert not engine.shadow, "nothing is left to audit of it"
    for end in (lambda t: t.run(), lambda t: t.abandon()):
        end(context.begin(Sampling(max_tokens=2, ignore_eos=True)))
        assert dict(engine.shelf.charged()).get(AUDITS, 0) < held, "what waits is less"
    engine.check_integrity()
    engine.close()

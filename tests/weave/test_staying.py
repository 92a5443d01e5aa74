"""Chunks that cannot be moved are computed where they stand: python -m pytest tests/weave/test_staying.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
from conftest import tiny
from weaving import EXACT, text

from kvweave import Context, Engine
from kvweave.errors import CannotMove

Make = Callable[..., Engine]
NAMES = sorted(oracle.FIXED)
N = {"a": 6, "b": 9, "c": 4}


@pytest.fixture(params=NAMES)
def engine(engines: Make, request: pytest.FixtureRequest) -> Engine:
    return filled(engines(request.param))


def filled(engine: Engine) -> Engine:
    for i, (name, n) in enumerate(N.items()):
        engine.put(f"d/{name}", text(n, i))
    return engine


def hows(context: Context) -> list[tuple[str, int]]:
    return [(span.how, span.n_prefilled) for span in context.plan.spans]


def assert_exact(context: Context) -> None:
    """All of it, against our own full prefill and transformers' next token."""
    found = context.check()
    assert found.kl < 1e-12 and found.top1 == 1
    assert max(*found.k_error, *found.v_error) < EXACT
    runner = context.session.weaver.backend
    wanted = oracle.full_prefill(runner, torch.tensor(context.tokens()))[-1].argmax()
    answer = context.generate(1, temperature=0, ignore_eos=True)
    assert answer.tokens[0] == int(wanted)
    assert answer.plan.drift == 0


def test_chunks_in_any_order_are_exact_without_repair(engine: Engine) -> None:
    there = engine.compose("{d/a}{d/b}{d/c}")
    there.weave("none")
    assert hows(there) == [("prefix", 0), ("prefill", 9), ("prefill", 4)]
    assert there.plan.drift == 0
    assert_exact(there)
    other = engine.compose("{d/c}{d/a}{d/b}")
    other.weave("none")
    assert hows(other) == [("prefix", 0), ("prefill", 6), ("prefill", 9)]
    assert_exact(other)
    again = engine.compose("{d/a}{d/b}{d/c}")
    assert [span.how for span in again.preview().spans] == ["prefix", "prefill", "prefix"], (
        "of each chunk's in-context KV there is the latest"
    )
    assert_exact(again)


def test_what_stands_where_it_was_is_reused(engine: Engine) -> None:
    first = engine.compose("{d/a}{d/b}{d/c}")
    first.weave()
    second = engine.compose("{d/a}{d/b}")
    second.append(text(3, 9))
    second.weave()
    assert hows(second) == [("prefix", 0), ("prefix", 0), ("prefill", 3)]
    assert_exact(second)
    twin = engine.fork(first, "twin")
    twin.append(text(2, 10))
    assert twin.weave().prefilled == 2
    assert_exact(twin)
    assert_exact(first)


def test_an_edit_computes_what_it_shifts(engine: Engine) -> None:
    context = engine.compose("{d/a}{d/b}{d/c}")
    context.weave()
    context.insert(1, text(3, 11))
    assert context.weave().prefilled == 3 + 9 + 4
    assert_exact(context)
    context.replace(1, text(3, 12))  # what follows stands where it did, and is another's
    plan = context.weave()
    assert plan.drift == 0 and plan.prefilled >= 3 + 9 + 4
    assert_exact(context)
    context.drop(1)
    assert context.weave().drift == 0
    assert_exact(context)


def test_at_its_own_place_behind_others_it_is_approximate(engines: Make) -> None:
    engine = filled(engines("gpt2", base=text(5, 20)))  # type: ignore[arg-type]
    context = engine.context("c")
    context.append_chunk("d/a")
    assert context.weave().drift == 0
    context.replace(0, text(5, 21))
    plan = context.weave("none")
    assert [span.how for span in plan.spans] == ["prefill", "reuse"] and plan.drift is None
    assert context.check().v_error[-1] > 1e-3
    assert context.weave("full").drift == 0
    assert_exact(context)


def test_slices_stand_where_they_stood(engine: Engine) -> None:
    context = engine.context("c")
    context.append(text(3, 30))
    context.append_slice("d/b", 3, 9)
    plan = context.weave("none")
    assert [span.how for span in plan.spans] == ["prefill", "reuse"], "tokens 3 to 8, at 3 to 8"
    assert context.weave("full").drift == 0
    assert_exact(context)
    context.insert(0, text(1, 31))
    assert context.weave("none").drift == 0
    assert_exact(context)


def test_behind_a_gap_nothing_of_other_places_is_taken(engine: Engine) -> None:
    """The same neighbours at the same distances, elsewhere: rotary rows are right there."""
    whole = engine.compose("{d/a}{d/b}")
    whole.weave()
    context = engine.context("c", positions="keep")
    context.append(text(5, 40))
    context.append_chunk("d/a"), context.append_chunk("d/b")
    context.drop(0)  # and b stands behind a as it does in `whole`
    context.append(text(2, 41))
    plan = context.weave("none")
    assert plan.prefilled == 6 + 9 + 2
    found = context.check()
    assert found.kl < 1e-12 and max(*found.k_error, *found.v_error) < EXACT


@pytest.mark.slow
def test_what_an_evict_leaves_stays_where_it_is(engine: Engine) -> None:
    with pytest.raises(CannotMove, match="stay where they were computed") as refused:
        engine.context("closing", prune="evict")
    assert 'positions="keep"' in refused.value.hint
    context = engine.context("c", prune="evict", positions="keep")
    for name in N:
        context.append_chunk(f"d/{name}")
    context.weave()
    context.drop(1)
    context.append(text(2, 50))
    plan = context.weave("none")
    assert plan.prefilled == 2 and plan.spans[1].saw, "it keeps what it saw"
    assert context.check().v_error[-1] > 1e-3


def test_what_can_only_move_is_refused(engine: Engine) -> None:
    kv = engine.runner.new_kv(2)
    for tensor in (*kv.k, *kv.v):
        tensor.zero_()
    n = len(engine.table)
    for use in (
        lambda: engine.put_rows("rows", kv),
        lambda: engine.compress("d/a", "knorm:0.5"),
        lambda: engine.context("c", keep="streaming:8"),
    ):
        with pytest.raises(CannotMove, match="stay where they were computed"):
            use()
    assert len(engine.table) == n and not engine.contexts
    assert engine.can("run") and not engine.can("move")
    engine.check_integrity()


def test_after_a_restart(engines: Make, tmp_path: Path) -> None:
    with filled(Engine(tiny("opt"), home=tmp_path)):
        pass
    engine = engines("opt", home=tmp_path)
    context = engine.compose("{d/b}{d/a}")
    context.weave("none")
    assert hows(context) == [("prefix", 0), ("prefill", 6)]
    assert_exact(context)


@pytest.mark.parametrize("repair", ["rollout", "deviation", "first_k", "query", "deps", "patch"])
def test_repairs_of_what_stayed(engines: Make, repair: str) -> None:
    """Rows that stay and are stale are repaired as everywhere."""
    engine = filled(engines("gpt2", base=text(5, 60)))  # type: ignore[arg-type]
    context = engine.context("c", repair=repair, share=0.5)
    for name in N:
        context.append_chunk(f"d/{name}")
    context.append(text(6, 61))
    context.replace(0, text(5, 62))
    plan = context.weave()
    assert plan.prefilled == 5 + 9 + 4 + 6 and plan.repaired + plan.reused == 6
    context.generate(2)
    context.weave("full")
    assert_exact(context)

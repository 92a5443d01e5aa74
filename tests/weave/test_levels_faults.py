"""Faults that were found in rows of fewer bits and below memory, each as a claim about its class."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import torch
from run.backend import ids, transformers

from kvweave import Engine
from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument, OverQuota
from kvweave.keep.tokens.flexicache import FlexiCache
from kvweave.keep.tokens.spec import Keep
from kvweave.run import below
from kvweave.run.below import BelowRows
from kvweave.weave.answer import request_from

BIG, LONG = "9" * 20, "9" * 5000


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transformers("llama"), base="") as made:
        yield made


@pytest.mark.parametrize("spec", ["h2o:0.5,int8=0.5", "h2o:0.3,int8=0.3,k4v2=0.4"])
def test_shares_that_make_a_whole_leave_no_row_out(spec: str) -> None:
    """Rounded one by one, two halves of five rows were four."""
    keep = Keep.parse(spec)
    for n in range(1, 200):
        assert sum(keep.sizes(n, dict.fromkeys(("", *keep.forms), 1), 0, 1)) == n


@pytest.mark.parametrize("spec", ["knorm:8,int8=rest", "flexicache:8,overlap=0,page=2"])
def test_the_rest_is_all_others_in_every_layer(engine: Engine, spec: str) -> None:
    """With a pyramid the upper layers let go of half of them."""
    context = engine.context("c", keep=f"{spec},layers=pyramid,every=3")
    context.append(ids(60, 2).tolist())
    context.generate(max_tokens=12, ignore_eos=True)
    assert context.session.state.rows.n_freed == 0 and context.session.state.rows.forms
    assert "freed" not in context.plan.approximate


@pytest.mark.parametrize(
    "spec",
    [
        *(f"h2o:{size}" for size in (BIG, LONG, BIG + "GiB", "1" * 400 + ".0GiB")),
        *(f"h2o:8,{form}={size}" for form in ("int8", "below") for size in (BIG, LONG, "nan")),
        f"h2o:8,every={LONG}",
        *(f"flexicache:8,top={value}" for value in ("nan", "inf", "1e308")),
        f"flexicache:8,page={BIG}",
        f"expected_attention:8,ahead={BIG}",
        *("rkv:8,pool=0", "snapkv:8,pool=0", "kvzip:8,span=0", f"snapkv:8,window={BIG}"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(spec: str) -> None:
    """It was read, and failed an answer with whatever torch or Python said."""
    with pytest.raises(InvalidArgument):
        Keep.parse(spec)


def test_a_size_without_end_is_no_size() -> None:
    with pytest.raises(InvalidArgument):
        n_bytes("1" * 400 + ".0GiB")


def test_rkv_without_a_window_goes_by_what_rows_say_alone(engine: Engine) -> None:
    context = engine.context("c", keep="rkv:8,window=0,every=3")
    context.append(ids(40, 2).tolist())
    assert len(context.generate(max_tokens=9, ignore_eos=True).tokens) == 9


@pytest.mark.parametrize("spec", ["h2o:24,every=3", "rkv:24,window=4,every=3"])
def test_room_for_raw_rows_comes_on_top_of_what_policies_count(engine: Engine, spec: str) -> None:
    """A prompt that is exact has its raw rows kept: their charge took the place of the others."""
    context = engine.context("c", keep=spec)
    context.append(ids(3, 2).tolist())
    turn, state = context.begin(*request_from(9, {"ignore_eos": True})), context.session.state
    while not turn.done:
        engine.loop.step()
        assert state.n_bytes <= dict(engine.shelf.charged()).get(state.name, 0)
    turn.finish()


@pytest.mark.slow
def test_rows_come_back_only_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that turn unstable want all rows: more than was charged, or than the budget has."""
    calls = iter(range(10_000))

    def stable(self: FlexiCache, by_query: object) -> torch.Tensor:
        return torch.full((2,), next(calls) <= 20, device=oracle.DEVICE)

    monkeypatch.setattr(FlexiCache, "_stable", stable)
    runner = transformers("llama")
    with Engine(runner, base="", budget=230 * runner.row_bytes) as engine:
        context = engine.context("c", keep="flexicache:16,page=4,every=3")
        other = engine.context("d")
        context.append(ids(120, 2).tolist())
        turn, state = context.begin(*request_from(60, {"ignore_eos": True})), context.session.state
        for i in range(1000):
            if turn.done:
                break
            engine.loop.step()
            assert state.n_bytes <= dict(engine.shelf.charged()).get(state.name, 0)
            if i == 8:
                other.append(ids(90, 3).tolist())
                other.weave()
        assert len(turn.finish().tokens) == 60 and next(calls) > 21
        engine.check_integrity()


def test_what_a_quota_does_not_allow_stays_unread(engine: Engine) -> None:
    """As what the budget does not: the answer goes on."""
    context = engine.context("c", keep="kvzip:16,every=4")
    context.append(ids(60, 2).tolist())
    turn = context.begin(*request_from(30, {"ignore_eos": True}))
    while len(turn._weaving.request.out) < 6:
        engine.loop.step()

    def refuse(holder: str, n: int) -> None:
        raise OverQuota("bytes", n, 0, 0)

    engine.shelf.may_charge = refuse
    while not turn.done:
        engine.loop.step()
    assert len(turn.finish().tokens) == 30


def test_below_a_device_is_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when room grows: the copy was made like rows of the host, in a file."""
    monkeypatch.setattr(below.SpillFile, "of", lambda *_: pytest.fail("a file"))
    like, device = torch.zeros(4, 8), torch.device("meta")
    rows = BelowRows.empty((like, like), 2, 16, device)
    assert rows.grown(32, 16).there.shape == (2, 32)
    assert rows.without([np.arange(3)] * 2).device == device


def test_what_is_left_of_a_context_that_lost_rows_says_why_it_is_not_exact() -> None:
    """Its own rows were computed beside others that went, and these were dropped since."""
    with Engine(transformers("llama"), base="") as engine:
        context = engine.context("c", keep="h2o:12,sinks=4,every=4", repair="none")
        for n in (3, 40):
            context.append(ids(n, n).tolist())
        context.generate(max_tokens=6, ignore_eos=True)
        assert "freed" in context.plan.approximate
        while len(context.parts) > 1:
            context.drop(1)
        plan = context.weave()
        assert context.session.state.rows.n_freed == 0
        assert plan.drift == 0 or plan.approximate

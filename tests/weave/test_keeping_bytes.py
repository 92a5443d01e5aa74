"""Claims about what a token policy keeps besides rows: it is in the budget with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass

import numpy as np
import pytest
import torch
from run.backend import ids, transformers

from kvweave import Engine
from kvweave.errors import ContextTooLong, OverBudget
from kvweave.keep.tokens import POLICIES
from kvweave.run.rotary import Rotation
from kvweave.weave.answer import request_from
from kvweave.weave.keeping import Keeper

EVERY = 8


def tensors(of: object) -> Iterator[torch.Tensor]:
    """Yield all tensors that can be reached from a thing's fields."""
    if isinstance(of, Rotation):
        return  # the model's
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for each in of:
            yield from tensors(each)
    elif is_dataclass(of):
        for name in of.__slots__:
            yield from tensors(getattr(of, name))
    elif type(of).__module__.startswith("kvweave.keep.tokens"):
        yield from tensors(list(vars(of).values()))


def counted(engine: Engine, name: str = "c") -> int:
    """Return the bytes of a context's statistics, found without asking anybody; 0 without a watch."""
    keeper = engine.get_context(name).session.state.keeper
    assert keeper is not None
    return 0 if keeper.watch is None else sum(t.nbytes for t in tensors(keeper.watch.tally))


def charged(engine: Engine) -> dict[str, int]:
    return dict(engine.shelf.charged())


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transformers("llama"), base="") as made:
        yield made


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("more", ["", ",heads=ada,layers=pyramid"])
@pytest.mark.sampled
def test_statistics_are_charged_with_the_rows_and_released_with_them(
    engine: Engine, name: str, more: str
) -> None:
    """At each step of two answers no more is there than is charged, and behind them just that."""
    more = "" if name == "streaming" else more
    context = engine.context("c", keep=f"{name}:40,every={EVERY}{more}", denoise=False)
    state = context.session.state
    for n_prompt, n_new in ((60, 30), (5, 12)):
        context.append(ids(n_prompt, n_new).tolist())
        turn = context.begin(*request_from(n_new, {"ignore_eos": True}))
        while not turn.done:
            engine.loop.step()
            assert state.rows.n_bytes + counted(engine) <= charged(engine)["c"]
        turn.finish()
        assert state.rows.n_bytes + counted(engine) == charged(engine)["c"] == state.n_bytes
    fresh, n = Keeper(state.keeper.keep, engine.runner), state.rows.n
    foretold = fresh.bytes_for(state.rows, n, n, EVERY)
    assert (fresh.watch is not None) == (counted(engine) > 0) and counted(engine) <= foretold
    engine.fork(context, "d")
    assert charged(engine)["d"] == engine.get_context("d").session.state.n_bytes
    assert counted(engine, "d") == counted(engine)
    context.drop(0)  # all rows are placed anew, those too that had been freed
    context.append(ids(20, 3).tolist())
    turn = context.begin(*request_from(9, {"ignore_eos": True}))
    while not turn.done:
        assert state.rows.n_bytes + counted(engine) <= charged(engine)["c"]
        engine.loop.step()
    turn.finish()
    assert state.rows.n_bytes + counted(engine) == charged(engine)["c"]
    engine.check_integrity()
    for each in "cd":
        engine.close_context(each)
    assert not charged(engine)


def test_no_room_for_statistics_is_no_room() -> None:
    """A budget that takes the rows and not what is known of them refuses before a row changes."""
    model, rows = transformers("llama"), 66
    with Engine(model, budget=rows * model.row_bytes) as small:
        context = small.context("c", keep="expected_attention:5000", denoise=False)
        context.append(ids(60).tolist())
        with pytest.raises(OverBudget):
            context.generate(max_tokens=1)
        assert context.session.state.rows.n == 0


# ---- what `kvzip` needs to read decoded tokens again


def newest_are_there(engine: Engine, n: int) -> bool:
    rows = engine.get_context("c").session.state.rows
    newest = np.arange(rows.n - n, rows.n)
    layers = range(len(engine.runner.layers))
    return all(np.isin(newest, own).all() for i in layers for own in rows.kept(i))


def test_the_room_to_read_again_is_accounted_and_given_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page and what says where it stands are behind the rows while they are read, nothing after."""
    context = engine.context("c", keep=f"kvzip:24,every={EVERY}", denoise=False)
    context.append(ids(100, 2).tolist())
    turn, state = context.begin(*request_from(100, {"ignore_eos": True})), context.session.state
    keeper = state.keeper
    forward, most, row = engine.runner.forward, [0], engine.runner.row_bytes

    def watched(works):
        if turn.plan is not None and all(work.rows is state.rows for work in works):
            assert state.n_bytes <= charged(engine)["c"]
            most[0] = max(most[0], state.rows.n_bytes)
        return forward(works)

    while not turn._weaving.request.out:
        engine.loop.step()
    monkeypatch.setattr(engine.runner, "forward", watched)
    while not turn.done:
        engine.loop.step()
        assert state.rows.n_bytes <= (24 + EVERY) * row
        if EVERY < len(turn._weaving.request.out):
            known = keeper.bytes_for(state.rows, state.rows.n, 100, 100)
            assert charged(engine)["c"] <= (24 + EVERY) * row + known
    assert (24 + 2 * EVERY) * row < most[0] <= (24 + 2 * EVERY + 8) * row
    turn.finish()
    engine.check_integrity()


def test_at_the_end_of_the_positions_the_newest_stay(engine: Engine) -> None:
    """What cannot be read again stays, up to half of the budget, and the oldest of it goes."""
    limit, unread = engine.runner.limit, []
    context = engine.context("c", keep=f"kvzip:24,every={EVERY}", denoise=False)
    context.append(ids(limit - 60, 2).tolist())
    keeper = context.session.state.keeper
    assert keeper is not None
    turn = context.begin(*request_from(60, {"ignore_eos": True}))
    while not turn.done:
        engine.loop.step()
        if turn._weaving.request.out:
            unread.append(keeper._unread)
            assert newest_are_there(engine, min(12, keeper._unread))
    assert len(turn.finish().tokens) == 60
    assert max(unread[:40]) < EVERY and unread[-1] > 2 * EVERY
    engine.check_integrity()
    with pytest.raises(ContextTooLong):
        context.generate(max_tokens=1)


def test_where_memory_is_short_the_newest_stay_until_they_can_be_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = engine.context("c", keep=f"kvzip:24,every={EVERY}", denoise=False)
    context.append(ids(100, 2).tolist())
    turn, keeper = (
        context.begin(*request_from(60, {"ignore_eos": True})),
        context.session.state.keeper,
    )
    assert keeper is not None
    charge, unread = engine.shelf.charge, set()

    def short(name: str, n_bytes: int) -> None:
        if 8 < len(turn._weaving.request.out) < 40 and n_bytes > charged(engine)[name]:
            raise OverBudget(n_bytes, n_bytes - 1, 0)
        charge(name, n_bytes)

    monkeypatch.setattr(engine.shelf, "charge", short)
    while not turn.done:
        engine.loop.step()
        unread.add(keeper._unread)
        assert newest_are_there(engine, min(12, keeper._unread))
    assert len(turn.finish().tokens) == 60
    assert max(unread) >= 3 * EVERY and keeper._unread < 2 * EVERY
    engine.check_integrity()

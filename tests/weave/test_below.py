"""Claims about contexts of which some rows rest below memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from needs import only_on_cpu
from run.backend import ids, transformers

from kvweave import Engine
from kvweave.errors import NoSpace, StoreError
from kvweave.run.below import Sheet
from kvweave.weave.answer import request_from

EVERY = 8
SPEC = f"flexicache:24,overlap=0,page=4,every={EVERY}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transformers("llama"), base="") as made:
        yield made


def test_rows_go_below_and_come_back(engine: Engine) -> None:
    """Memory is the budget and a page; what comes back is what went, as a whole prefill has it."""
    context = engine.context("c", keep=SPEC)
    context.append(ids(200, 2).tolist())
    turn = context.begin(*request_from(120, {"ignore_eos": True}))
    most, state = (24 + EVERY + 1) * engine.runner.row_bytes, context.session.state
    was: list[set[int]] = []
    while not turn.done:
        engine.loop.step()
        if len(turn._weaving.request.out) > 0:
            assert state.rows.n_bytes <= most
            assert state.n_bytes <= dict(engine.shelf.charged())[state.name]
            below = state.rows.layers[1].below
            was.append(set(below.slots(0).tolist()))
    turn.finish()
    engine.check_integrity()
    back = {slot for a, b in pairwise(was) for slot in a - b}
    assert back, "nothing came back"
    assert state.rows.n_freed == 0 and context.plan.drift is None
    assert context.plan.approximate == {"rows:below": 200}
    assert "below memory" in context.plan.explain()
    # layer 0 does not depend on what was seen: its rows are those of a whole prefill, wherever they are
    whole = engine.context("d")
    whole.append(context.tokens())
    whole.weave()
    n = min(state.rows.n, whole.session.state.rows.n)
    for mine, its in zip(state.rows.read(0), whole.session.state.rows.read(0), strict=True):
        assert torch.allclose(mine[:n], its[:n], atol=1e-6)


@pytest.mark.slow
def test_a_fork_has_rows_below_of_its_own(engine: Engine) -> None:
    """Both go on, one after the other: neither writes over what the other wrote."""
    context = engine.context("c", keep=SPEC)
    context.append(ids(150, 2).tolist())
    context.generate(max_tokens=20, ignore_eos=True)
    twin, other = engine.fork(context, "d"), engine.fork(context, "e")
    told = []
    for each, seed in ((twin, 7), (context, 8), (other, 7)):
        each.append(ids(30, seed).tolist())
        told.append(each.generate(max_tokens=40, ignore_eos=True).tokens)
        engine.check_integrity()
    assert told[0] == told[2] != told[1]
    context.drop(0)
    context.append(ids(9, 9).tolist())
    assert len(context.generate(max_tokens=20, ignore_eos=True).tokens) == 20
    engine.check_integrity()


@only_on_cpu("of a GPU rows below memory rest in the host's, and not in a file")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_device_that_is_full_is_said(
    engine: Engine, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is lost: what was said is there, and is answered when there is room."""
    context = engine.context("c", keep=SPEC)
    context.append(ids(150, 2).tolist())

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError) as told:
            context.generate(max_tokens=9, ignore_eos=True)
        assert isinstance(told.value, NoSpace) == (code == errno.ENOSPC) and told.value.hint
    engine.check_integrity()
    assert context.tokens() == ids(150, 2).tolist()
    answer = context.generate(max_tokens=30, ignore_eos=True)
    assert len(answer.tokens) == 30 and context.session.state.rows.forms["below"] > 0
    engine.check_integrity()


def test_memory_of_the_host_that_is_full_is_said(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows of a GPU go."""
    context = engine.context("c", keep=SPEC)
    context.append(ids(150, 2).tolist())
    real = Sheet.new
    with monkeypatch.context() as patched:
        patched.setattr(
            Sheet, "new", lambda shapes, dtype, filed: real([(1, 1 << 50, 9)], dtype, False)
        )
        with pytest.raises(NoSpace, match="rows below memory in the host's") as told:
            context.generate(max_tokens=9, ignore_eos=True)
        assert told.value.hint
    engine.check_integrity()
    answer = context.generate(max_tokens=30, ignore_eos=True)
    assert len(answer.tokens) == 30 and context.session.state.rows.forms["below"] > 0
    engine.check_integrity()


def test_no_file_is_left(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = engine.context("c", keep=SPEC)
    context.append(ids(150, 2).tolist())
    context.generate(max_tokens=9)
    assert context.session.state.rows.forms["below"] > 0 and not list(tmp_path.iterdir())

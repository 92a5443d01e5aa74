"""Claims about what is left when something breaks in the middle of a verb, or comes from elsewhere.

Each was false once: found by the world of random verbs (tests/world) with faults in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from world import models

from kvweave import Context, Engine, Sampling
from kvweave.errors import ChunkNotFound
from kvweave.run.pool import PooledRows
from kvweave.store.kv import KV
from kvweave.weave.maker import Maker

EXACT = 1e-9
ONE = Sampling(max_tokens=1, ignore_eos=True)


def ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, 64, (n,), generator=generator).tolist()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], repair="none") as made:
        made.put_many([(f"d{i}", ids(8, i)) for i in range(4)])
        yield made
        made.check_integrity()


def breaks(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, error: type[BaseException], n: int = 1
) -> None:
    """Let call ``n`` of a method raise, and only that one."""
    whole, left = getattr(kind, method), [n]

    def half(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error("it broke")
        return whole(*args, **options)

    monkeypatch.setattr(kind, method, half)


def keeps_its_word(context: Context) -> None:
    """Drift 0 is claimed of what is exact only."""
    plan, found = context.weave(), context.check()
    if plan.drift == 0:
        assert max(found.kl, *found.k_error, *found.v_error) < EXACT, plan.explain()


def test_an_answer_is_there_once_though_its_canonical_kv_cannot_be_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = engine.context("c")
    context.append(ids(5, 9))
    breaks(monkeypatch, Maker, "canonicalise", torch.OutOfMemoryError)
    turn = context.begin(ONE)
    answer = turn.run()
    assert turn.finish() is answer
    assert [part.n for part in context.parts[-2:]] == [5, 1]
    keeps_its_word(context)


def test_an_interrupt_behind_an_answer_leaves_it_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = engine.context("c")
    names = {entry.name for entry in engine.files.ls()}
    breaks(monkeypatch, Maker, "canonicalise", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        context.ask("t9 t10", 2)
    made = {entry.name for entry in engine.files.ls()} - names
    assert made == {part.name for part in context.parts if part.name != "base"} != set()
    context.ask("t11", 2)
    keeps_its_word(context)


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("method", ["run", "cancel"])
@pytest.mark.sampled
def test_an_answer_whose_text_cannot_be_taken_in_has_not_been(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int, chat: bool, method: str
) -> None:
    context = engine.context("c", prune="evict")
    for i in range(3):
        context.append_chunk(f"d{i}")
    context.append(ids(4, 9))
    context.weave("full")
    context.drop("d0")
    parts, names = context.parts, [entry.name for entry in engine.files.ls()]
    turn = context.begin(Sampling(max_tokens=3, ignore_eos=True), chat=chat)
    while turn.plan is None or len(turn._weaving.request.out) < 2:
        engine.loop.step()
    with monkeypatch.context() as patched:
        breaks(patched, KV, "clone", torch.OutOfMemoryError, n)
        try:
            getattr(turn, method)()
        except torch.OutOfMemoryError:
            assert context.parts == parts
            assert [entry.name for entry in engine.files.ls()] == names
    keeps_its_word(context)
    context.check_integrity()


def test_what_broke_leaves_frozen_parts_the_kv_they_had(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows recomputed by a weave that was not complete are no rows of the parts as they were."""
    for n in range(1, 8):
        context = engine.context(f"c{n}", prune="evict")
        for i in (0, 1, 2):
            context.append_chunk(f"d{i}")
        context.append(ids(4, 9))
        context.weave("full")
        before = context.snapshot()
        context.drop("d0")
        with monkeypatch.context() as patched:
            breaks(patched, KV, "clone", torch.OutOfMemoryError, n)
            try:
                context.weave("full")
            except torch.OutOfMemoryError:
                pass
        context.restore(before)
        keeps_its_word(context)


def test_what_is_kept_of_rows_goes_with_them(engine: Engine) -> None:
    """Of two parts of one chunk the first goes: the second stands on its rows, and has its KV."""
    context = engine.context("c", prune="evict")
    for tokens in (ids(8, 1), ids(4, 2), ids(8, 1)):
        context.append(tokens)
    context.weave("full")
    context.drop(-2, mode="evict")
    context.weave("full")
    context.drop(-2, mode="evict")
    context.weave("full")
    keeps_its_word(context)
    context.begin(ONE).abandon()
    keeps_its_word(context)


def test_ids_of_another_engine_mean_nothing_here(engine: Engine) -> None:
    here = engine.context("here")
    here.append_chunk("d0")
    parts = here.parts
    with Engine(engine.runner, repair="none") as other:
        there = other.context("there")
        there.append(ids(5, 20))
        with pytest.raises(ChunkNotFound):
            here.restore(there.snapshot())
        assert here.parts == parts
        other.put_many([(f"d{i}", ids(8, i)) for i in range(4)])
        same = Engine(engine.runner, repair="none")
    with same:
        same.put_many([(f"d{i}", ids(8, i)) for i in range(4)])
        there = same.context("there")
        there.append_chunk("d3")
        here.restore(there.snapshot())
    assert here.tokens()[-8:] == ids(8, 3)


def test_parts_of_another_context_are_as_if_appended_here(engine: Engine) -> None:
    gaps = engine.context("gaps", positions="keep", prune="evict")
    for i in range(3):
        gaps.append_chunk(f"d{i}")
    gaps.weave("full")
    gaps.drop("d1")
    gaps.weave()
    here = engine.context("here")
    here.restore(gaps.snapshot())
    here.insert(len(here.parts) - 1, ids(30, 7))
    here.weave("full")
    keeps_its_word(here)
    engine.check_integrity()
    assert not any(part.frozen for part in here.parts)


Verb = Callable[[Context], object]


@pytest.mark.parametrize("verb", [lambda c: c.weave("full"), lambda c: c.begin(ONE)])
@pytest.mark.parametrize(("method", "n"), [("place", 1), ("grown", 1), ("grown", 3)])
def test_what_could_not_be_placed_is_not_accounted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, verb: Verb, method: str, n: int
) -> None:
    context = engine.context("c")
    for i in range(4):
        context.append_chunk(f"d{i}")
    parts = context.parts
    with monkeypatch.context() as patched:
        kept = type(context.session.state.rows.layers[0])
        if kept is PooledRows and method == "place":
            method = "place_at"
        breaks(patched, kept, method, torch.OutOfMemoryError, n)
        with pytest.raises(torch.OutOfMemoryError):
            verb(context)
    assert context.parts == parts
    state, shelf = context.session.state, engine.shelf
    assert shelf.n_bytes == shelf.ram.n_bytes + state.rows.n_bytes
    context.check_integrity()
    context.weave("full")
    keeps_its_word(context)

"""Claims about parts that an evict froze, and about parts whose KV is remembered by uid.

Each was false once: found by random verbs against full prefills with evict and whole repair.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest
import torch
from world import models

from kvweave import Context, Engine, Sampling
from kvweave.errors import InvalidArgument, OverBudget
from kvweave.run.pool import PooledRows

EXACT = 1e-9
ONE = Sampling(max_tokens=1, ignore_eos=True)


def ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(9, 64, (n,), generator=generator)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], repair="none") as made:
        made.put_many([(f"d{i}", ids(8, i)) for i in range(5)])
        yield made
        made.check_integrity()


def of(engine: Engine, name: str, chunks: list[int], **options: object) -> Context:
    context = engine.context(name, **options)
    with context.edit():
        for i in chunks:
            context.append_chunk(f"d{i}")
    return context


def keeps_its_word(context: Context) -> None:
    """Drift 0 is claimed of what is exact only."""
    plan, found = context.weave(), context.check()
    if plan.drift == 0:
        assert max(found.kl, *found.k_error, *found.v_error) < EXACT, plan.explain()


def says_its_text(engine: Engine, context: Context, text: list[int]) -> None:
    """The last rows' values of the first layer, which depend on their tokens only, are of a text."""
    alone = engine.context("alone")
    alone.append(text)
    alone.weave()
    found, wanted = (c.session.state.rows.read(0)[1][-len(text) :] for c in (context, alone))
    assert torch.allclose(found, wanted)


def repaired(engine: Engine, name: str = "c", repair: str = "full") -> Context:
    context = of(engine, name, [0, 1], prune="evict", repair=repair)
    context.append(ids(3, 9))
    context.weave()
    return context


@pytest.mark.parametrize("repair", ["full", "first_k:100", "first_k:3", "auto"])
def test_rows_recomputed_behind_what_was_evicted_are_not_canonical(
    engine: Engine, repair: str
) -> None:
    context = repaired(engine, repair=repair)
    context.drop("d0")
    context.weave()
    keeps_its_word(context)
    context.append(ids(6, 5))
    context.weave()
    fresh = of(engine, "fresh", [1], repair="full")
    fresh.append(ids(3, 9))
    fresh.append(ids(6, 5))
    fresh.weave()
    keeps_its_word(fresh)


def test_an_answer_that_did_not_begin_leaves_frozen_parts_what_they_are(engine: Engine) -> None:
    context = repaired(engine, repair="none")
    context.drop("d0")
    context.weave()
    seen = [span.saw for span in context.preview().spans]
    before = context.session.state.rows.read(1)
    turn = context.begin(ONE)
    turn.abandon()
    plan = context.weave()
    assert [span.saw for span in plan.spans] == seen and any(seen)
    for a, b in zip(before, context.session.state.rows.read(1), strict=True):
        assert torch.equal(a[: len(b)], b[: len(a)])
    full = repaired(engine, "full")
    full.drop("d0")
    full.weave()
    full.begin(ONE).abandon()
    keeps_its_word(full)


def test_parts_of_another_contexts_snapshot_are_parts_of_their_own(engine: Engine) -> None:
    here, there = of(engine, "x", [0, 1, 2, 3]), of(engine, "y", [])
    there.restore(here.snapshot())
    there.append_chunk("d4")
    there.weave()
    wanted = of(engine, "z", [0, 1, 2, 3, 4])
    wanted.weave()
    assert len({part.uid for part in there.parts}) == len(there.parts)
    for layer in range(3):
        found, right = (c.session.state.rows.read(layer) for c in (there, wanted))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_what_a_fork_appended_is_not_what_the_other_did(engine: Engine) -> None:
    context = of(engine, "c", [0], prune="evict")
    twin = engine.fork(context, "f")
    context.append(ids(8, 11))
    twin.append(ids(8, 12))
    context.weave()
    twin.weave()
    twin.drop("d0")
    context.restore(twin.snapshot())
    context.weave()
    says_its_text(engine, context, ids(8, 12))


def test_a_block_of_edits_that_is_undone_leaves_no_kv(engine: Engine) -> None:
    context = of(engine, "c", [0], prune="evict")
    context.weave()
    with pytest.raises(ZeroDivisionError), context.edit():
        context.append(ids(8, 1))
        context.weave()
        raise ZeroDivisionError
    context.append(ids(8, 2))
    context.drop("d0")
    context.weave()
    says_its_text(engine, context, ids(8, 2))


def test_rows_that_were_half_placed_do_not_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = of(engine, "c", [0, 1, 2])
    context.weave()
    before, snapshot, n = context.session.state.rows.read(1), context.snapshot(), [0]
    kept = type(context.session.state.rows.layers[0])
    method = "place_at" if kept is PooledRows else "place"
    place = getattr(kept, method)

    def short(self: object, *args: object) -> None:
        n[0] += 1
        if n[0] == 3:
            raise torch.OutOfMemoryError("out of memory")
        place(self, *args)

    context.reorder([0, 2, 3, 1])
    monkeypatch.setattr(kept, method, short)
    with pytest.raises(RuntimeError):
        context.weave()
    monkeypatch.setattr(kept, method, place)
    context.restore(snapshot)
    context.weave()
    after = context.session.state.rows.read(1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_context_that_ends_in_rows_of_no_token_is_refused(engine: Engine) -> None:
    kv = engine.runner.new_kv(4)
    for tensor in (*kv.k, *kv.v):
        tensor.normal_()
    engine.put_rows("v", kv)
    context = of(engine, "c", [0])
    context.append_chunk("v")
    parts = context.parts
    for verb in (lambda: context.generate(1), context.check):
        with pytest.raises(InvalidArgument, match="no token"):
            verb()
    assert context.parts == parts
    context.append(ids(2, 3))
    assert context.generate(1, ignore_eos=True).tokens


@pytest.mark.slow
def test_what_is_repaired_beside_what_was_kept_is_accounted_before() -> None:
    """No answer is computed and then refused for room: over many budgets, refused is at once."""
    runner, n_refused = models.build("llama")[0], 0
    for n_rows in range(90, 330, 6):
        with Engine(runner, budget=n_rows * runner.row_bytes) as small:
            context = small.context("c", prune="evict", repair="auto", share=0.5)
            try:
                small.put_many([(f"d{i}", ids(12, i)) for i in range(3)])
                context.append(ids(5, 7))
                for i in range(3):
                    context.append_chunk(f"d{i}")
            except OverBudget:
                continue
            for turn in range(4):
                context.append(ids(4, 30 + turn))
                parts = context.parts
                try:
                    context.generate(3, ignore_eos=True)
                except OverBudget as refused:
                    frames = [frame.name for frame in traceback.extract_tb(refused.__traceback__)]
                    assert context.parts == parts and "prepare" in frames, frames
                    n_refused += 1
                    break
    assert n_refused > 3

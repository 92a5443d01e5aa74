"""Stored differences against the oracle: python -m pytest tests/weave/test_patch.py"""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
import torch
from weaving import EXACT, again, chat, rows, same_rows, text

from kvweave import Context, Engine

Make = Callable[..., Engine]
ALL = "patch:64"  # a rank no chunk here reaches


def met(engine: Engine, sizes: list[int], which: str = ALL) -> Context:
    """A context whose chunks were repaired as a whole and their differences stored."""
    context = chat(engine, "c", sizes, repair=which, share=1.0)
    context.append(text(3, 77))
    context.weave()
    return context


def asked_anew(engine: Engine, first: Context, share: float) -> Context:
    """Another context of the same chunks, with patches, and another question behind them."""
    context = again(engine, "d", first, repair=ALL, share=share)
    context.drop(-1)
    context.append(text(3, 79))
    return context


def patched(context: Context) -> list[bool]:
    return [s.patched for s in context.preview().spans]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt_neox"])
def test_a_patch_of_full_rank_gives_the_rows_in_context(engines: Make, name: str) -> None:
    engine = engines(name)
    first = met(engine, [6, 9, 4])
    assert first.plan.repaired == 13 and first.plan.patched == 0
    context = asked_anew(engine, first, 0.0)
    plan = context.weave()
    assert (plan.repaired, plan.patched, plan.prefilled) == (0, 13, 3)
    found = context.check()
    assert max(*found.k_error, *found.v_error) < EXACT and found.kl < 1e-12


def test_the_error_falls_with_the_rank(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [6, 9, 4])
    first.weave("none")
    errors = [first.check().v_error[-1]]
    for rank in (1, 2, 4, 8, 9):
        again(engine, f"meet{rank}", first, repair=f"patch:{rank}", share=1.0).weave()
        context = again(engine, f"use{rank}", first, repair=f"patch:{rank}", share=0.0)
        assert context.weave().patched == 13, "each rank has patches of its own"
        errors.append(context.check().v_error[-1])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < EXACT < errors[-2] < errors[0] / 2


def test_a_patched_part_is_never_called_exact(engines: Make) -> None:
    engine = engines()
    first = met(engine, [6, 9, 4])
    question = int(first.parts[-1].id)
    found = first.check()
    assert first.plan.drift == 0 and first.plan.repaired == 13, "no patch is in it yet"
    assert max(*found.k_error, *found.v_error) < EXACT
    assert list(engine.shelf._in_context) == [question]
    same = again(engine, "same", first, repair=ALL, share=1.0).weave()
    assert [s.exact for s in same.spans] == [True, True, False, False, False]
    assert same.drift is None and same.prefilled == 0 and same.patched == 13
    context = asked_anew(engine, first, 1.0)
    last = context.append(text(4, 78))
    plan = context.weave()
    assert plan.drift is None and [s.exact for s in plan.spans] == [True, True, *[False] * 4]
    assert [s.patched for s in plan.spans] == [False, False, True, True, False, False]
    assert int(last.id) not in engine.shelf._in_context
    assert list(engine.shelf._in_context) == [question]
    assert plan.reused == plan.patched == 13 and plan.counts()["patched"] == 13
    assert "reuse patched" in plan.explain() and "(patched 13)" in str(plan)
    assert plan.exact + plan.reused + plan.repaired + plan.prefilled == plan.n_tokens


def test_preview_tells_of_patches(engines: Make) -> None:
    engine = engines()
    first = met(engine, [6, 9, 4])
    context = again(engine, "d", first, repair=ALL, share=0.0)
    preview = context.preview()
    assert preview.patched == 13 and context.weave() == preview


def test_other_neighbours_get_no_patch(engines: Make) -> None:
    engine = engines()
    met(engine, [6, 9, 4])
    context = chat(engine, "d", [], repair=ALL, share=0.0)
    names = [f"c/{i}" for i in range(3)]
    for order, wanted in (
        ((0, 1, 2), [False, True, True]),
        ((0, 2, 1), [False, False, False]),
        ((1, 0, 2), [False, False, False]),
        ((0, 1), [False, True]),
        ((0, 2), [False, False]),
    ):
        before = context.snapshot()
        for i in order:
            context.append_chunk(names[i])
        assert patched(context)[1:] == wanted
        context.restore(before)
    context.append(text(1, 5))
    for name in names:
        context.append_chunk(name)
    assert patched(context) == [False] * 5


def test_forget_never_uses_what_was_made_with_the_removed_chunk(engines: Make) -> None:
    engine = engines()
    met(engine, [6, 9, 4, 5])
    with_it = chat(engine, "with", [], repair=ALL, share=0.0)
    for i in range(4):
        with_it.append_chunk(f"c/{i}")
    assert with_it.weave().patched == 18
    with_it.drop("c/1")
    plan = with_it.weave()
    assert plan.patched == 0 and plan.reused == 9
    without = chat(engine, "without", [], repair="none")
    for i in (0, 2, 3):
        without.append_chunk(f"c/{i}")
    without.weave()
    assert same_rows(rows(with_it), rows(without))


def test_a_prune_behind_patched_parts_leaves_them(engines: Make) -> None:
    engine = engines()
    first = met(engine, [6, 9, 4, 5])
    context = again(engine, "d", first, repair=ALL, share=0.0)
    context.weave()
    context.drop(3)
    plan = context.weave()
    assert [s.patched for s in plan.spans] == [False, False, True, False, False]
    assert not plan.spans[2].placed


def test_evict_keeps_the_patched_rows(engines: Make) -> None:
    engine = engines()
    first = met(engine, [6, 9, 4])
    context = again(engine, "d", first, repair=ALL, share=0.0, prune="evict", denoise=False)
    context.weave()
    before = rows(context).clone()
    gone = context.parts[2].id
    context.drop(2)
    plan = context.weave()
    after = rows(context)
    assert [s.patched for s in plan.spans] == [False, False, True, False]
    assert plan.spans[2].saw == (int(gone),) and plan.repaired == 0
    for layer in range(4):
        assert torch.equal(after.read(layer)[1][11:18], before.read(layer)[1][20:27])


def test_survivors_of_an_evict_get_no_patch(engines: Make) -> None:
    """There is one for where they stand now, but they keep the rows they have."""
    engine = engines()
    first = met(engine, [6, 9])
    context = chat(engine, "d", [], repair=ALL, share=0.0, prune="evict")
    stored = engine.maker.add(text(7, 50), base=first.parts[0].id)
    engine.table.bind("between", stored)
    engine.maker.canonicalise([stored])
    for name in ("c/0", "between", "c/1"):
        context.append_chunk(name)
    context.weave()
    before = rows(context).clone()
    context.drop("between")
    assert context.weave().patched == 0
    assert torch.equal(rows(context).read(2)[1][11:20], before.read(2)[1][18:27])
    other = chat(engine, "e", [], repair=ALL, share=0.0)
    other.append_chunk("c/0")
    other.append_chunk("c/1")
    assert other.weave().patched == 9


def test_the_oldest_patches_make_room(engines: Make) -> None:
    engine = engines()
    engine.shelf.patches.limit = (
        9_000  # one of rank 9 takes 4 * 9 * (9 + 32) * 2 * 8 bytes = 23 616
    )
    met(engine, [6, 9, 4])
    assert len(engine.shelf.patches) == 0
    engine.shelf.patches.limit = 24_000
    again(engine, "d", engine.contexts["c"], repair=ALL, share=1.0).weave()
    assert len(engine.shelf.patches) == 1, "the second took the place of the first"
    last = again(engine, "e", engine.contexts["c"], repair=ALL, share=0.0)
    assert [s.patched for s in last.preview().spans] == [False, False, False, True, False]


def test_a_small_budget_repairs_whole_chunks_front_to_back(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [6, 9, 4, 5], repair=ALL, share=0.6)
    assert [s.n_repaired for s in first.weave().spans] == [0, 0, 9, 0, 0], "4 are left of 10.8"
    second = again(engine, "d", first, repair=ALL, share=0.3)
    plan = second.weave()
    assert [s.patched for s in plan.spans] == [False, False, True, False, False]
    assert [s.n_repaired for s in plan.spans] == [0, 0, 0, 4, 0]
    third = again(engine, "e", first, repair=ALL, share=0.3)
    assert [s.n_repaired for s in third.weave().spans] == [0, 0, 0, 0, 5]
    fourth = again(engine, "f", first, repair=ALL, share=0.3)
    assert fourth.weave().patched == 18 and fourth.plan.repaired == 0
    assert max(*fourth.check().k_error, *fourth.check().v_error) < EXACT


def test_behind_stale_rows_no_patch_is_made(engines: Make) -> None:
    engine = engines()
    chat(engine, "c", [6, 9, 4])
    context = chat(engine, "d", [], repair=ALL, share=0.0)
    context.append_chunk("c/0")
    context.append_chunk("c/1")
    context.weave()
    context.append_chunk("c/2")
    plan = context.weave(share=1.0)
    assert [s.n_repaired for s in plan.spans] == [0, 0, 0, 4] and len(engine.shelf.patches) == 0
    plan = context.weave(ALL, share=1.0)
    assert plan.repaired == 13 and len(engine.shelf.patches) == 2


def test_other_strategies_neither_make_nor_use_patches(engines: Make) -> None:
    engine = engines()
    first = met(engine, [6, 9, 4])
    n = len(engine.shelf.patches)
    for which in ("random", "full", "none"):
        context = again(engine, which, first, repair=which, share=1.0)
        assert context.weave().patched == 0 and len(engine.shelf.patches) == n


def test_the_same_text_written_anew_is_the_same_neighbour(engines: Make) -> None:
    """Template text gets a new id each time; what counts is what it says."""
    engine = engines()
    base = chat(engine, "c", [6, 9])
    ids = []
    for turn, wanted in enumerate(([False] * 4, [False, False, True, True], [False] * 4)):
        context = engine.context(f"t{turn}", repair=ALL, share=1.0)
        context.set_base(base.parts[0].id, "base")
        ids.append(context.append(text(3, 70 + (turn == 2))).id)
        context.append_chunk("c/0")
        context.append_chunk("c/1")
        assert [s.patched for s in context.weave().spans] == wanted
        assert max(*context.check().k_error, *context.check().v_error) < EXACT
        engine.close_context(f"t{turn}")
    assert len(set(ids)) == 3


def test_patches_go_with_their_chunk_and_when_memory_is_short(engines: Make) -> None:
    engine = engines()
    met(engine, [6, 9, 4])
    shelf = engine.shelf
    assert len(shelf.patches) == 2 and shelf.patches.n_bytes > 0
    assert shelf.n_bytes >= shelf.patches.n_bytes
    engine.close_context("c")
    engine.files.rm("c/1")
    assert len(shelf.patches) == 1
    shelf.reserve(shelf.budget - shelf.n_bytes + 1)
    assert len(shelf.patches) == 0 and engine.table.lookup("c/2") is not None
    assert all(shelf.tier(int(r.id)) == oracle.MEMORY for r in engine.table), (
        "no canonical KV had to go"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_stay_what_they_are(engines: Make, dtype: torch.dtype) -> None:
    engine = engines("llama", dtype)
    first = chat(engine, "c", [6, 9, 4])
    first.weave("none")
    rough = first.check().v_error[-1]
    again(engine, "meet", first, repair=ALL, share=1.0).weave()
    context = again(engine, "use", first, repair=ALL, share=0.0)
    assert context.weave().patched == 13 and rows(context).read(0)[1].dtype == dtype
    assert context.check().v_error[-1] < (1e-5 if dtype == torch.float32 else rough / 4)


def test_an_answer_behind_patched_rows(engines: Make) -> None:
    """The last row is computed again for its logits; nothing else."""
    engine = engines()
    first = chat(engine, "c", [6, 9, 4], repair=ALL, share=1.0)
    first.weave()
    context = again(engine, "d", first, repair=ALL, share=0.0)
    answer = context.generate(3, ignore_eos=True)
    assert answer.plan.repaired == 1 and answer.plan.patched == 12
    assert max(*context.check().k_error, *context.check().v_error) < EXACT

"""Slices of stored chunks against the oracle: python -m pytest tests/weave/test_slices.py"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weaving import EXACT, again, chat, rows, same_rows, tensors, text

from kvweave import Context, Engine
from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, InvalidArgument

Make = Callable[..., Engine]
SOME = ["llama", "qwen3", "gemma3", "mistral", "gpt_neox", "smollm3_nope", "phi3_partial", "yarn"]
N_BASE = 5
ANGLES = 1e-4  # transformers computes angles in float32: other positions, other rounding


def sliced(engine: Engine, name: str, *ranges: tuple[str, int, int], **options: object) -> Context:
    """A context of the base of ``chat(engine, "c", ...)`` and slices of its chunks."""
    context = engine.context(name, **options)
    context.set_base(engine.contexts["c"].parts[0].id, "base")
    for ref, start, stop in ranges:
        context.append_slice(ref, start, stop)
    return context


def errors_by_part(context: Context) -> list[float]:
    """The largest error of each part's rows to one full prefill of the same positions."""
    mine = rows(context)
    positions = torch.from_numpy(mine.positions[: mine.n])
    runner = context.session.weaver.backend
    true, _ = oracle.rows_of(runner, torch.tensor(context.tokens()), positions)
    errors, at = [], 0
    for part in context.parts:
        here = slice(at, at := at + part.n)
        pairs = zip(tensors(mine), tensors(true), strict=True)
        errors.append(max(oracle.relative(a[here], b[here]) for a, b in pairs))
    return errors


def check_shelf(engine: Engine) -> None:
    """All KV on the shelf is that of its whole chunk behind what it says it saw."""
    table, runner = engine.table, engine.runner
    exact = [(id, seen, kv) for id, (seen, kv) in engine.shelf._in_context._held.items()]
    for record in table:
        kv = engine.shelf.ram.get(record.id)
        if kv is not None:
            n = 0 if record.base is None else table.get(record.base).n_tokens
            exact.append((record.id, ((record.base, -n, 0, n),) if n else (), kv))
    for id, seen, kv in exact:
        if any(other not in {r.id for r in table} for other, *_ in seen):
            continue  # it was pruned: nobody can ask for this KV any more
        tokens, positions = [], []
        here = -min((distance for _, distance, *_ in seen), default=0)
        for other, distance, start, n in seen:
            tokens += table.tokens(ChunkId(other))[start : start + n].tolist()
            positions += range(here + distance, here + distance + n)
        first, mine = len(tokens), table.tokens(ChunkId(id)).tolist()
        positions += range(here, here + len(mine))
        true, _ = oracle.rows_of(runner, torch.tensor(tokens + mine), torch.tensor(positions))
        assert kv.n_tokens == len(mine), "the whole chunk"
        there = torch.tensor(positions[first:], device=oracle.DEVICE)
        for layer, info in enumerate(runner.layers):
            keys, values = (t[first : first + len(mine)] for t in true.read(layer))
            turned = info.rotation.apply(kv.k[layer], info.rotation.angles(there))
            assert oracle.relative(turned, keys) < EXACT
            assert oracle.relative(kv.v[layer], values) < EXACT


@pytest.mark.parametrize("name", sorted(oracle.MODELS))
@pytest.mark.sampled
def test_full_repair_of_slices_equals_full_prefill(engines: Make, name: str) -> None:
    engine = engines(name)
    chat(engine, "c", [12, 20, 9])
    context = sliced(engine, "s", ("c/1", 4, 15), ("c/0", 0, 7), ("c/1", 15, 20), ("c/2", 3, 9))
    context.append(text(3, 77))
    rough = context.weave("none")
    assert (rough.reused, rough.prefilled, rough.drift) == (29, 3, None)
    assert max(errors_by_part(context)) > 1e-3, "this model must show a difference"
    plan = context.weave("full")
    assert (plan.drift, plan.repaired) == (0.0, 29)
    found = context.check()
    assert found.kl < 1e-12 and max(*found.k_error, *found.v_error) < EXACT
    wanted = [*text(20, 1)[4:15], *text(12, 0)[:7], *text(20, 1)[15:], *text(9, 2)[3:]]
    assert context.tokens() == [*text(5, 1000), *wanted, *text(3, 77)]
    check_shelf(engine)


@pytest.mark.parametrize("name", SOME)
def test_a_slice_from_the_start_is_exact_behind_its_base(engines: Make, name: str) -> None:
    engine = engines(name)
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/1", 0, 13))
    plan = context.weave()
    assert (plan.exact, plan.drift, plan.repaired, plan.prefilled) == (N_BASE + 13, 0.0, 0, 0)
    assert max(errors_by_part(context)) < EXACT
    assert plan.spans[1].how == "prefix" and plan.spans[1].saw == ()


@pytest.mark.parametrize("name", SOME)
def test_a_later_slice_is_the_chunks_own_rows_turned(engines: Make, name: str) -> None:
    engine = engines(name)
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/0", 0, 12), ("c/1", 6, 17))
    plan = context.weave()
    last = plan.spans[2]
    assert (last.how, last.exact, last.start, last.n_tokens) == ("reuse", False, 6, 11)
    assert last.saw == (last.id,) and plan.drift is None
    first = N_BASE + 12  # where it stands, as if its chunk's token 0 stood 6 before
    mine, kv = rows(context), engine.shelf.get(context.parts[2].id)
    there = torch.arange(first, first + 11, device=oracle.DEVICE)
    for layer, info in enumerate(engine.runner.layers):
        keys, values = mine.read(layer)
        turned = info.rotation.apply(kv.k[layer][6:17], info.rotation.angles(there))
        assert oracle.same(keys[first:28], turned)
        assert torch.equal(values[first:28], kv.v[layer][6:17])
    whole = torch.tensor([*text(5, 1000), *text(20, 1)])
    moved = torch.arange(len(whole)) + first - N_BASE - 6
    true, _ = oracle.rows_of(engine.runner, whole, moved)
    for a, b in zip(tensors(mine), tensors(true), strict=True):
        assert oracle.relative(a[first:28], b[N_BASE + 6 : N_BASE + 17]) < ANGLES
    assert errors_by_part(context)[2] > 1e-3


@pytest.mark.parametrize("name", SOME)
def test_slices_that_touch_are_as_exact_as_the_whole(engines: Make, name: str) -> None:
    engine = engines(name)
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/1", 0, 6), ("c/1", 6, 7), ("c/1", 7, 18))
    plan = context.weave()
    assert (plan.exact, plan.drift) == (N_BASE + 18, 0.0)
    assert max(errors_by_part(context)) < EXACT
    context.append_slice("c/0", 0, 3)
    assert context.weave().spans[-1].exact is False


def test_exact_in_context_kv_serves_slices_too(engines: Make) -> None:
    """Text prefilled behind other text is exact for slices behind the same text, and only there."""
    engine = engines()
    one = engine.context("one", denoise=False)
    for i, n in enumerate((6, 14)):
        one.append(text(n, i), name=f"f/{i}")
    one.weave()
    two = engine.context("two")
    two.append_chunk("f/0")
    two.append_slice("f/1", 0, 9)
    two.append_slice("f/1", 9, 14)
    plan = two.weave()
    assert (plan.exact, plan.prefilled, plan.drift) == (20, 0, 0.0)
    assert max(errors_by_part(two)) < EXACT
    three = engine.context("three")
    three.append_slice("f/0", 1, 6)
    three.append_slice("f/1", 0, 9)
    plan = three.weave()
    assert [s.how for s in plan.spans] == ["prefill", "prefill"], "it saw all six tokens of f/0"
    assert max(errors_by_part(three)) < EXACT
    four = engine.context("four")
    four.append_slice("f/0", 0, 6)
    four.append_slice("f/1", 9, 14)
    assert four.preview().spans[1].how == "prefill"


def test_kv_computed_for_a_slice_stays_in_its_context(engines: Make) -> None:
    """Composed KV never enters an exact cache under an exact key: the chunk still has none."""
    engine = engines()
    base = engine.maker.add(text(5, 1000), kind="system")
    engine.maker.canonicalise([base])
    id = engine.maker.add(text(12, 1), base=base)
    engine.table.bind("bare", id)
    for name, start, stop in (("head", 0, 7), ("tail", 5, 12), ("all but one", 0, 11)):
        context = engine.context(name)
        context.set_base(base, "base")
        part = context.append_slice("bare", start, stop)
        plan = context.weave()
        assert (plan.prefilled, plan.drift) == (stop - start, 0.0)
        assert max(errors_by_part(context)) < EXACT
        assert part.n == stop - start and part.id == id
        assert engine.shelf.tier(id) == "none" and int(id) not in engine.shelf._in_context
    whole = again(engine, "whole", context)
    assert whole.weave().prefilled == 12
    assert int(id) in engine.shelf._in_context, "a whole chunk's may be asked for again"
    engine.denoise()
    check_shelf(engine)


@pytest.mark.parametrize("which", ["full", "patch:64", "deps", "auto", "boundary", "deviation"])
def test_stored_kv_does_not_change(engines: Make, which: str) -> None:
    """Neither repairing slices nor answering behind them touches what others will place."""
    engine = engines()
    chat(engine, "c", [12, 20])
    ids = [engine.table.resolve(f"c/{i}").id for i in range(2)]
    before = [engine.shelf.get(id).clone() for id in ids]
    context = sliced(engine, "s", ("c/1", 4, 15), ("c/0", 0, 7), repair=which, share=1.0)
    context.append(text(4, 8))
    assert context.weave().repaired == 18
    context.generate(3, ignore_eos=True)
    for id, old in zip(ids, before, strict=True):
        found = engine.shelf.get(id)
        for a, b in zip((*found.k, *found.v), (*old.k, *old.v), strict=True):
            assert torch.equal(a, b)
        assert engine.weaver.dependence.rows(int(id)) is None, "no record of a slice"
    assert len(engine.shelf.patches) == 0
    check_shelf(engine)


def test_a_slice_finds_its_rows_in_the_record_of_its_chunk(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [8, 10], repair="deps", share=1.0)
    first.weave()
    whole = engine.weaver.dependence.rows(int(first.parts[2].id))
    assert whole is not None and bool((whole > 0).all())
    context = sliced(engine, "s", ("c/0", 0, 8), ("c/1", 3, 9), repair="deps", share=0.34)
    context.weave()
    placed = context.session.state.woven[2:]
    assert np.array_equal(engine.weaver.dependence.of(placed), whole[3:9])


def test_a_slice_never_takes_the_patch_of_its_chunk(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [8, 9], repair="patch:64", share=1.0)
    first.weave()
    assert len(engine.shelf.patches) == 1
    context = sliced(
        engine, "s", ("c/0", 0, 8), ("c/1", 0, 4), ("c/1", 6, 9), repair="patch:64", share=0.0
    )
    assert context.weave().patched == 0
    assert again(engine, "whole", first, repair="patch:64", share=0.0).weave().patched == 9


def test_a_chunk_behind_slices_is_patched_only_behind_the_same(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [12, 9])

    def behind(name: str, start: int, stop: int, share: float) -> Context:
        context = sliced(engine, name, ("c/0", start, stop), repair="patch:64", share=share)
        context.append_chunk("c/1")
        return context

    behind("meet", 0, 6, 1.0).weave()
    same = behind("same", 0, 6, 0.0)
    assert same.weave().patched == 9 and max(errors_by_part(same)) < EXACT
    assert behind("other", 6, 12, 0.0).weave().patched == 0, "as long, but other tokens"
    assert again(engine, "whole", first, repair="patch:64").weave().patched == 0


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (3, 3), (5, 3), (-1, 4), (0, 13), (12, 13), (3, -1)]
)
def test_a_wrong_range_is_refused(engines: Make, start: int, stop: int) -> None:
    engine = engines()
    context = chat(engine, "c", [12])
    before = context.parts
    with pytest.raises(InvalidArgument, match="12 tokens of c/0"):
        context.append_slice("c/0", start, stop)
    with pytest.raises(ChunkNotFound, match="c/9"):
        context.insert_slice(1, "c/9", start, stop)
    with pytest.raises(InvalidArgument, match="index"):
        context.insert_slice(9, "c/0", 0, 4)
    assert context.parts == before


def test_a_slice_shows_its_range(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [12, 20])
    context.append_slice("c/1", 16, 20)
    context.append_slice("c/1", 0, 16)
    whole = context.append_slice("c/1", 0, 20)
    assert [p.name for p in context.parts[3:]] == ["c/1[16:20]", "c/1[0:16]", "c/1"]
    assert (whole.start, whole.stop, whole.n) == (0, 20, 20)
    lines = context.weave().explain().splitlines()
    assert lines[4].split()[:5] == ["c/1[16:20]", "4", "reuse", oracle.MEMORY, "37"], (
        "it stands behind c/1"
    )
    spans = context.plan.to_dict()["spans"]
    assert isinstance(spans, list)
    assert [(s["part"], s["start"], s["n_tokens"]) for s in spans[3:5]] == [
        ("c/1[16:20]", 16, 4),
        ("c/1[0:16]", 0, 16),
    ]
    context.drop("c/1[0:16]", "c/1")
    assert [p.name for p in context.parts[1:]] == ["c/0", "c/1[16:20]", "c/1"], "the first c/1"
    assert context.weave().spans[2].saw == (int(whole.id),)


def test_preview_equals_what_weave_does_with_slices(engines: Make) -> None:
    engine = engines()
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/1", 0, 6), ("c/1", 6, 9), ("c/0", 2, 12))
    context.append(text(3, 77))
    preview = context.preview()
    assert context.weave() == preview


def test_slices_survive_edits(engines: Make) -> None:
    engine = engines()
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/0", 2, 12), ("c/1", 0, 6), ("c/1", 6, 9))
    context.weave()
    before = context.snapshot()
    twin = engine.fork(context, "twin")
    assert same_rows(rows(twin), rows(context)) and twin.weave().moved == 0
    context.drop("c/0[2:12]")
    plan = context.weave()
    assert (plan.exact, plan.drift) == (N_BASE + 9, 0.0), "back behind the base"
    assert max(errors_by_part(context)) < EXACT
    context.reorder([0, 2, 1])
    assert context.weave().drift is None
    context.restore(before)
    context.weave()
    assert same_rows(rows(twin), rows(context))
    new = context.replace("c/1[0:6]", text(4, 30))
    assert (new.name, new.start, new.n) == ("c/1", 0, 4)
    assert [p.n for p in context.parts] == [5, 10, 4, 3]
    context.insert_slice(1, "c/1", 18, 20)
    assert context.weave("full").drift == 0 and max(errors_by_part(context)) < EXACT
    engine.close_context("twin")
    check_shelf(engine)


def test_a_slice_keeps_its_chunk_alive(engines: Make) -> None:
    engine = engines()
    chat(engine, "c", [12])
    context = sliced(engine, "s", ("c/0", 4, 9))
    engine.close_context("c")
    engine.files.rm("c/0", force=True)
    assert context.tokens() == [*text(5, 1000), *text(12, 0)[4:9]]
    assert context.weave().reused == 5
    engine.close_context("s")
    assert len(engine.table) == 0


def test_evict_keeps_what_a_slice_saw(engines: Make) -> None:
    engine = engines()
    chat(engine, "c", [12, 20])
    context = sliced(engine, "s", ("c/0", 0, 12), ("c/1", 0, 6), ("c/1", 6, 15), prune="evict")
    context.append(text(4, 9))
    context.weave("full")
    before = rows(context).clone()
    gone = int(context.parts[2].id)
    context.drop("c/1[0:6]")
    plan = context.weave("none")
    after = rows(context)
    assert plan.prefilled == 0 and [gone in s.saw for s in plan.spans] == [False] * 2 + [True] * 2
    for layer in range(4):
        new, old = after.read(layer)[1], before.read(layer)[1]
        assert torch.equal(new[17:30], old[23:36]), "values are untouched"
    check_shelf(engine)


def test_evict_keeps_parts_that_were_exact_where_they_stood(engines: Make) -> None:
    """Their KV can no longer be asked for by what stands before them: the context keeps it."""
    engine = engines()
    fresh = engine.context("fresh", denoise=False)
    for i in range(3):
        fresh.append(text(6, i), name=f"f/{i}")
    fresh.weave()
    context = engine.context("c", prune="evict", denoise=False)
    context.append_chunk("f/0")
    context.append_slice("f/1", 0, 4)
    context.append_slice("f/1", 4, 6)
    assert context.weave().exact == 12
    before = rows(context).clone()
    context.drop("f/0")
    plan = context.weave()
    assert plan.prefilled == 0 and all(s.saw for s in plan.spans)
    for layer in range(4):
        assert torch.equal(rows(context).read(layer)[1][:6], before.read(layer)[1][6:12])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_kept_rows_of_another_part_are_its_own_to_keep(engines: Make, share: float) -> None:
    """The front of a part that was cut, and a chunk that was taken out and put back."""
    engine = engines()
    context = chat(engine, "c", [6, 9, 8], prune="evict", share=0.0)
    context.append(text(7, 9), name="c/own")
    context.weave("random", share=share)
    before = rows(context).clone()
    context.drop("c/2", "c/own", mode="forget")
    context.append_slice("c/2", 0, 8)
    context.append_slice("c/own", 0, 4)
    assert context.weave().moved == 0
    context.drop("c/0")
    assert context.weave().prefilled == 0
    for layer, info in enumerate(engine.runner.layers):
        (keys, values), (old_keys, old) = rows(context).read(layer), before.read(layer)
        assert torch.equal(values[5:26], old[11:32])
        back = info.rotation.angles(torch.full((21,), -6, device=oracle.DEVICE))
        turned = info.rotation.apply(old_keys[11:32], back)
        assert oracle.relative(keys[5:26], turned) < ANGLES


def test_survivors_whose_kv_was_let_go_of_are_prefilled(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 8], prune="evict")
    context.weave()
    context.drop("c/0")
    engine.place("c/2", "none")
    plan = context.weave()
    assert [s.how for s in plan.spans] == ["prefix", "reuse", "prefill"]
    assert max(errors_by_part(context)) < EXACT


def test_a_slice_from_disk_is_checked_against_its_chunk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with Engine(tiny(), home=tmp_path, repair="none") as engine:
        engine.put("docs/a", text(12, 1))
        engine.place("docs/a", "disk")
        context = engine.context("c")
        context.append_slice("docs/a", 3, 9)
        plan = context.weave()
        assert (plan.reused, plan.spans[-1].tier) == (6, "disk"), "where it came from"
        assert plan.spans[-1].n_bytes == 6 * engine.runner.row_bytes


OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["text", "slice", "slice", "slice", "drop", "swap", "weave", "repair", "denoise",
             "restore", "fork", "none", "cut"]
        ),
        st.integers(0, 5),
        st.integers(0, 9),
        st.integers(1, 9),
    ),
    max_size=14,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(ops=OPS, prune=st.sampled_from(["forget", "evict"]))
def test_any_edits_of_slices_are_told_honestly(
    ops: list[tuple[str, int, int, int]], prune: str
) -> None:
    """Spans a plan calls exact are exact; full repair is the oracle; the shelf stays clean."""
    engine = Engine(tiny(), repair="none")
    chat(engine, "c", [10, 7])
    context = sliced(engine, "s", prune=prune)
    kept = context.snapshot()
    for step, (op, at, start, n) in enumerate(ops):
        size = len(context.parts)
        if op == "text":
            context.append(text(n, step))
        elif op == "slice":
            ref = f"c/{at % 2}" if size < 3 else f"#{context.parts[1 + at % (size - 1)].id}"
            n_chunk = engine.table.resolve(ref).n_tokens
            first = start % n_chunk
            context.insert_slice(1 + at % size, ref, first, min(n_chunk, first + n))
        elif op == "drop" and size > 1:
            context.drop(1 + at % (size - 1))
        elif op == "cut" and size > 1:
            last = context.parts[-1]
            with context.edit():  # it lives on
                context.drop(last, mode="forget")
                context.append_slice(f"#{last.id}", last.start, last.start + min(last.n, n))
        elif op == "swap" and size > 2:
            order = list(range(size))
            i = 1 + at % (size - 1)
            order[i], order[1] = order[1], order[i]
            context.reorder(order)
        elif op == "weave":
            context.weave()
            kept = context.snapshot()
        elif op == "repair":
            context.weave("random", share=0.5)
        elif op == "denoise":
            engine.denoise()
        elif op == "none":
            engine.place("c/*", "none")
        elif op == "restore" and {p.id for p in kept.parts} <= {r.id for r in engine.table}:
            context.restore(kept)
        elif op == "fork":
            context = engine.fork(context, f"s{step}")
        engine.check_integrity()
    preview = context.preview()
    plan = context.weave("none")
    if not ops or ops[-1][0] not in ("repair", "weave"):
        assert [s.part for s in preview.spans] == [s.part for s in plan.spans]
    for span, error in zip(plan.spans, errors_by_part(context), strict=True):
        assert not span.exact or error < EXACT, f"{span.part} is not exact:\n{plan.explain()}"
    assert context.weave("full").drift == 0.0
    assert max(errors_by_part(context)) < EXACT
    check_shelf(engine)
    engine.close()

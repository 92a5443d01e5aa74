"""Claims about chunks of which a token policy left some rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zoo
from run.backend import ids, reference, transformers

from kvweave import Engine
from kvweave.errors import ChunkPinned, InvalidArgument, KVWeaveError, NameTaken
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.spec import NUMBERED, Keep
from kvweave.run.base import Work
from kvweave.run.model import Runner
from kvweave.store.kv import KV
from kvweave.weave import maker, thinning
from kvweave.weave.putting import compressing

SPECS = [f"{name}:{size}" for name in NUMBERED for size in ("0.4", "13")]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transformers("llama"), repair="none") as made:
        made.put_many([(f"d{i}", ids(40, i).tolist()) for i in range(3)])
        yield made


def rows_of(engine: Engine, name: str) -> KV:
    kv = engine.shelf.get(engine.table.resolve(name).id)
    assert kv is not None
    return kv


@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_those_of_the_whole_chunk(engine: Engine, spec: str) -> None:
    """As many in each head, bit for bit, and fewer bytes; the whole chunk stays what it was."""
    whole = rows_of(engine, "d0").clone()
    entry = engine.compress("d0", spec, to="small")
    kv = rows_of(engine, "small")
    n = 16 if spec.endswith("0.4") else 13
    assert kv.kept is not None and kv.kept.shape == (4, 2, n) and (np.diff(kv.kept) > 0).all()
    assert entry.n_tokens == kv.n_tokens == 40 and entry.n_bytes == kv.n_bytes
    assert kv.n_bytes == n * engine.runner.row_bytes and kv.altered and not kv.lossy
    for layer in range(4):
        for head in range(2):
            at = torch.from_numpy(kv.kept[layer, head])
            for thin, full in ((kv.k, whole.k), (kv.v, whole.v)):
                assert torch.allclose(thin[layer][:, head], full[layer][at, head], atol=1e-12)
    assert (
        torch.equal(rows_of(engine, "d0").k[0], whole.k[0]) and rows_of(engine, "d0").kept is None
    )


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.endswith("0.4")])
@pytest.mark.sampled
def test_slices_beside_others_leave_the_same_rows(engine: Engine, spec: str) -> None:
    engine.compress("d0", spec, to="small")
    kv = rows_of(engine, "small")
    engine.loop.schedule.most = 3
    task = compressing(engine.maker, "d1", Keep.parse(spec), "other")
    assert engine.loop.finish(task).n_bytes == kv.n_bytes
    engine.files.rm("small")
    engine.loop.finish(compressing(engine.maker, "d0", Keep.parse(spec), "small"))
    sliced = rows_of(engine, "small")
    assert sliced is not kv and np.array_equal(sliced.kept, kv.kept)
    for a, b in zip((*sliced.k, *sliced.v), (*kv.k, *kv.v), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_it_is_another_chunk_that_says_what_thinned_it(engine: Engine) -> None:
    ids_ = {engine.compress("d0", spec, to=f"s{i}").id for i, spec in enumerate(SPECS)}
    assert len(ids_ | {engine.table.resolve("d0").id}) == len(SPECS) + 1
    for i, spec in enumerate(SPECS):
        record = engine.table.resolve(f"s{i}")
        assert str(engine.maker.thinned_by(record.id)) == spec
        assert engine.table.tokens(record.id).tolist() == ids(40, 0).tolist()
    assert engine.maker.thinned_by(engine.table.resolve("d0").id) is None


@pytest.mark.parametrize("spec", ["kvzip:0.4", "h2o:13", "streaming:13"])
def test_it_stands_anywhere_as_its_rows_would(engine: Engine, spec: str) -> None:
    """Against the reference engine: the whole rows placed there, those that are lost freed."""
    engine.compress("d0", spec, to="small")
    kv, tail = rows_of(engine, "small"), ids(9, 7)
    context = engine.context("c")
    for name in ("d1", "small", "d2"):
        context.append_chunk(name)
    context.append(tail.tolist())
    said = context.generate(max_tokens=12, ignore_eos=True)
    assert said.plan.drift is None and f"thinned:{spec}" in said.plan.approximate
    model = reference("llama")
    rows = model.new_rows()
    parts = [engine.table.tokens(p.id).astype(np.int64) for p in context.parts[:-1]]
    tokens = np.concatenate(parts)
    n = len(tokens)
    rows.reserve(n + 12)
    at = {}
    for part in context.parts[:-2]:
        whole = rows_of(engine, "d0" if part.name == "small" else f"#{part.id}")
        start = sum(at.values())
        at[part.name] = part.n
        rows.place([(start, [KV([*whole.k], [*whole.v])])], np.arange(start + part.n))
        if part.name == "small" and kv.kept is not None:
            for layer in range(4):
                for head in range(2):
                    lost = np.setdiff1d(np.arange(part.n), kv.kept[layer, head])
                    rows.free(layer, head, lost + start)
    out: list[int] = []
    slots = np.arange(rows.n, n)
    new = tokens[slots]
    for _ in range(12):
        (found,) = model.forward([Work(rows, new, slots, slots, np.array([len(slots) - 1]))])
        out.append(int(found[-1].argmax()))
        slots, new = np.array([rows.n]), np.array(out[-1:])
        rows.reserve(rows.n + 1)
    assert said.tokens == tuple(out)


def test_lost_rows_are_thinned_again(engine: Engine) -> None:
    engine.compress("d0", "kvzip:0.4", to="small")
    before = rows_of(engine, "small").clone()
    engine.place("small", "none")
    assert engine.files.stat("small").tier == "none"
    assert engine.denoise() == 40
    after = rows_of(engine, "small")
    assert after.kept is not None and np.array_equal(after.kept, before.kept)
    assert all(torch.equal(a, b) for a, b in zip(after.k, before.k, strict=True))


def test_full_gives_all_of_it_back(engine: Engine) -> None:
    whole = engine.table.resolve("d0").id
    assert engine.compress("d0", "snapkv:0.4").id != whole
    back = engine.compress("d0", "full")
    assert rows_of(engine, "d0").kept is None and back.n_bytes == 40 * engine.runner.row_bytes
    assert engine.maker.thinned_by(back.id) is None


def test_slices_of_it_are_placed(engine: Engine) -> None:
    """Heads have more or fewer rows in a slice: padding is seen by nobody."""
    engine.compress("d0", "h2o:13", to="small")
    kv = rows_of(engine, "small")
    cut = kv.rows(7, 31)
    assert cut.n_tokens == 24 and cut.kept is not None and kv.kept is not None
    for layer in range(4):
        for head in range(2):
            own = cut.kept[layer, head]
            inside = kv.kept[layer, head]
            inside = inside[(inside >= 7) & (inside < 31)]
            assert own[own >= 0].tolist() == (inside - 7).tolist()
    context = engine.context("c")
    context.append_slice("small", 7, 31)
    context.append(ids(9).tolist())
    context.generate(max_tokens=5)
    kept = context.session.state.rows.kept(1)
    start = context.session.state.woven[1 if len(context.parts) > 3 else 0].slot
    found = [slots[(slots >= start) & (slots < start + 24)] - start for slots in kept]
    wanted = [own[own >= 0] for own in cut.kept[1]]
    assert [f.tolist() for f in found] == [w.tolist() for w in wanted]
    engine.check_integrity()


def test_a_full_repair_does_not_make_it_exact(engine: Engine) -> None:
    engine.compress("d0", "h2o:13", to="small")
    context = engine.context("c")
    context.append_chunk("small")
    context.append(ids(9).tolist())
    assert context.weave("full").drift is None
    assert context.generate(max_tokens=3).plan.drift is None


@pytest.mark.parametrize("spec", ["h2o:13", "h2o:500"])
def test_it_is_never_exact_not_even_in_front(engine: Engine, spec: str) -> None:
    """Nor where all rows fit its budget; said before a weave, by it, and behind it."""
    engine.compress("d0", spec, to="small")
    context = engine.context("c")
    context.append_chunk("small")
    context.append(ids(9).tolist())
    for plan in (context.preview(), context.weave(), context.preview()):
        small = next(span for span in plan.spans if span.part == "small")
        assert plan.drift is None and not small.exact, plan
        assert f"thinned:{spec}" in small.approximate, plan


def test_a_twin_of_it_under_memory_pressure(engine: Engine) -> None:
    """What is let go of to make room is thinned again, and never becomes the whole chunk."""
    row = engine.runner.row_bytes
    with Engine(transformers("llama"), repair="none", budget=200 * row) as small:
        small.put("d0", ids(40).tolist())
        small.compress("d0", "kvzip:0.4")
        for i in range(6):
            small.put(f"x{i}", ids(45, i + 1).tolist())
        assert small.files.stat("d0").tier == "none"
        small.denoise()
        record = small.table.resolve("d0")
        assert str(small.maker.thinned_by(record.id)) == "kvzip:0.4"
        small.check_integrity()


@pytest.mark.parametrize(
    "spec",
    [
        "kvzip",
        "kvzip:0.99999",
        "kvzip:0.4,span=9",
        "h2o:64MiB",
        "nothing:0.3",
        "full:3",
        "ttkv:0.3",
        "diffkv:0.3",
        "h2o:0.3,int8=0.2",
    ],
)
def test_what_a_digest_cannot_say_is_refused(engine: Engine, spec: str) -> None:
    before = engine.table.resolve("d0").id
    if spec == "full:3":
        assert engine.compress("d0", spec).id == before
        return
    with pytest.raises(InvalidArgument):
        engine.compress("d0", spec)
    assert engine.table.resolve("d0").id == before


@pytest.mark.parametrize("to", [None, "small"])
@pytest.mark.parametrize("keep", ["h2o:13", "full"])
def test_a_dry_run_says_the_same_and_changes_nothing(
    engine: Engine, to: str | None, keep: str
) -> None:
    if keep == "full":
        engine.compress("d0", "h2o:13")
    before, n = engine.files.ls(), len(list(engine.table))
    dry = engine.compress("d0", keep, to=to, dry_run=True)
    assert (engine.files.ls(), len(list(engine.table))) == (before, n)
    engine.check_integrity()
    done = engine.compress("d0", keep, to=to)
    assert (dry.name, dry.n_tokens, dry.kind) == (done.name, done.n_tokens, done.kind)


def test_a_dry_run_refuses_the_same(engine: Engine) -> None:
    engine.compress("d0", "h2o:13", to="small")
    engine.files.pin("d2")
    before = engine.files.ls()
    for ref, keep, to in (
        ("small", "h2o:9", None),
        ("d0", "h2o:13", "d1"),
        ("nothing", "h2o:13", None),
        ("d2", "h2o:13", None),
        ("d0", "ttkv:0.3", None),
    ):
        with pytest.raises(KVWeaveError) as real:
            engine.compress(ref, keep, to=to)
        with pytest.raises(type(real.value), match=re.escape(str(real.value))):
            engine.compress(ref, keep, to=to, dry_run=True)
    assert engine.files.ls() == before


def test_what_cannot_follow_is_refused(engine: Engine) -> None:
    engine.compress("d0", "h2o:13", to="small")
    with pytest.raises(InvalidArgument):
        engine.compress("small", "h2o:9")
    with pytest.raises(NameTaken):
        engine.compress("d0", "h2o:13", to="d1")
    for options, model in (({"keep": "streaming:30"}, engine), ({}, None)):
        if model is None:
            model = Engine(transformers("llama"), rows="int8")
            model.put("d0", ids(40).tolist())
            model.compress("d0", "h2o:13", to="small")
        context = model.context("c", **options)
        context.append_chunk("small")
        context.append(ids(5).tolist())
        with pytest.raises(InvalidArgument):
            context.generate(max_tokens=3)
        model.check_integrity()


def test_every_policy_has_a_number() -> None:
    other = {name for name, kind in POLICIES.items() if kind.more or kind.splits or kind.decodes}
    assert set(NUMBERED) == POLICIES.keys() - other - {"full"}
    for spec in SPECS:
        assert str(Keep.decoded(Keep.parse(spec).code())) == spec


@pytest.mark.parametrize("how", ["taken", "pinned", "rows"])
def test_what_was_refused_leaves_nothing(how: str) -> None:
    """No rows that no chunk has: memory that is short later would stumble over them."""
    model = transformers("llama")
    with Engine(model, repair="none", budget=150 * model.row_bytes) as engine:
        for i in range(2):
            engine.put(f"d{i}", ids(40, i).tolist())
        with pytest.raises((NameTaken, ChunkPinned)):
            if how == "rows":
                engine.put_rows("d1", rows_of(engine, "d0").clone())
            elif how == "pinned":
                engine.files.pin("d0")
                engine.compress("d0", "h2o:25")
            else:
                engine.compress("d0", "h2o:25", to="d1")
        assert set(engine.shelf.ram) <= {int(record.id) for record in engine.table}
        for i in range(6):
            engine.put(f"x{i}", ids(45, i + 50).tolist())
        engine.check_integrity()


def test_any_bytes_are_a_code_or_none() -> None:
    """The digest of a whole chunk ends in any four bytes: what they decode to has them as its code."""
    for budget in range(1 << 16):
        code = bytes([1, budget % len(NUMBERED)]) + budget.to_bytes(2, "little")
        found = Keep.decoded(code)
        assert found is None or found.code() == code
        assert (found is None) == (not budget % (1 << 15) or 10_000 <= budget < 1 << 15)
    for first in range(256):
        for second in range(256):
            found = Keep.decoded(bytes([first, second, 232, 3]))
            assert (found is None) == (first != 1 or second >= len(NUMBERED))


def test_a_digest_that_looks_thinned_is_a_whole_chunk(engine: Engine, monkeypatch) -> None:
    """Whatever its last bytes happen to be, it is stored, placed and thinned as any other."""
    plain = maker.chunk_digest
    for i, tail in enumerate(("01000068", "01070500", "01070a80", "01ff0a80", "ffffffff")):
        ends = bytes.fromhex(tail)
        fake = lambda *a, ends=ends, **k: plain(*a, **k)[:-4] + ends  # noqa: E731
        monkeypatch.setattr(maker, "chunk_digest", fake)
        monkeypatch.setattr(thinning, "chunk_digest", fake)
        id = engine.put(f"x{i}", ids(30, 50 + i).tolist()).id
        assert engine.table.get(id).digest.endswith(ends)
        assert engine.maker.thinned_by(id) is None
        context = engine.context(f"c{i}")
        context.append_chunk(f"x{i}")
        context.append(ids(5).tolist())
        context.generate(max_tokens=3)
        small = engine.compress(f"x{i}", "h2o:9", to=f"small{i}").id
        assert str(engine.maker.thinned_by(small)) == "h2o:9"


def test_chunks_of_layers_with_unlike_heads_are_not_thinned() -> None:
    """They say of every layer and head alike which tokens their rows are of."""
    with Engine(Runner(zoo.tiny("mimo_v2_flash")), base="", repair="none") as made:
        assert len({shape.k_heads for shape in made.runner.shapes}) > 1
        made.put("a", ids(40).tolist())
        for spec in ("h2o:0.5", "kvzip:0.5", "knorm:0.5"):
            with pytest.raises(InvalidArgument, match="unlike numbers of heads"):
                made.compress("a", spec, to="small")
        assert [name for record in made.table for name in record.names] == ["a"]
        made.check_integrity()

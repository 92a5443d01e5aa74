"""Claims about thinned chunks on the tiers below memory: they go there and come back as any chunk, and
what comes back is what was in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from needs import need
from run.backend import ids, transformers
from weave.test_thinning import SPECS, rows_of

from kvweave import Context, Engine
from kvweave.errors import InvalidArgument, StoreError
from kvweave.keep.tokens.spec import Keep
from kvweave.run.model import Runner
from kvweave.run.sampling import Sampling
from kvweave.store.kv import KV
from kvweave.store.record.layout import Head
from kvweave.store.tier.base import Get, Outcome
from kvweave.store.tier.disk import Disk
from kvweave.weave.plan import Plan

SPEC = "kvzip:0.4"
Open = Callable[..., Engine]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass of any model, as they run."""
    counted: list[int] = []
    forward = Runner.forward

    def counting(self: Runner, works, *args, **options):  # type: ignore[no-untyped-def]
        counted.append(sum(work.n for work in works))
        return forward(self, works, *args, **options)

    monkeypatch.setattr(Runner, "forward", counting)
    return counted


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Open the home of this test; the engine that had it before is closed."""
    made: list[Engine] = []

    def make(**options: object) -> Engine:
        if made:
            made[-1].check_integrity()
            made[-1].close()
        made.append(Engine(transformers("llama"), home=tmp_path, **{"repair": "none", **options}))
        return made[-1]

    yield make
    for last in made[-1:]:  # of a test that was skipped there is none
        last.check_integrity()
        last.close()


def filled(engine: Engine, spec: str = SPEC) -> KV:
    """Put three chunks and thin one of them; return what is left of that."""
    engine.put_many([(f"d{i}", ids(40, i).tolist()) for i in range(3)])
    engine.compress("d0", spec, to="small")
    return rows_of(engine, "small").clone()


def composed(engine: Engine, cut: tuple[int, int] | None = None) -> Context:
    context = engine.context("c")
    context.append_chunk("d1")
    if cut is None:
        context.append_chunk("small")
    else:
        context.append_slice("small", *cut)
    context.append_chunk("d2")
    context.append(ids(9, 7).tolist())
    return context


def said(engine: Engine, cut: tuple[int, int] | None = None) -> tuple[tuple[int, ...], Plan]:
    answer = composed(engine, cut).generate(max_tokens=8, ignore_eos=True)
    return answer.tokens, answer.plan


def files(home: Path) -> dict[str, Path]:
    """Digest -> file, of the records there are."""
    return {path.name.partition(".")[0]: path for path in (home / "kv").glob("*.kv")}


def record_of(engine: Engine, home: Path, name: str = "small") -> Path:
    return files(home)[engine.table.resolve(name).digest.hex()]


def same(a: KV, b: KV) -> bool:
    return (
        np.array_equal(a.kept, b.kept)  # type: ignore[arg-type]
        and a.n_tokens == b.n_tokens
        and all(torch.equal(x, y) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True))
    )


@pytest.mark.parametrize("spec", [SPEC, "h2o:13", "streaming:13"])
@pytest.mark.parametrize("cut", [None, (7, 31)])
def test_a_restart_finds_it_and_computes_nothing(
    open_engine: Open, passes: list[int], spec: str, cut: tuple[int, int] | None
) -> None:
    """The tokens and the plan of the engine that made it, from rows that were read."""
    engine = open_engine()
    before = filled(engine, spec)
    del passes[:]
    told, plan = said(engine, cut)
    in_memory, id = [*passes], engine.files.stat("small").id
    engine = open_engine()
    del passes[:]
    assert engine.files.stat("small").tier == "disk" and engine.denoise() == 0
    again, second = said(engine, cut)
    assert passes == in_memory and max(passes) < 40, "the question and the answer only"
    assert again == told and engine.files.stat("small").id == id
    assert [s.how for s in second.spans] == [s.how for s in plan.spans]
    assert second.approximate == plan.approximate and f"thinned:{spec}" in second.approximate
    assert {s.part: s.tier for s in second.spans}["d1"] == "disk" == second.spans[1].tier
    assert same(rows_of(engine, "small"), before)
    assert engine.shelf.mover.counts == engine.shelf.mover.counts | {"loads": 3, "lost": 0}


@pytest.mark.parametrize("codec", ["int8", "0-1:raw,2-:int4+zstd"])
def test_a_codec_is_named_beside_what_thinned_it(open_engine: Open, codec: str) -> None:
    engine = open_engine()
    before = filled(engine)
    engine.place("small", "disk", codec=codec)
    preview = composed(engine).preview()
    assert {f"thinned:{SPEC}"} < set(preview.approximate) and preview.drift is None
    assert any(name.startswith("codec:") for name in preview.approximate)
    kv = rows_of(engine, "small")
    assert kv.lossy and np.array_equal(kv.kept, before.kept)  # type: ignore[arg-type]
    for a, b in zip((*kv.k, *kv.v), (*before.k, *before.v), strict=True):
        assert 0 <= float((a - b).norm() / b.norm()) < 0.2
    engine.close_context("c")
    assert set(said(engine)[1].approximate) == {*preview.approximate, "freed"}


def test_memory_pressure_sends_it_down_and_nothing_is_computed(
    open_engine: Open, passes: list[int]
) -> None:
    engine = open_engine(budget=300 * transformers("llama").row_bytes, policy="lru")
    before = filled(engine)
    told, _ = said(engine)
    engine.close_context("c")
    engine.shelf.busy(())
    for i in range(10):
        engine.put(f"x{i}", ids(45, i + 10).tolist())
    id = engine.table.resolve("small").id
    assert int(id) not in engine.shelf.ram and engine.shelf.tier(id) == "disk"
    assert engine.files.stat("small").tier == "disk"
    engine.files.rm("x*")
    del passes[:]
    assert engine.denoise() == 0 == len(passes)
    again, plan = said(engine)
    assert again == told and plan.prefilled == 9 and same(rows_of(engine, "small"), before)


def test_it_is_moved_and_made_durable_and_told_as_any_chunk(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine(tiers=("ram size=8MiB codec=int8", "disk"))
    before = filled(engine)
    id = engine.table.resolve("small").id
    engine.shelf.save(id)
    path = record_of(engine, tmp_path)
    data = path.read_bytes()
    head = Head.parse(data)
    assert (head.n_tokens, head.n_rows, head.lossy) == (40, 16, False)
    engine.place("small", "disk")
    entry = engine.files.stat("small")
    assert (entry.tier, entry.n_bytes) == ("disk", len(data))
    engine.files.mv("small", "moved")
    assert engine.files.stat("moved").id == id
    engine.place("moved", engine.shelf.memory)
    assert same(rows_of(engine, "moved"), before)
    assert engine.files.stat("moved").n_bytes == before.n_bytes and not path.exists()
    engine.files.rm("moved")
    assert len(files(tmp_path)) == 0


def test_it_goes_to_object_storage_and_to_memory_with_a_codec(
    open_engine: Open, tmp_path: Path, passes: list[int]
) -> None:
    need("obstore")
    (tmp_path / "far").mkdir()
    tiers = ("ram size=8MiB codec=int8", f"s3 url=file://{tmp_path / 'far'}")
    engine = open_engine(tiers=tiers)
    before = filled(engine)
    told, _ = said(engine)
    engine.close_context("c")
    engine.place("small", "remote")
    engine = open_engine(tiers=tiers)
    del passes[:]
    assert engine.files.stat("small").tier == "remote"
    tokens, plan = said(engine)
    assert tokens == told and plan.spans[1].tier == "remote" and max(passes) < 40
    assert same(rows_of(engine, "small"), before) and not rows_of(engine, "small").lossy


@pytest.mark.parametrize("how", ["gone", "mask", "rows", "head", "whole"])
def test_a_record_that_is_lost_or_spoilt_is_computed_again(
    open_engine: Open, tmp_path: Path, how: str
) -> None:
    """From its tokens: the same rows, never others, and not those of the whole chunk."""
    engine = open_engine()
    before = filled(engine)
    told, _ = said(engine)
    engine = open_engine()
    path, whole = record_of(engine, tmp_path), record_of(engine, tmp_path, "d0")
    data = bytearray(path.read_bytes())
    head = Head.parse(data)
    if how == "gone":
        path.unlink()
    elif how == "whole":
        path.write_bytes(whole.read_bytes())
    else:
        data[{"mask": head.n_head, "rows": head.n_bytes - 5000, "head": 50}[how]] ^= 1
        path.write_bytes(data)
    assert engine.shelf.get(int(engine.table.resolve("small").id)) is None
    assert engine.files.stat("small").tier == "none"
    assert said(engine)[0] == told
    assert same(rows_of(engine, "small"), before)


def test_one_that_is_lost_under_the_pass_is_prefilled_there(
    open_engine: Open, tmp_path: Path
) -> None:
    """And the plan says so: those are all of its rows, computed where they stand."""
    engine = open_engine()
    filled(engine)
    engine = open_engine()
    context = composed(engine)
    record_of(engine, tmp_path).unlink()
    plan = context.weave()
    assert (plan.spans[1].how, plan.spans[1].n_prefilled) == ("prefill", 40)
    assert not any(name.startswith("thinned") for name in plan.approximate)


@pytest.mark.parametrize("repair", ["none", "auto", "full"])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.sampled
@pytest.mark.slow
def test_others_go_on_while_one_is_read(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repair: str, ends: bool
) -> None:
    """Who begins an answer over a thinned chunk does not wait for it, nor do the others; it is there
    in the end, or late, and computed."""
    engine = open_engine(repair=repair)
    filled(engine)
    there = composed(engine).generate(max_tokens=8, ignore_eos=True)
    engine = open_engine(repair=repair, load_seconds=60.0 if ends else 2.0)
    other = engine.context("other")
    other.append(ids(30, 8).tolist())
    beside = other.begin(Sampling(max_tokens=9, ignore_eos=True))
    small, come, get = record_of(engine, tmp_path), threading.Event(), Disk.get

    def slow(self: Disk, gets: list[Get], *, deadline: float | None = None) -> list[Outcome]:
        if any(each.key in small.name for each in gets):
            assert come.wait(20)
        return get(self, gets, deadline=deadline)

    monkeypatch.setattr(Disk, "get", slow)
    turn = composed(engine).begin(Sampling(max_tokens=8, ignore_eos=True))
    assert not turn.done and turn.plan is None
    while not beside.done:
        assert engine.loop.step() and turn.plan is None
    started = time.monotonic()  # alone it does not keep the thread either: others may come
    assert engine.loop.step() and turn.plan is None and time.monotonic() - started < 0.5
    if ends:
        come.set()
    answer = turn.run()
    come.set()
    spans = answer.plan.spans
    if ends:
        assert answer.tokens == there.tokens and answer.plan.approximate == there.plan.approximate
        assert [s.n_repaired for s in spans] == [s.n_repaired for s in there.plan.spans]
    else:
        assert (spans[1].how, spans[1].n_prefilled) == ("prefill", 40)
    assert len(beside.finish().tokens) == 9


@pytest.mark.parametrize("spec", [*SPECS, "h2o:1", "kvzip:0.01", "knorm:500"])
@pytest.mark.sampled
def test_digest_and_tokens_say_how_many_rows_there_are(open_engine: Open, spec: str) -> None:
    """What is expected of a record is what `Thinning` leaves, of chunks of any length."""
    engine = open_engine()
    for n in (1, 2, 5, 40, 77):
        engine.put(f"x{n}", ids(n, n).tolist())
        id = engine.compress(f"x{n}", spec, to=f"small{n}").id
        kv = rows_of(engine, f"small{n}")
        assert kv.kept is not None
        about = engine.shelf.mover.about(int(id))
        assert (about.n_tokens, about.n_rows, about.n_bytes) == (n, kv.kept.shape[2], kv.n_bytes)
        assert str(Keep.parse(spec)) == str(engine.maker.thinned_by(id))
        assert engine.shelf.mover.about(engine.table.resolve(f"x{n}").id).n_rows is None


def test_rows_of_a_thinned_chunk_are_not_put_as_rows(open_engine: Open) -> None:
    """Nothing but a digest says how many there are: a record of them could not be read."""
    engine = open_engine()
    kv = filled(engine)
    with pytest.raises(InvalidArgument):
        engine.put_rows("learned", kv)
    assert [entry.name for entry in engine.files.ls()] == ["d0", "d1", "d2", "small"]


def test_a_full_disk_leaves_it_in_memory(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    before = filled(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "put", lambda self, puts, **how: [Outcome("failed", "EIO")] * len(puts))
        with pytest.raises(StoreError):
            engine.place("small", "disk")
        with pytest.raises(StoreError):
            engine.shelf.save(int(engine.table.resolve("small").id))
    assert engine.files.stat("small").tier == engine.shelf.memory
    assert same(rows_of(engine, "small"), before)

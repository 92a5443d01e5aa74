"""Weaving chunks that are still on their way from a tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import oracle
import pytest
import torch
from conftest import tiny
from weaving import rows, same_rows, text

from kvweave import Context, Engine
from kvweave.run.rows import KVRows
from kvweave.store import reader
from kvweave.store.tier.base import Get, Outcome
from kvweave.store.tier.disk import Disk

NAMES = ("a", "b", "c")
GetMany = Callable[[Disk, list[Get]], list[Outcome]]


@pytest.fixture(autouse=True)
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "TOGETHER", 1)


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with three chunks on a tier of files."""
    made: list[Engine] = []

    def make(model: str = "llama", repair: str = "none", **options: object) -> Engine:
        engine = Engine(
            tiny(model), home=tmp_path / str(len(made)), tiers=("files",), repair=repair, **options
        )
        made.append(engine)
        for i, name in enumerate(NAMES):
            engine.put(name, text(20 + 7 * i, i))
            engine.place(name, "disk")
        return engine

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


def composed(engine: Engine, question: int = 9, **options: object) -> Context:
    context = engine.context("c", **options)
    for name in NAMES:
        context.append_chunk(name)
    context.append(text(question, 50), name="q")
    return context


def reading(
    tier_get: GetMany, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]
) -> None:
    """Call ``before`` with 0, 1, .. before each request for layers."""
    counts: list[int] = []

    def get(self: Disk, gets: list[Get], *, deadline: float | None = None) -> list[Outcome]:
        if gets[0].offset:  # no head
            counts.append(0)
            before(len(counts) - 1)
        return tier_get(self, gets, deadline=deadline)  # type: ignore[call-arg]

    monkeypatch.setattr(Disk, "get", get)


@pytest.mark.parametrize("repair", ["none", "auto", "first_k"])
def test_the_pass_begins_when_the_first_layer_is_there(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    engine = open_engine(repair=repair, share=0.2)
    begun, settle = threading.Event(), KVRows.settle

    def settled(self: KVRows, layer: int | None = None) -> None:
        settle(self, layer)
        if layer == 0 and self.n:
            begun.set()

    def wait(n: int) -> None:
        assert n == 0 or begun.wait(20), "no pass came to layer 0 before layer 1 had arrived"

    monkeypatch.setattr(KVRows, "settle", settled)
    reading(Disk.get, monkeypatch, wait)
    plan = composed(engine).weave()
    assert plan.prefilled == 9 and begun.is_set()
    assert engine.shelf.mover.counts["loads"] == 3


@pytest.mark.parametrize("model", ["llama", "gemma2", "qwen3", "cohere_interleaved"])
@pytest.mark.parametrize("repair", ["none", "first_k", "deviation:v", "query", "auto", "full"])
@pytest.mark.sampled
def test_rows_and_tokens_are_those_of_chunks_that_never_left(
    open_engine: Callable[..., Engine], model: str, repair: str
) -> None:
    if not tiny(model).can_move:
        pytest.skip(tiny(model).can_move.reason)
    there, away = (open_engine(model, repair, share=0.25) for _ in range(2))
    for name in NAMES:
        there.place(name, oracle.MEMORY)
    contexts = [composed(engine) for engine in (there, away)]
    answers = [c.generate(max_tokens=4, temperature=0, ignore_eos=True) for c in contexts]
    assert answers[0].tokens == answers[1].tokens
    assert [s.n_repaired for s in answers[0].plan.spans] == [
        s.n_repaired for s in answers[1].plan.spans
    ]
    assert same_rows(*map(rows, contexts))


@pytest.mark.parametrize("repair", ["none", "auto"])
@pytest.mark.parametrize("bad_layer", [0, 1, 3])
def test_what_does_not_arrive_in_time_is_computed(
    open_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    repair: str,
    bad_layer: int,
) -> None:
    engine = open_engine(repair=repair, load_seconds=0.5)
    reading(Disk.get, monkeypatch, lambda n: time.sleep(0.6 if n == bad_layer else 0))
    context = composed(engine)
    answer = context.generate(max_tokens=4, temperature=0, ignore_eos=True)
    assert (answer.plan.reused, answer.plan.prefilled) == (0, 90)
    assert engine.shelf.mover.counts["late"] == 3
    check = context.check()
    assert check.kl < 1e-9 and max(check.k_error) < 1e-9
    assert {engine.files.stat(name).tier for name in NAMES} <= {"none", oracle.MEMORY}


def test_a_lost_chunk_leaves_the_rows_before_it_as_they_are(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    context = engine.context("c")
    context.append_chunk("a")
    context.weave()
    kept = rows(context).read(0)[0][:20]
    context.append_chunk("b")
    context.append_chunk("c")
    file_of(engine, "c").unlink()
    plan = context.weave()
    assert [(s.part, s.how) for s in plan.spans] == [
        ("a", "prefix"), ("b", "reuse"), ("c", "prefill"),
    ]  # fmt: skip
    assert not plan.spans[0].placed and torch.equal(rows(context).read(0)[0][:20], kept)


def test_one_layer_of_wrong_bytes_is_enough(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine()
    file = file_of(engine, "b")
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1  # in the last layer, read when the pass is under way
    file.write_bytes(data)
    plan = composed(engine).weave()
    assert [s.how for s in plan.spans] == ["prefix", "prefill", "reuse", "prefill"]


def file_of(engine: Engine, name: str) -> Path:
    level, id = engine.shelf.mover.levels[0], int(engine.table.resolve(name).id)
    disk = level.tier.tier  # type: ignore[attr-defined]
    assert isinstance(disk, Disk)
    return disk.path(level.held[id].key)

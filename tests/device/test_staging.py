"""KV to the device and back on streams of copies: never read before it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from device.counted import DEVICE, MAIN, Counted, Log, Stream, counting
from device.test_budgets import on_it
from weaving import text

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.store import reader as reader_module
from kvweave.store.arriving import Load
from kvweave.store.kv import KV, LayerShape
from kvweave.store.staging import HOST, Side, staging

SHAPES = [LayerShape(2, 4, 2, 4), LayerShape(1, 8, 3, 4)]
TIERS = ("files", "disk", "ram size=8MiB", "files codec=fp8")
Open = Callable[..., Engine]


def kv(n: int, device: torch.device | str = "cpu") -> KV:
    made = KV.empty(SHAPES, n, torch.float32, torch.device("cpu"))
    for tensor in (*made.k, *made.v):
        tensor.normal_()
    return KV([t.to(device) for t in made.k], [t.to(device) for t in made.v])


@pytest.fixture
def seen() -> Iterator[Log]:
    with counting() as log:
        yield log


@pytest.fixture
def open_engine(tmp_path: Path, seen: Log) -> Iterator[Open]:
    """Make engines over one model, on the device or on the host."""
    made: list[Engine] = []

    def make(tier: str, device: torch.device | str = DEVICE, **options: Any) -> Engine:
        runner = on_it("llama")[0] if device == DEVICE else tiny("llama", torch.float32)
        runner.pools = None
        home = tmp_path / str(len(made))
        made.append(Engine(runner, home=home, tiers=(tier,), base="", **options))
        made[-1].shelf.memory = "gpu"  # as on CUDA: "ram" is the host's
        for i in range(3):
            made[-1].put(f"doc/{i}", text(20 + 7 * i, i))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


def answer(engine: Engine, repair: str = "none") -> tuple[int, ...]:
    context = engine.compose("{docs}", docs=[f"doc/{i}" for i in range(3)], repair=repair)
    context.append(text(9, 50))
    return context.generate(5, ignore_eos=True).tokens


# ---- engines whose chunks come from below


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("tier", TIERS)
def test_what_went_down_and_came_up_answers_as_on_the_host(open_engine: Open, tier: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        engine = open_engine(tier, device)
        with counting() as log:
            engine.place("doc/*", tier.split()[0].replace("files", "disk"))
            found.append(answer(engine))
        assert engine.shelf.mover.counts["loads"] == 3
    assert found[0] == found[1]
    assert log.count("upload") > 3 * 2 * len(engine.runner.layers)
    for kind in ("unpinned", "mix", "race"):
        assert not log.count(kind), log.lines(kind)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("repair", ["none", "auto", "deviation"])
def test_a_pass_waits_for_a_layer_when_it_comes_to_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    monkeypatch.setattr(reader_module, "TOGETHER", 1)  # layer by layer
    engine = open_engine("files")
    there = answer(engine, repair)
    engine.place("doc/*", "disk")
    assert answer(engine, repair) == there


def test_a_pass_that_does_not_wait_reads_what_is_not_there(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("files")
    engine.place("doc/*", "disk")
    monkeypatch.setattr(Side, "settle", lambda self: None)  # the reader's own wait comes later
    add = Load.add
    monkeypatch.setattr(Load, "add", lambda self, k, v, fence, kept: add(self, k, v))
    with pytest.raises(InvalidArgument, match="highest is nan"):
        answer(engine)


def test_what_is_written_behind_the_pass_is_what_was_computed(open_engine: Open) -> None:
    engine = open_engine("files")
    below = engine.shelf.mover
    for i in range(3):
        id = int(engine.files.stat(f"doc/{i}").id)
        held = engine.shelf.get(id)
        assert held is not None and below.clean(id, held)
    below.settle()
    for i in range(3):
        id = int(engine.files.stat(f"doc/{i}").id)
        held, read = engine.shelf.get(id), below.load([id], to=HOST)[id]
        assert held is not None
        for mine, one in zip((*held.k, *held.v), (*read.k, *read.v), strict=True):
            assert torch.equal(mine.cpu(), one)


def test_a_thinned_chunk_goes_down_and_comes_up(open_engine: Open) -> None:
    engine = open_engine("files")
    below, id = engine.shelf.mover, int(engine.compress("doc/1", "h2o:9").id)
    there, held = answer(engine), engine.shelf.get(id)
    assert held is not None and below.clean(id, held)
    below.settle()
    read = below.load([id], to=HOST)[id].whole()
    assert np.array_equal(held.kept, read.kept)  # type: ignore[arg-type]
    for mine, one in zip((*held.k, *held.v), (*read.k, *read.v), strict=True):
        assert torch.equal(mine.cpu(), one)
    engine.place("doc/*", "disk")
    room = [each.n_bytes for each in below.load([id]).values()]
    assert answer(engine) == there and room == [held.n_bytes]


# ---- staging alone


def test_a_row_is_nothing_before_its_event_and_events_come_layer_by_layer(seen: Log) -> None:
    side, source = Side(DEVICE), kv(7)
    room = side.room(SHAPES, 7, torch.float32)
    assert room is not None
    fences = [
        side.up((source.k[layer], source.v[layer]), room, layer)[2] for layer in range(len(SHAPES))
    ]

    def arrived() -> list[bool]:
        layers = zip(room.k, room.v, source.k, source.v, strict=True)
        return [
            torch.equal(k.held, a) and torch.equal(v.held, b)
            for k, v, a, b in layers
            if isinstance(k, Counted) and isinstance(v, Counted)
        ]

    assert arrived() == [False, False]
    fences[0]()
    assert arrived() == [True, False]
    side.settle()
    assert arrived() == [True, True]
    assert seen.count("upload") == 4 and not seen.count("unpinned") and not seen.count("race")


def test_what_comes_down_is_waited_for_by_who_takes_it(seen: Log) -> None:
    side, there = Side(DEVICE), kv(5, DEVICE)
    landed = side.down(there)
    assert not seen.count("sync")
    host = landed()
    for mine, one in zip((*host.k, *host.v), (*there.k, *there.v), strict=True):
        assert mine.is_pinned() and torch.equal(mine, one.cpu())
    assert seen.count("download") == 8 and not seen.count("race")


def test_a_copy_that_does_not_wait_for_the_pass_is_a_race(
    seen: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    side, there = Side(DEVICE), kv(5, DEVICE)
    there.k[0].add_(1)
    side.down(there)()
    assert seen.count("race") == 4
    assert not MAIN.copies


def test_memory_to_read_to_is_pinned_and_goes_up_as_it_is(seen: Log) -> None:
    side = Side(DEVICE)
    memory = side.buffer(4 * 7 * 8)
    assert memory.nbytes == 4 * 7 * 8 and not memory.readonly
    rows = torch.frombuffer(memory, dtype=torch.float32).view(7, 2, 4).fill_(3.0)
    room = side.room(SHAPES[:1], 7, torch.float32)
    side.up((rows, rows), room, 0)[2]()
    assert room is not None and bool((room.k[0] == 3).all())
    assert not [line for line in seen.lines("upload") if "pin_memory" in line]
    assert not seen.count("unpinned")


def test_on_the_host_nothing_is_copied() -> None:
    assert staging(torch.device("cpu")) is HOST and isinstance(staging(DEVICE), Side)
    source = kv(3)
    k, v, fence = HOST.up((source.k[0], source.v[0]), HOST.room(SHAPES, 3, torch.float32), 0)
    fence()
    assert k is source.k[0] and v is source.v[0] and HOST.down(source)() is source


def test_rows_that_no_token_made_come_from_the_host(open_engine: Open) -> None:
    made = []
    for device in ("cpu", DEVICE):
        engine = open_engine("files", device)
        assert isinstance(engine.runner, Runner)
        rows = KV.empty(engine.runner.shapes, 4, torch.float32, torch.device("cpu"))
        for i, tensor in enumerate((*rows.k, *rows.v)):
            tensor.fill_(0.1 * i)
        engine.put_rows("learned", rows)
        context = engine.compose("{learned}", repair="none")
        context.append(text(9, 50))
        made.append(context.generate(4, ignore_eos=True).tokens)
    assert made[0] == made[1]

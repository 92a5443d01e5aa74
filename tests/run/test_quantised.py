"""Rows of 8 bits: near the oracle on every architecture, and half the memory."""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
import torch
from conftest import tiny

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.attention import Segment
from kvweave.run.quantised import Coded
from kvweave.run.rows import KVRows

NAMES = sorted(oracle.MODELS)
CODECS = ("int8", "fp8")
NEAR = {"int8": 0.03, "fp8": 0.15}  # largest error of a logit over the largest logit
# granite multiplies scores by 1, not by 1 / sqrt(dim); in mixtral another expert may be chosen
LOOSE = {"granite": {"int8": 0.2, "fp8": 0.3}, "mixtral": {"int8": 0.2, "fp8": 0.6}}


def ids(n, seed=0):
    return torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(seed))


def prefill(runner, codec, n, step=None):
    """Rows and all logits, computed ``step`` tokens at a time."""
    rows, tokens, logits = runner.new_rows(codec), ids(n), []
    for slots in torch.split(torch.arange(n), step or n):
        rows.reserve(int(slots[-1]) + 1)
        segment = Segment(rows, tokens[slots], slots, slots)
        logits.append(runner.forward([segment], torch.arange(len(slots))))
    rows.check_integrity()
    return rows, torch.cat(logits)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_stays_near_the_oracle(name, codec):
    runner = tiny(name)
    wanted = oracle.full_prefill(runner, ids(30))
    for step in (None, 1, 7):
        error = oracle.relative(prefill(runner, codec, 30, step)[1], wanted)
        assert 0 < error < LOOSE.get(name, NEAR)[codec], (step, error)


@pytest.mark.parametrize("codec", CODECS)
def test_how_a_prefill_is_cut_does_not_change_the_rows(codec):
    runner = tiny("gemma2")
    (a, x), (b, y) = prefill(runner, codec, 40), prefill(runner, codec, 40, 3)
    assert oracle.relative(x, y) < 0.01
    assert oracle.relative(a.k[0][:40], b.k[0][:40]) < 0.02


@pytest.mark.parametrize("codec", CODECS)
def test_scattered_rows_are_written_where_they_belong(codec):
    runner = tiny()
    rows, logits = prefill(runner, codec, 30)
    todo = torch.tensor([0, 3, 4, 5, 11, 20, 28])
    before = rows.v[2][slice(0, 30)]
    for tensor in (*rows.k, *rows.v):
        tensor[todo] = torch.zeros(7, *tensor.shape[1:])
    assert not rows.v[2][todo].any()
    segment = Segment(rows, ids(30)[todo], todo, todo)
    found = runner.forward([segment], torch.arange(7))
    assert oracle.relative(found, logits[todo]) < NEAR[codec]
    others = torch.tensor([i for i in range(30) if i not in todo])
    assert torch.equal(rows.v[2][others], before[others])


@pytest.mark.parametrize("codec", CODECS)
def test_placed_chunks_are_turned_and_then_coded(codec):
    runner = tiny("phi3_partial")
    raw, rows = runner.new_rows(), runner.new_rows(codec)
    kv = runner.new_kv(12)
    for tensor in (*kv.k, *kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    positions = torch.arange(100, 112)
    for each in (raw, rows):
        each.reserve(20)
        each.place(3, [kv], positions, each.angles(positions))
    for mine, wanted in zip((*rows.k, *rows.v), (*raw.k, *raw.v), strict=True):
        assert oracle.relative(mine[3:15], wanted[3:15]) < (0.005 if codec == "int8" else 0.04)
        assert torch.equal(mine[torch.arange(4, 6)], mine[4:6])


@pytest.mark.parametrize("codec", CODECS)
def test_growing_and_cloning_keep_every_bit(codec):
    runner = tiny()
    rows, _ = prefill(runner, codec, 20)
    before = [t[:20] for t in (*rows.k, *rows.v)]
    rows.reserve(100)
    twin, part = rows.clone(), rows.clone(layers=2)
    assert part.v[2] is rows.v[2] and part.v[1] is not rows.v[1]
    twin.k[0][0:20] = torch.ones(20, 2, 16)
    for other in (rows, part):
        other.check_integrity()
        now = [t[:20] for t in (*other.k, *other.v)]
        assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert twin.n == 20 and torch.allclose(twin.k[0][:20], torch.ones(()).double(), rtol=0.02)


def test_bytes_of_a_row():
    shape = (100, 2, 64)
    coded = Coded(shape, "int8", torch.bfloat16, torch.device("cpu"))
    assert coded.n_bytes == 100 * 2 * (64 + 2 * 2)  # 32 channels share two bytes of scale
    runner = tiny("llama", torch.float32)
    raw, rows = (runner.new_rows(c) for c in ("raw", "int8"))
    raw.reserve(320), rows.reserve(320)
    assert type(raw) is KVRows and raw.n_bytes == rows.n_bytes * 64 / (16 + 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_a_loud_channel_disturbs_its_group_only(codec, dtype):
    x = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    loud = x.clone()
    loud[:, 1, 40] *= 1000
    made = []
    for rows in (x, loud):
        coded = Coded(rows.shape, codec, dtype, torch.device("cpu"))
        coded[0:9] = rows
        made.append(coded[0:9])
        assert made[-1].dtype == dtype and oracle.relative(made[-1], rows) < 0.04
    assert torch.equal(made[0][:, 0], made[1][:, 0])
    assert torch.equal(made[0][:, 1, :32], made[1][:, 1, :32])


def test_other_codecs_are_refused():
    with pytest.raises(InvalidArgument, match="int8 or fp8"):
        tiny().new_rows("int4")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("repair", ["none", "auto"])
def test_an_engine_keeps_contexts_in_8_bits(
    engines: Callable[..., Engine], codec: str, repair: str
) -> None:
    engine, plain = (
        engines(dtype=torch.float32, repair=repair, rows=rows) for rows in (codec, "raw")
    )
    contexts = []
    for each in (engine, plain):
        each.put("docs/a", list(range(10, 60)))
        context = each.context("c")
        context.append_chunk("docs/a")
        context.append(list(range(20, 30)), name="q")
        context.generate(max_tokens=3, temperature=0, ignore_eos=True)
        contexts.append(context)
    mine, theirs = (each.shelf.levels()[0][1] - each.shelf.ram.n_bytes for each in (engine, plain))
    assert 0 < mine < 0.6 * theirs, "8 bits and scales against 32"
    check = contexts[0].check()
    assert 0 < max(check.k_error) < 0.1 and check.kl < 0.01

"""Products by oneDNN: the same numbers, wherever they stand in for torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from torch import nn

from kvweave.run import attention, products, written
from kvweave.run.base import Work
from kvweave.run.model import Runner
from kvweave.run.part import Piece
from kvweave.run.written import Scaling, VisibleKV

pytestmark = [
    pytest.mark.skipif(
        not products._is_right(), reason="this torch has no oneDNN operation: nothing to enable"
    ),
    pytest.mark.skipif(
        oracle.DEVICE.type != "cpu", reason="products of a CPU: unset the tests' device"
    ),
]
HEADS, DIM, V_DIM = 3, 8, 6


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Have every product made by oneDNN, however small, on any machine; return how many were."""
    made: list[int] = []
    real = products.product

    def counted(*given: torch.Tensor | None) -> torch.Tensor:
        made.append(1)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(products, "faster", True)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "MANY", 1)
    monkeypatch.setattr(products, "product", counted)
    monkeypatch.setattr(written, "product", counted)
    yield made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (5, 3), (2, 1, 3), (0,)])
def test_a_layer_gives_the_same(bias: bool, rows: tuple[int, ...], always: list[int]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5, bias), nn.ReLU(), nn.Linear(5, 4, bias))
    ours = nn.Sequential(nn.Linear(7, 5, bias), nn.ReLU(), nn.Linear(5, 4, bias))
    ours.load_state_dict(plain.state_dict())
    products.install(ours)
    x = torch.randn(*rows, 7)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-6)
        assert len(always) == (0 if 0 in rows else 2)
        wide = ours.double()(x.double())
        torch.testing.assert_close(wide, plain.double()(x.double()), rtol=1e-12, atol=1e-12)
        assert len(always) == (0 if 0 in rows else 2)
    ours, plain = ours.float(), plain.float()
    found, wanted = (torch.autograd.grad(m(x).sum(), m[0].weight)[0] for m in (ours, plain))
    torch.testing.assert_close(found, wanted)  # who learns gets gradients


LENGTHS = """
import os
import random
import torch
from kvweave.run import products

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

torch.set_num_threads(1)
draw, x, weight = random.Random(0), torch.randn(4096, 64), torch.randn(128, 64)
with torch.inference_mode():
    products.product(x[:256], x[:1024])
    before = resident()
    for _ in range(500):
        rows = draw.randint(24, 256)
        products.product(x[:rows], x[: draw.randint(512, 4096)])
        products.product(x[:rows], weight)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read of Linux's /proc")
def test_what_is_kept_of_lengths_is_bounded() -> None:
    told = subprocess.run(
        [sys.executable, "-c", LENGTHS], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(told.stdout) < 200, "MiB: 128 kernels in two places, and holes between them"


@pytest.mark.parametrize("n", [1, 2, 19, 64, 129])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "kind, skipped",
    [
        (kind, n)
        for kind in ("all", "bias", "causal")
        for n in (None, 0, 7)
        if kind != "causal" or n is None
    ],
)
@pytest.mark.parametrize("at_once", [1, 10, 1000])
@pytest.mark.sampled
def test_attention_is_what_it_is(
    n: int,
    group: int,
    kind: str,
    skipped: int | None,
    at_once: int,
    always: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(n * group)
    n_keys, clear, watched = n if kind == "causal" else n + 40, 0, skipped is not None
    query = torch.randn(n, HEADS * group, DIM)
    # rows of a longer buffer, as contexts keep them
    keys = torch.randn(HEADS, n_keys + 9, DIM)[:, :n_keys]
    values = torch.randn(HEADS, n_keys + 9, V_DIM)[:, :n_keys]
    bias = torch.zeros(n, n_keys)
    if kind == "causal":
        bias = torch.full((n, n_keys), -torch.inf).triu_(1)
    elif kind == "bias":
        clear = 11
        bias[:, clear:].masked_fill_(torch.rand(n, n_keys - clear) < 0.5, -torch.inf)
    skips = min(skipped or 0, n - 1)
    monkeypatch.setattr(written, "SCRATCH", 4 * group * n_keys * at_once)
    monkeypatch.setattr(written, "BLOCK", at_once)
    piece = Piece(0, n, 0, n_keys, kind == "causal", watched, clear=clear, skipped=skips)
    given = None if kind in ("all", "causal") else bias
    seen = VisibleKV(keys, values, given, kind == "causal", piece)
    before = [x.clone() for x in (query, keys, values, bias)]
    out, weights = attention._attention(query, seen, Scaling(0.3, None), watched)
    assert len(always) >= 2 * HEADS * -(-n // at_once)
    asked = query.double().view(n, HEADS, group, DIM)
    scores = torch.einsum("nhgd,hsd->hgns", asked, keys.double()) * 0.3 + bias
    shares = scores.softmax(-1)
    wanted = torch.einsum("hgns,hsd->nhgd", shares, values.double()).reshape(n, -1, V_DIM)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-5, atol=1e-5)
    assert (weights is not None) == watched
    if weights is not None:
        shown = shares.reshape(HEADS * group, n, n_keys)[:, skips:].float()
        torch.testing.assert_close(weights, shown, rtol=1e-5, atol=1e-6)
        pieces: dict[int, list[torch.Tensor]] = {}

        def show(some: torch.Tensor, row: int) -> None:
            pieces.setdefault(row, []).append(some.clone())

        adding = replace(seen, show=show)
        again, rest = attention._attention(query, adding, Scaling(0.3, None), True)
        assert rest is None and torch.equal(again, out)
        assert {len(each) for each in pieces.values()} == {HEADS} and min(pieces) == skips
        whole = [torch.cat(pieces[row]) for row in sorted(pieces)]
        assert torch.equal(torch.cat(whole, 1), weights)
    for now, was in zip((query, keys, values, bias), before, strict=True):
        assert torch.equal(now, was)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt_neox", "gemma3", "mixtral", "deepseek_v3_latent"]
)
def test_a_model_answers_as_transformers_does(name: str, always: list[int]) -> None:
    kind, changes = (oracle.MODELS | oracle.FIXED)[name]
    given = oracle.build(kind, changes, torch.float32)
    kinds = [type(module) for module in given.modules()]
    runner = Runner(given, name=name)
    assert [type(module) for module in given.modules()] == kinds  # the caller's stays as it was
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = given(ids[None].to(oracle.DEVICE), use_cache=False).logits[0].cpu()
    always.clear()
    rows, found = oracle.rows_of(runner, ids)
    assert always
    assert oracle.relative(found, wanted) < 1e-4
    slots = np.array([3, 4, 11, 20, 38, 39])
    (again,) = runner.forward([Work(rows, ids.numpy()[slots], slots, slots, want=np.arange(6))])
    assert oracle.relative(again, wanted[slots]) < 1e-4


def test_small_layers_and_other_machines_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kinds(faster: bool, n: int) -> list[type]:
        monkeypatch.setattr(products, "faster", faster)
        model = nn.Sequential(nn.Linear(n, 512), nn.Linear(512, n).double())
        products.install(model)
        return [type(layer) for layer in model]

    assert kinds(True, 512) == [products._Linear, nn.Linear]
    assert kinds(True, 511) == kinds(False, 512) == [nn.Linear, nn.Linear]

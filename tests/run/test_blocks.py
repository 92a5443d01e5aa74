"""Query heads that share keys may stand in one block: what comes out is the same."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch

from kvweave.run import products, written
from kvweave.run.attention import FOLD, WIDE, _attention, _fold
from kvweave.run.base import Observer, Work
from kvweave.run.model import Runner
from kvweave.run.part import Piece
from kvweave.run.written import Scaling, VisibleKV, is_quick
from kvweave.weave.passes import Mass

KV_HEADS, KEYS = 3, 70


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [1, FOLD - 1, FOLD, 48, WIDE // 2, WIDE - 1, WIDE])
@pytest.mark.sampled
def test_however_heads_are_folded_rows_see_what_their_mask_says(n: int, group: int) -> None:
    made = torch.Generator().manual_seed(n * group)
    heads = KV_HEADS * group
    query = torch.randn(n, heads, 8, dtype=torch.float64, generator=made)
    keys = torch.randn(KV_HEADS, KEYS, 8, dtype=torch.float64, generator=made)
    values = torch.randn(KV_HEADS, KEYS, 6, dtype=torch.float64, generator=made)
    seen = torch.rand(n, KEYS, generator=made) < 0.5
    seen[:, 0] = True
    bias = torch.zeros(n, KEYS, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
    piece = Piece(0, n, 0, KEYS, False, False, bias)
    wanted = torch.empty(n, heads, 6, dtype=torch.float64)
    for row in range(n):
        for head in range(heads):
            mine = seen[row]
            share = (keys[head // group, mine] @ query[row, head] * 0.3).softmax(0)
            wanted[row, head] = share @ values[head // group, mine]
    for held in (None, piece, piece):  # the second time what was repeated is there
        out, _ = _attention(
            query, VisibleKV(keys, values, bias, False, held), Scaling(0.3, None), False
        )
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    folded = _fold(n, group, True)
    assert group % folded == 0 and (folded == group or n >= FOLD)
    assert FOLD <= n < WIDE or folded == (group if n < FOLD else 1)
    assert set(piece.repeated) == ({folded} if folded > 1 else set())


@pytest.mark.parametrize("n", [2, 19, 20, 47, 128, 129])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("clear", [0, 30])
@pytest.mark.parametrize("scratch", [1, 4, 1000])
def test_what_is_written_out_in_place_is_attention(
    n: int, watched: bool, clear: int, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.Generator().manual_seed(n + clear)
    query = torch.randn(n, KV_HEADS * 2, 8, generator=made)
    keys = torch.randn(KV_HEADS, KEYS, 8, generator=made)
    values = torch.randn(KV_HEADS, KEYS, 6, generator=made)
    unseen = torch.rand(n, KEYS, generator=made) < 0.5
    unseen[:, : max(1, clear)] = False
    bias = torch.zeros(n, KEYS).masked_fill_(unseen, -torch.inf)
    skipped = n // 3 if watched else 0
    piece = Piece(0, n, 0, KEYS, False, watched, bias, clear=clear, skipped=skipped)
    scores = torch.einsum("nkgd,ksd->kgns", query.view(n, KV_HEADS, 2, 8).double(), keys.double())
    shares = (scores * 0.3 + bias).softmax(-1)
    wanted = torch.einsum("kgns,ksd->nkgd", shares, values.double()).reshape(n, KV_HEADS * 2, 6)
    monkeypatch.setattr(written, "SCRATCH", scratch * 2 * n * KEYS)  # none, one head, all at a time
    monkeypatch.setattr(written, "_mine", threading.local())
    monkeypatch.setattr(products, "faster", False)  # tests/run/test_products.py has the others
    seen, before = VisibleKV(keys, values, bias, False, piece), [keys.clone(), bias.clone()]
    out, weights = _attention(query, seen, Scaling(0.3, None), watched)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-5, atol=1e-5)
    if watched:
        assert weights is not None
        shown = shares.reshape(KV_HEADS * 2, n, KEYS)[:, skipped:].float()
        torch.testing.assert_close(weights, shown, rtol=1e-5, atol=1e-6)
        pieces: list[torch.Tensor] = []

        def show(some: torch.Tensor, row: int) -> None:
            assert row == skipped
            pieces.append(some.clone())

        adding = replace(seen, show=show)
        again, rest = _attention(query, adding, Scaling(0.3, None), watched)
        assert rest is None and torch.equal(again, out)
        assert len(pieces) == (1 if scratch == 1000 else KV_HEADS)
        assert torch.equal(torch.cat(pieces), weights)
    assert torch.equal(keys, before[0]) and torch.equal(bias, before[1])
    assert is_quick(query, seen) == (20 <= n <= 128 and scratch > 1)


class Seen(Observer):
    """Notes how many heads it is shown at a time, and shows them to one who adds up."""

    def __init__(self, inner: Mass, at_once: bool) -> None:
        self.inner, self.heads, self.rows = inner, set[int](), inner.rows
        self.begin, self.end = inner.begin, inner.end
        self.sums = None if at_once else inner.sums

    def see(self, layer: int, first: int, begin: int, weights: torch.Tensor) -> None:
        self.heads.add(len(weights))
        self.inner.see(layer, first, begin, weights)


@pytest.mark.skipif(oracle.DEVICE.type != "cpu", reason="a GPU adds up in its kernels")
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_who_adds_up_is_shown_a_few_heads_while_they_are_at_hand(
    by_head: bool, squared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_head and not products._is_right():
        pytest.skip("this torch has no oneDNN operation")
    monkeypatch.setattr(products, "faster", by_head)
    monkeypatch.setattr(products, "MANY", 1)
    monkeypatch.setattr(written, "SCRATCH", 1 << 9)
    monkeypatch.setattr(written, "_mine", threading.local())
    kind, changes = oracle.MODELS["llama"]
    runner = Runner(oracle.build(kind, changes, torch.float32), name="llama")
    n, slots = 30, np.array([3, 9, 10, 27, 28, 29])
    ids = torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(1))
    rows, _ = oracle.rows_of(runner, ids)
    weights = np.array([0.0, 0.0, 0.0, 0.2, 0.2, 1.0])
    found: list[Seen] = []
    for at_once in (True, False):
        found.append(Seen(Mass(n, weights, runner.device, 1, squared), at_once))
        runner.forward([Work(rows, ids.numpy()[slots], slots, slots, observer=found[-1])])
    heads, kv_heads = runner.config.num_attention_heads, runner.config.num_key_value_heads
    assert [each.heads for each in found] == [{heads}, {heads // kv_heads}] and kv_heads > 1
    whole, some = (each.inner.total for each in found)
    torch.testing.assert_close(some, whole, rtol=1e-4, atol=1e-7)
    assert float(some[:3].sum()) > 0

"""The signals of the milestone predictor against their definitions, and the network over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvweave.keep.tokens import signals as module
from kvweave.keep.tokens.access import Rule
from kvweave.keep.tokens.milestone import PageReads
from kvweave.keep.tokens.signals import FAST, GAP, SIGNALS, TINY, PageSignals, apply, shipped
from kvweave.run.base import LayerInfo
from kvweave.run.rotary import STATIC
from kvweave.store.kv import LayerShape

HEADS, PAGES, STEPS = 3, 9, 60


def steps(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pages come one by one; each head reads some of them."""
    rng = np.random.default_rng(seed)
    made = []
    for step in range(STEPS):
        n = min(PAGES, 2 + step // 7)
        mass = rng.random((HEADS, n)).astype(np.float32) ** 4
        made.append((mass, rng.random((HEADS, n)) < 0.15))
    return made


def slowly(seen: list[tuple[np.ndarray, np.ndarray]], head: int, page: int) -> dict[str, float]:
    """Each signal as its name says it, looking at all steps again."""
    there = [(i, m, a) for i, (m, a) in enumerate(seen) if m.shape[1] > page]
    born, now = there[0][0], len(seen)
    reads = [i for i, _, a in there if a[head, page]]
    gaps = [b - a for a, b in itertools.pairwise(reads)]
    age = now - born
    since = now - reads[-1] if reads else age
    ema = 0.0
    for _, m, _ in there:
        ema = FAST * ema + (1 - FAST) * float(m[head, page])
    masses = [float(m[head, page]) for _, m, _ in there]
    return {
        "age": np.log1p(age), "since": np.log1p(since), "longest": np.log1p(max(gaps, default=0)),
        "rate": len(reads) / age, "ema": np.log(ema + TINY), "mean": np.log(sum(masses) / age + TINY),
        "peak": np.log(max(masses) + TINY), "returns": np.log1p(sum(g > GAP for g in gaps)),
        "fresh": np.log1p(age - since), "new": float(born > 0),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_signals_are_what_they_are_called(seed: int) -> None:
    made, signals = steps(seed), PageSignals()
    for mass, access in made:
        signals.see(torch.from_numpy(mass).double(), torch.from_numpy(access))
    n = made[-1][0].shape[1]
    assert signals.n == n
    rows = signals.rows()
    slow = [[slowly(made, h, p) for p in range(n)] for h in range(HEADS)]
    for i, name in enumerate(SIGNALS):
        for h in range(HEADS):
            for p in range(n):
                if name in slow[0][0]:
                    wanted = slow[h][p][name]
                elif name == "heads_ema":
                    wanted = np.mean([slow[x][p]["ema"] for x in range(HEADS)])
                elif name == "heads_since":
                    wanted = min(slow[x][p]["since"] for x in range(HEADS))
                else:
                    at = p - 1 if name.startswith("before") else p + 1
                    which = name.split("_")[1]
                    none = {"since": np.log1p(STEPS), "ema": np.log(TINY)}[which]
                    wanted = slow[h][at][which] if 0 <= at < n else none
                assert float(rows[h, p, i]) == pytest.approx(wanted, rel=1e-4, abs=1e-4), (
                    name,
                    h,
                    p,
                )


def test_weights_of_other_signals_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.cache_clear()
    monkeypatch.setattr(module, "SIGNALS", SIGNALS[1:])
    with pytest.raises(ValueError, match="train it again"):
        shipped()
    shipped.cache_clear()


def test_a_network_is_two_products() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "mean": [0.5] * len(SIGNALS), "scale": [2.0] * len(SIGNALS), "w1": rng.normal(size=(len(SIGNALS), 5)).tolist(),
        "b1": [0.1] * 5, "w2": rng.normal(size=(5, 1)).tolist(), "b2": [0.3],
    }  # fmt: skip
    row = torch.from_numpy(rng.normal(size=len(SIGNALS)).astype(np.float32))
    total = 0.3
    for j in range(5):
        inner = 0.1 + sum(
            (float(row[i]) - 0.5) / 2 * weights["w1"][i][j] for i in range(len(SIGNALS))
        )
        total += max(inner, 0) * weights["w2"][j][0]
    assert float(apply(weights, row[None])[0]) == pytest.approx(total, rel=1e-4)


def test_pages_that_are_read_are_the_first_that_hold_enough() -> None:
    """Also where pages have as much as each other, or nothing; against a sort of them all."""
    rng = np.random.default_rng(1)
    for i in range(600):
        mass = torch.from_numpy(rng.random((3, 2, rng.integers(1, 40))).astype(np.float32))
        if i % 3 == 0:
            mass = (4 * mass).round() / 4
        mass *= torch.from_numpy(rng.random(mass.shape) < (0.3, 0.9, 1.0, 0.0)[i % 4])
        rule = Rule("cover", (0.95, 0.5, 1.0)[i % 3])
        best, order = mass.sort(dim=-1, descending=True, stable=True)
        taken = best.cumsum(-1) - best < rule.amount * mass.sum(-1, keepdim=True)
        wanted = torch.zeros_like(taken).scatter(-1, order, taken) & (mass > 0)
        assert torch.equal(rule.read(mass), wanted)


def test_layers_that_saw_the_same_are_as_layers_one_by_one() -> None:
    """All at once, until a pass leaves one out; each head's own rows as all would be."""
    infos = [LayerInfo(LayerShape(heads, 4, heads, 4), STATIC) for heads in (2, 1, 3)]
    joint, apart = (PageReads(infos, 4, 8) for _ in range(2))
    torch.manual_seed(2)
    for step in range(40):
        stop, some = 20 + step, [0, 2] if step in (23, 31) else [0, 1, 2]
        found = []
        for layer in some:
            heads = infos[layer].shape.k_heads
            weights = torch.rand(heads, 2, 1, stop).pow(4) * (torch.rand(heads, 1, 1, stop) < 0.8)
            weights /= weights.sum(-1, keepdim=True)
            apart.add(layer, apart.of_attention(layer, 0, weights))
            slots = torch.stack([torch.randperm(stop) for _ in range(heads)])
            mine = weights.gather(3, slots[:, None, None].expand_as(weights))
            found.append((layer, joint.of_kept(layer, stop, mine, slots)))
        joint.add_all(found)
        assert (joint._whole is not None) == (step < 23)
        for layer in range(3):
            assert torch.equal(joint.logits(layer), apart.logits(layer))
        held = sum(t.nbytes for t in joint.held() if t is not None)
        assert held <= joint.bytes_for(stop, stop)

"""Policies over latents, against transformers' own keys and values of each head in float64:
python -m pytest tests/keep/test_latents.py

Latents are what all heads of a layer share. What policies are to go by is what each head makes of them, which
transformers hands to attention written out: rows with as many kv heads as there are heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from keep.views import compute, view
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvweave import Engine
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy
from kvweave.run.model import Runner

N = 45
TOKENS = np.random.default_rng(4).integers(3, 101, N)
NAMES = [name for name, kind in POLICIES.items() if kind.needs & (Need.KEYS | Need.QUERIES)]
SMALL: dict[str, dict[str, object]] = {
    "flexicache": {"page": 4, "overlap": 0.2},
    "expected_attention": {"ahead": 40},
}
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values [head, row, dim], turned


@pytest.fixture(scope="module", params=["deepseek_v3_latent", "deepseek_v2_latent"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Runner, list[Heads], float]]:
    """A model over latents of ours, and what heads of the same model have in transformers."""
    kind, options = oracle.MODELS[request.param]
    model = oracle.build(kind, options, torch.float64)
    oracle.stay_in_float64(model)
    runner, found = Runner(model), []

    def attention(module, query, key, value, mask, **more):  # type: ignore[no-untyped-def]
        found.append((query[0], key[0], value[0]))
        return plain(module, query, key, value, mask, **more)

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["seen"] = attention
    model.config._attn_implementation = "seen"
    with torch.inference_mode():
        model(torch.tensor(TOKENS, device=oracle.DEVICE)[None], use_cache=False)
    del ALL_ATTENTION_FUNCTIONS["seen"]
    yield runner, found, oracle.bound(request.param)


def ours(policy: TokenPolicy, runner: Runner, layer: int, at: int = N) -> LayerView:
    """Rows of ours, computed in two pieces under a watch."""
    watch = policy.watch(runner.layers, runner.device)
    if watch is not None:
        watch.until = N
    return view(runner, compute(runner, TOKENS, watch, [20]), layer, watch)


def theirs(policy: TokenPolicy, runner: Runner, heads: Heads, layer: int) -> LayerView:
    """The same of rows with keys and values for each head, as without latents."""
    info = runner.layers[layer]
    assert info.latent is not None
    query, keys, values = (t if i == 2 else t[..., info.latent.dims] for i, t in enumerate(heads))
    n_heads, every = len(keys), torch.arange(N, device=oracle.DEVICE)
    angles = info.rotation.back(info.rotation.angles(every))
    raw = info.rotation.apply(query.transpose(0, 1), angles)
    shape = replace(
        info.shape, k_heads=n_heads, k_dim=keys.shape[2], v_heads=n_heads, v_dim=values.shape[2]
    )
    dense = replace(info, shape=shape, group=1, latent=None)
    infos = [dense if i == layer else each for i, each in enumerate(runner.layers)]
    watch = policy.watch(infos, runner.device)
    if watch is not None:
        watch.until = N
        watch.begin()
        watch.ask(layer, 0, raw)
        watch.end()
    slots = every.expand(n_heads, -1)
    there = torch.ones_like(slots, dtype=torch.bool)
    return LayerView(layer, dense, slots, there, slots, keys, values, watch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled
def test_rows_are_worth_the_mean_over_heads(
    name: str, both: tuple[Runner, list[Heads], float]
) -> None:
    """As of a model that keeps keys and values of each head."""
    runner, found, bound = both
    policy = POLICIES[name](**SMALL.get(name, {}))
    for layer, heads in enumerate(found):
        scores, _ = policy.worth(ours(policy, runner, layer))
        each = theirs(policy, runner, heads, layer)
        wanted = policy.scores(each).double().mean(0, keepdim=True)
        assert scores.shape == (1, N) and wanted.std() > 0
        assert torch.allclose(
            scores.double(), wanted, rtol=1e3 * bound, atol=1e3 * bound * wanted.abs().max()
        ), layer
        assert each.shape[0] > 1 and policy.scores(each).std(0).max() > 0, "heads differ"


def test_two_written_out(both: tuple[Runner, list[Heads], float]) -> None:
    """Cosines with the mean direction, and what queries to come would read: as the papers say it, by head."""
    runner, found, bound = both
    every = torch.arange(N + 40, device=oracle.DEVICE)
    for layer, (query, keys, values) in enumerate(found):
        alike, expected = [], []
        info = runner.layers[layer]
        dims = info.latent.dims  # type: ignore[union-attr]
        for q, k, v in zip(query, keys, values, strict=True):
            units = k / k.norm(dim=1, keepdim=True)
            alike.append(-(units @ (units.mean(0) / units.mean(0).norm())))
            back = info.rotation.back(info.rotation.angles(every[:N]))
            raw = info.rotation.apply(q[:, None, dims], back)[4:, 0]
            cos, sin = info.rotation.angles(every[N:])
            mean = cos.mean(0, keepdim=True), sin.mean(0, keepdim=True)
            dim = k.shape[1]
            turning = info.rotation.apply(torch.eye(dim).to(k)[:, None], mean)[:, 0]  # rows: R e
            k = k[:, dims]
            m, c = turning.T @ raw.mean(0), turning.T @ torch.cov(raw.T, correction=0) @ turning
            logits = k @ m / math.sqrt(dim) + ((k @ c) * k).sum(1) / (2 * dim)
            logits[:4] = -torch.inf
            expected.append(logits.softmax(0) * v.norm(dim=1))
        for name, wanted in (("keydiff", alike), ("expected_attention", expected)):
            policy = POLICIES[name](**SMALL.get(name, {}))
            scores, _ = policy.worth(ours(policy, runner, layer))
            whole = torch.stack(wanted).mean(0)
            assert (scores[0].double() - whole).abs().max() < 1e3 * bound * whole.abs().max(), (
                name,
                layer,
            )


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.sampled
def test_they_decode_and_stay_within_their_budget(name: str) -> None:
    """Over latents every policy runs: choice after choice, what is counted as it says before, and chunks."""
    with Engine(tiny("deepseek_v3_latent"), base="") as engine:
        context = engine.context("c", keep=f"{name}:30,every=8")
        context.append(np.random.default_rng(6).integers(3, 101, 80).tolist())
        assert len(context.generate(20, ignore_eos=True).tokens) == 20
        engine.check_integrity()
        keeper = context.session.state.keeper
        if keeper.watch is not None:
            rows = context.session.state.rows
            most = max(
                len(own) for layer in range(len(engine.runner.layers)) for own in rows.kept(layer)
            )
            assert keeper.n_bytes <= 2 * keeper.watch.tally.bytes_for(rows.n, most)
        if name not in ("full", "milestone", "diffkv", "flexicache", "ttkv", "streaming"):
            engine.put("a", np.random.default_rng(7).integers(3, 101, 40).tolist())
            engine.compress("a", f"{name}:0.5")
            engine.check_integrity()

"""Token policies run by hand: prompts computed under a watch, views of their rows, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.run.base import Ints, Rows, Work
from kvweave.run.model import Runner


def compute(
    runner: Runner,
    tokens: Ints,
    watch: TokenWatch | None,
    cuts: Sequence[int] = (),
    rows: Rows | None = None,
) -> Rows:
    """Run ``tokens`` behind ``rows``, cut before each of ``cuts``, as works in several passes."""
    rows = runner.new_rows() if rows is None else rows
    at = rows.n
    rows.reserve(at + len(tokens))
    slots = np.arange(at, at + len(tokens))
    work = Work(rows, tokens, slots, slots, observer=watch)
    bounds = [0, *cuts, len(tokens)]
    for start, stop in pairwise(bounds):
        runner.forward([work.part(start, stop)])
    return rows


def view(runner: Runner, rows: Rows, layer: int, watch: TokenWatch | None) -> LayerView:
    """Return all rows of a layer."""
    info = runner.layers[layer]
    keys, values = (t.transpose(0, 1) for t in rows.read(layer))
    every = torch.arange(rows.n, device=keys.device).expand(keys.shape[0], -1)
    return LayerView(
        layer, info, every, torch.ones_like(every, dtype=torch.bool), every, keys,
        values=values, watch=watch,
    )  # fmt: skip


def watched(
    policy: TokenPolicy, runner: Runner, tokens: Ints, size: int, prompts: Sequence[Ints] = ()
) -> list[LayerView]:
    """Compute a prompt in pieces of ``size`` rows, and read it again where the policy needs that."""
    watch = policy.watch(runner.layers, runner.device)
    if watch is not None:
        watch.until = len(tokens)
    rows = compute(runner, tokens, watch, range(size, len(tokens), size))
    if Need.REPLAY in policy.needs:
        for replay in policy.replays(tokens, *prompts):
            watch.tally.read(replay)
            watch.until = 0
            compute(runner, replay.tokens, watch, range(size, len(replay.tokens), size), rows)
            watch.tally.read(None)
            rows.truncate(replay.n)
    return [view(runner, rows, layer, watch) for layer in range(len(runner.layers))]


def pinned(policy: TokenPolicy, seen: LayerView, scores: Tensor) -> Tensor:
    """Return scores of which what stays in any case is infinite."""
    stays = seen.front(policy.sinks) | seen.newest(policy.window)
    return scores.double().masked_fill(stays, float("inf")).masked_fill(~seen.there, -float("inf"))


def best(scores: Tensor, n: int) -> Tensor:
    """Tell which ``n`` of the last dim are the highest; of equal ones the last."""
    order = torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True).indices[..., :n]
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(-1, scores.shape[-1] - 1 - order, True)

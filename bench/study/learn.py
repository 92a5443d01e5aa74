"""Teach the milestone predictor from traces, and ask it of families and models that it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.keep.tokens.signals import SIGNALS, PageSignals, Weights
from kvweave.probe import PageBudget, PageTrace

EVERY = 13  # steps between two that are learned from
AHEAD = 4  # steps whose attention is foretold
HIDDEN, ROUNDS, RATE = 24, 400, 0.02


@dataclass
class Lesson:
    """What was at hand after a step, and what the next ones read: [head, page, signal], [head, page]."""

    rows: NDArray[np.float32]
    wanted: NDArray[np.float32]


def lessons(trace: PageTrace, budget: PageBudget | None = None) -> list[Lesson]:
    """Return some steps of a trace, of the pages that count."""
    budget, found = budget or PageBudget(), []
    signals = PageSignals()
    steps = list(trace.each())
    for at, (mass, access) in enumerate(steps):
        signals.see(torch.from_numpy(mass).double(), torch.from_numpy(access))
        n = access.shape[1]
        first, last = budget.between(n)
        if at % EVERY or last - first < 16 or at + AHEAD >= len(steps):
            continue
        ahead = sum(m[:, first:last] for m, _ in steps[at + 1 : at + 1 + AHEAD])
        found.append(Lesson(signals.rows()[:, first:last].numpy(), np.asarray(ahead, np.float32)))
    return found


def learn(some: Sequence[Lesson], seed: int = 0) -> Weights:
    """Return weights: softmax over a head's pages is to be what its next steps read."""
    torch.manual_seed(seed)
    flat = np.concatenate([each.rows.reshape(-1, len(SIGNALS))[::7] for each in some])
    mean, scale = flat.mean(0), np.maximum(flat.std(0), 0.01)
    net = torch.nn.Sequential(
        torch.nn.Linear(len(SIGNALS), HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    rng = np.random.default_rng(seed)
    for at in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - at / ROUNDS)
        optimizer.zero_grad()
        for i in rng.integers(0, len(some), 8):
            rows = torch.from_numpy((some[i].rows - mean) / scale)
            wanted = torch.from_numpy(some[i].wanted)
            heads = wanted.sum(1) > 0.02  # the others read sinks and what is new
            if not heads.any():
                continue
            share = wanted[heads] / wanted[heads].sum(1, keepdim=True)
            weight = wanted[heads].sum(1).sqrt()
            said = net(rows[heads])[..., 0].log_softmax(1)
            loss = -((share * said).sum(1) * weight).sum() / weight.sum()
            (loss / 8).backward()
        optimizer.step()
    a, b = net[0], net[2]
    parts = {"mean": mean, "scale": scale, "w1": a.weight.detach().numpy().T, "b1": a.bias.detach().numpy(),
             "w2": b.weight.detach().numpy().T, "b2": b.bias.detach().numpy()}  # fmt: skip
    found: dict[str, Any] = {
        k: np.asarray(v, np.float64).round(5).tolist() for k, v in parts.items()
    }
    return {"signals": list(SIGNALS), **found}

"""Which pages will be read again (CB3): a small network over what decoding has shown of each page.

Recency knows when a page was read last, and attention summed up how much. A page that was written long ago and
waits looks dead to both. The signals here add how long it has waited before, how many heads came back to
it, and whether its neighbour has just been read: chains of thought go through their lines in order.

`bench/study` trains it; ``milestone.json`` holds the weights, and says of what they were made.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.probe.ranking import PageRanking, Scores
from kvweave.probe.trace import Bools, PageMass

SIGNALS = (
    "age", "since", "longest", "rate", "ema", "mean", "peak", "returns", "fresh", "heads_ema", "heads_since",
    "before_since", "before_ema", "after_since", "after_ema", "new",
)  # fmt: skip
FAST = 0.5 ** (1 / 8)  # how much of `ema` is left a step later
GAP = 8  # steps without a read after which one is a return
TINY = 1e-4  # of attention: less is as good as none
Weights = dict[str, Any]


class PageSignals:
    """What decoding has shown of each page [head, page]; all of it is at hand after each step."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        shape = n_heads, n_pages
        self.step = 0
        self.born = np.full(n_pages, -1.0)
        self.last = np.full(shape, -1.0)
        self.longest, self.reads, self.returns = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.ema, self.total, self.peak = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def see(self, mass: PageMass, access: Bools) -> None:
        """Take [head, page] of a step."""
        n = access.shape[1]
        new = self.born[:n] < 0
        self.born[:n][new] = self.step
        last, longest = self.last[:, :n], self.longest[:, :n]
        again = access & (last >= 0)
        gap = self.step - last
        longest[again] = np.maximum(longest[again], gap[again])
        self.returns[:, :n] += again & (gap > GAP)
        last[access] = self.step
        self.reads[:, :n] += access
        self.ema[:, :n] = FAST * self.ema[:, :n] + (1 - FAST) * mass
        self.total[:, :n] += mass
        self.peak[:, :n] = np.maximum(self.peak[:, :n], mass)
        self.step += 1

    def rows(self, n_pages: int) -> NDArray[np.float32]:
        """Return [head, page, signal] of the first ``n_pages``."""
        n, heads = n_pages, len(self.last)
        age = np.broadcast_to(self.step - self.born[:n], (heads, n))
        since = np.where(self.last[:, :n] < 0, age, self.step - self.last[:, :n])
        ema = _log(self.ema[:, :n])
        near = np.log1p(since)
        found = (
            np.log1p(age), near, np.log1p(self.longest[:, :n]), self.reads[:, :n] / np.maximum(age, 1), ema,
            _log(self.total[:, :n] / np.maximum(age, 1)), _log(self.peak[:, :n]), np.log1p(self.returns[:, :n]),
            np.log1p(np.maximum(age - since, 0)),
            np.broadcast_to(ema.mean(0), (heads, n)), np.broadcast_to(near.min(0), (heads, n)),
            _shift(near, 1, np.log1p(self.step)), _shift(ema, 1, _log(np.zeros(1))[0]),
            _shift(near, -1, np.log1p(self.step)), _shift(ema, -1, _log(np.zeros(1))[0]),
            np.broadcast_to(1.0 * (self.born[:n] > 0), (heads, n)),
        )  # fmt: skip
        return np.stack(found, axis=-1).astype(np.float32)


class Milestone(PageRanking):
    """Pages by how likely they are read within the next steps, as learned from other traces."""

    def __init__(self, n_heads: int, n_pages: int, weights: Weights | None = None) -> None:
        super().__init__(n_heads, n_pages)
        self.weights = shipped() if weights is None else weights
        self.signals = PageSignals(n_heads, n_pages)

    def scores(self) -> Scores:
        """Return logits; pages that are not there yet come last."""
        n = int((self.signals.born >= 0).sum())
        found = np.full(self.shape, -np.inf)
        if n:
            found[:, :n] = apply(self.weights, self.signals.rows(n))
        return found

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.signals.see(mass, access)


def apply(weights: Weights, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return logits [...] of ``rows`` [..., signal]."""
    parts = {
        k: np.asarray(weights[k], np.float32) for k in ("mean", "scale", "w1", "b1", "w2", "b2")
    }
    hidden = np.maximum(((rows - parts["mean"]) / parts["scale"]) @ parts["w1"] + parts["b1"], 0)
    found: NDArray[np.float32] = (hidden @ parts["w2"] + parts["b2"])[..., 0]
    return found


@cache
def shipped() -> Weights:
    """Return the weights that came with this package."""
    text = resources.files("kvweave.probe").joinpath("milestone.json").read_text()
    found: Weights = json.loads(text)
    if tuple(found["signals"]) != SIGNALS:
        raise ValueError("milestone.json is of other signals: train it again (bench/study)")
    return found


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.log(values + TINY)
    return found


def _shift(values: NDArray[np.float64], by: int, end: float) -> NDArray[np.float64]:
    """Return what the page ``by`` before has; ``end`` where there is none."""
    found = np.full_like(values, end)
    if by > 0:
        found[:, by:] = values[:, :-by]
    else:
        found[:, :by] = values[:, -by:]
    return found

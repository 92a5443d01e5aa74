"""Which pages will be read again (CB3): a small network over what decoding has shown of each page.

Recency knows when a page was read last, and attention summed up how much. A page that was written long ago and
waits looks dead to both. The signals here add how long it has waited before, how many heads came back to
it, and whether its neighbour has just been read: chains of thought go through their lines in order.

`bench/study` trains it; ``milestone.json`` holds the weights, and says of what they were made. `kvweave.probe`
asks it of traces, `kvweave.keep.tokens.milestone` while an engine decodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.keep.tokens.watch import BySlot

SIGNALS = (
    "age", "since", "longest", "rate", "ema", "mean", "peak", "returns", "fresh", "heads_ema", "heads_since",
    "before_since", "before_ema", "after_since", "after_ema", "new",
)  # fmt: skip
FAST = 0.5 ** (1 / 8)  # how much of `ema` is left a step later
GAP = 8  # steps without a read after which one is a return
TINY = 1e-4  # of attention: less is as good as none
KEPT = 7  # numbers that are kept of each head and page
Weights = dict[str, Any]


class PageSignals:
    """What decoding has shown of each page of some heads, in numbers [head, page]; all of it is at hand after
    each step. Steps count from 1, and 0 is never."""

    def __init__(self) -> None:
        self.step = 0
        self.born = BySlot()  # [1, page]
        self.last, self.longest, self.reads, self.returns = (BySlot() for _ in range(4))
        self.ema, self.total, self.peak = (BySlot() for _ in range(3))

    @property
    def n(self) -> int:
        """Pages that were there in some step."""
        return self.born.n

    def see(self, mass: Tensor, access: Tensor) -> None:
        """Take [head, page] of a step: the attention on each page, and whether it was read."""
        self.step += 1
        n, now, read = mass.shape[1], float(self.step), access.to(mass.dtype)
        born, last = self.born.upto(n, mass[:1]), self.last.upto(n, mass)
        born.masked_fill_(born == 0, now)
        gap = torch.where(access & (last > 0), now - last, 0)
        longest, peak = self.longest.upto(n, mass), self.peak.upto(n, mass)
        torch.maximum(longest, gap, out=longest)
        torch.maximum(peak, mass, out=peak)
        self.returns.upto(n, mass).add_(gap > GAP)
        self.reads.upto(n, mass).add_(read)
        self.ema.upto(n, mass).mul_(FAST).add_(mass, alpha=1 - FAST)
        self.total.upto(n, mass).add_(mass)
        last.masked_fill_(access, now)

    def near(self) -> tuple[Tensor, Tensor]:
        """Return [head, page] how faded attention is, and how long ago the last read, both as logarithms."""
        return (_of(self.ema) + TINY).log(), self._since().log1p()

    def rows(self, heads: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return [head, page, signal]. ``heads``: the mean and the least of `near` [page] over all heads there
        are; None: these are all."""
        ema, near = self.near()
        age, since = self._age(), self._since()
        all_ema, all_near = heads or (ema.mean(0), near.amin(0))
        never, nothing = float(np.log1p(self.step)), float(np.log(TINY))
        found = (
            age.log1p(), near, _of(self.longest).log1p(), _of(self.reads) / age.clamp(min=1), ema,
            (_of(self.total) / age.clamp(min=1) + TINY).log(), (_of(self.peak) + TINY).log(), _of(self.returns).log1p(),
            (age - since).clamp(min=0).log1p(), all_ema, all_near,
            _shift(near, 1, never), _shift(ema, 1, nothing), _shift(near, -1, never), _shift(ema, -1, nothing),
            (_of(self.born) > 1).to(ema.dtype),
        )  # fmt: skip
        return torch.stack([each.expand_as(ema) for each in found], -1).float()

    def cut(self, n: int) -> None:
        """Forget the pages from ``n`` on; all of it, where there is none left."""
        if not n:
            self.step = 0
        for each in self._all:
            each.compact(np.arange(n))

    def held(self) -> Iterable[Tensor | None]:
        """Return all that is kept."""
        return (each.room for each in self._all)

    def part(self, heads: slice, copy: bool = False) -> PageSignals:
        """Return a view of some heads, in which nothing is to be seen; or a copy."""
        made = PageSignals()
        made.step = self.step
        for own, mine in zip(made._all, self._all, strict=True):
            mine.share(own, slice(None) if mine is self.born else heads, copy)
        return made

    @property
    def _all(self) -> Sequence[BySlot]:
        return (
            self.born, self.last, self.longest, self.reads, self.returns, self.ema, self.total, self.peak,
        )  # fmt: skip

    def _age(self) -> Tensor:
        return self.step + 1 - _of(self.born)

    def _since(self) -> Tensor:
        last = _of(self.last)
        return torch.where(last > 0, self.step + 1 - last, self._age())


def apply(weights: Weights, rows: Tensor) -> Tensor:
    """Return logits [...] of ``rows`` [..., signal]."""
    mean, scale, w1, b1, w2, b2 = (
        torch.tensor(weights[k], dtype=rows.dtype, device=rows.device)
        for k in ("mean", "scale", "w1", "b1", "w2", "b2")
    )
    hidden = (((rows - mean) / scale) @ w1 + b1).relu()
    return (hidden @ w2 + b2)[..., 0]


@cache
def shipped() -> Weights:
    """Return the weights that came with this package. Raises ValueError where they are of other signals."""
    text = resources.files("kvweave.keep.tokens").joinpath("milestone.json").read_text()
    found: Weights = json.loads(text)
    if tuple(found["signals"]) != SIGNALS:
        raise ValueError("milestone.json is of other signals: train it again (bench/study)")
    return found


def _of(kept: BySlot) -> Tensor:
    assert kept.written is not None, "no step was seen"
    return kept.written


def _shift(values: Tensor, by: int, end: float) -> Tensor:
    """Return what the page ``by`` before has; ``end`` where there is none."""
    found = torch.full_like(values, end)
    if by > 0:
        found[:, by:] = values[:, :-by]
    else:
        found[:, :by] = values[:, -by:]
    return found

"""Which rows of placed chunks to recompute against the woven context.

One small class a strategy, found by name in `STRATEGIES`. A strategy only chooses; the recompute
always uses the exact mask ``key_position <= query_position``. `random` is the baseline that any
other has to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.weave.parts import Placement


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may look at. Slots and rows are indices into the context's rows.

    ``deviation(layer, what)`` returns, per candidate row, how far the placed "k", "v" or "kv" rows
    of ``layer`` are from rows recomputed in this context (squared L2, float32). ``attention()``
    returns the attention mass the rows not yet computed (the question) pay to each candidate.
    Both cost a pass.
    """

    spans: Sequence[Placement]  # placed parts that are not exact
    candidates: Tensor  # [n] int64, their slots, increasing
    budget: int  # rows to choose
    deviation: Callable[[int, str], Tensor]
    attention: Callable[[], Tensor]
    generator: torch.Generator


class Strategy(Protocol):
    """Chooses rows; does not change anything."""

    name: str

    def choose(self, view: View) -> Tensor:
        """Return slots to recompute, a subset of ``view.candidates``, in increasing order."""
        ...


def _best(view: View, scores: Tensor) -> Tensor:
    top = torch.topk(scores, min(view.budget, scores.numel())).indices
    return view.candidates[top.sort().values]


class NoRepair:
    """Reuse the rows as they are."""

    name = "none"

    def choose(self, view: View) -> Tensor:
        """Return no slots."""
        return view.candidates[:0]


class Full:
    """Recompute every row: equals a full prefill."""

    name = "full"

    def choose(self, view: View) -> Tensor:
        """Return all candidates."""
        return view.candidates


class Random:
    """Uniformly drawn rows: the baseline."""

    name = "random"

    def choose(self, view: View) -> Tensor:
        """Return ``budget`` rows drawn without replacement."""
        scores = torch.rand(view.candidates.numel(), generator=view.generator)
        return _best(view, scores.to(view.candidates.device))


class FirstK:
    """The first rows of every chunk (EPIC / LegoLink, arXiv 2410.15332, section 4).

    They act as attention sinks when a chunk is computed alone. With ``k`` None the budget is
    shared evenly among the chunks.
    """

    name = "first_k"

    def __init__(self, k: int | None = None) -> None:
        self.k = k

    def choose(self, view: View) -> Tensor:
        """Return the first ``k`` slots of each span."""
        k = self.k if self.k is not None else view.budget // max(1, len(view.spans))
        slots = [torch.arange(p.slot, p.slot + min(k, p.ready)) for p in view.spans]
        return torch.cat(slots) if slots else view.candidates[:0]


class Deviation:
    """Rows whose keys or values change most at a check layer (CacheBlend, arXiv 2405.16444, 4.3).

    The original ranks by values, LMCache by keys: ``what`` is "v", "k" or "kv". All candidates are
    recomputed up to ``layer``, so it costs about (layer + 1) / n_layers of a full prefill.
    """

    name = "deviation"

    def __init__(self, layer: int = 1, what: str = "v") -> None:
        if what not in ("k", "v", "kv"):
            raise InvalidArgument("what", f"{what!r} is none of k, v, kv")
        self.layer, self.what = layer, what

    def choose(self, view: View) -> Tensor:
        """Return the ``budget`` rows that deviate most."""
        return _best(view, view.deviation(self.layer, self.what))


class Query:
    """Rows the question attends to, over all layers and heads, at their woven positions
    (A3, arXiv 2511.17560; ProphetKV, arXiv 2602.02579). Costs one pass of the question; without a
    question it falls back to the first rows of every chunk."""

    name = "query"

    def choose(self, view: View) -> Tensor:
        """Return the ``budget`` rows that get most attention."""
        mass = view.attention()
        return _best(view, mass) if bool(mass.any()) else FirstK().choose(view)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    s.name: s for s in (NoRepair, FirstK, Deviation, Query, Random, Full)
}


def strategy(which: str | Strategy) -> Strategy:
    """Return a strategy by name, or as given. Raises InvalidArgument for an unknown name."""
    if not isinstance(which, str):
        return which
    if which not in STRATEGIES:
        raise InvalidArgument("repair", f"no strategy {which!r}", f"one of {', '.join(STRATEGIES)}")
    return STRATEGIES[which]()

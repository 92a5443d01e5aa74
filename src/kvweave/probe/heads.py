"""Whether heads stay what they are (KU3), and whether attention knows milestones (KU4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.probe.trace import Numbers, PageTrace, TraceSteps


def stability(some: TraceSteps, first: int = 0, last: int | None = None) -> Numbers:
    """Return [head]: how alike the pages are that a head reads in one step and in the next, by Jaccard's
    index, the mean over steps ``[first, last)`` (FlexiCache, arXiv 2511.00868, asks it of top-k pages)."""
    access = some.access[..., first:last]
    if access.shape[-1] < 2:
        raise InvalidArgument(
            "steps", f"{access.shape[-1]} steps have no next one", "give two or more"
        )
    both = (access[..., 1:] & access[..., :-1]).sum(1)
    either = (access[..., 1:] | access[..., :-1]).sum(1)
    alike: Numbers = np.where(either > 0, both / np.maximum(either, 1), 1.0).mean(-1)
    return alike


def rank_overlap(one: Numbers, other: Numbers, top: float = 0.25) -> tuple[float, float]:
    """Return of two values a head [head]: which part of the ``top`` heads are the same, and Spearman's
    correlation of the ranks (mean ranks for equal values); NaN where one has no order."""
    n = max(1, round(top * len(one)))
    best = [set(np.argsort(-values, kind="stable")[:n].tolist()) for values in (one, other)]
    ranks = [_ranks(values) for values in (one, other)]
    with np.errstate(invalid="ignore", divide="ignore"):
        spearman = float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(one) > 1 else float("nan")
    return len(best[0] & best[1]) / n, spearman


def _ranks(values: Numbers) -> Numbers:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    upto = counts.cumsum()
    ranks: Numbers = (upto - (counts - 1) / 2)[group]
    return ranks


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of pages with milestones: how many are among the pages with most attention (``recall``), how many of
    these have one (``precision``), and what ``chance`` would find of them."""

    recall: float
    precision: float
    chance: float
    n_milestones: int  # pages with one
    n_pages: int


def milestone_overlap(
    trace: PageTrace, milestones: Sequence[int], top: float = 0.2, after: int = 2
) -> Overlap:
    """Compare the ``top`` pages by attention with those that hold decoded steps ``milestones``.

    Only pages of decoded tokens count. A page's attention is the mean over heads, and over the steps from
    ``after`` pages behind it on: what is new is read whatever it says. Raises InvalidArgument.
    """
    page, prompt = trace.header.page, trace.header.prompt
    first = -(-prompt // page)
    n = trace.n_pages - after - first
    wanted = sorted({(prompt + step) // page - first for step in milestones})
    wanted = [at for at in wanted if 0 <= at < n]
    if not wanted:
        raise InvalidArgument(
            "milestones",
            "none is on a page that is old enough to count",
            "name earlier steps, or record more behind them",
        )
    total, seen = np.zeros(n), np.zeros(n)
    for mass, _ in trace.each():
        old = mass.shape[1] - after - first
        if old > 0:
            total[:old] += mass[:, first : first + old].mean(0)
            seen[:old] += 1
    mean = total / np.maximum(seen, 1)
    k = max(1, round(top * n))
    best = set(np.argsort(-mean, kind="stable")[:k].tolist())
    both = len(best & set(wanted))
    return Overlap(both / len(wanted), both / k, k / n, len(wanted), n)

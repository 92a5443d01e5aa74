"""Recall at a budget (KU2): how much of what a step reads would have been there.

Pages in front (sinks) and the newest ones are read nearly always, and hide the rest: they stand
apart, which means they are in memory and neither count nor cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import InvalidArgument, nearest
from kvweave.probe.predict import RANKINGS
from kvweave.probe.ranking import PageRanking
from kvweave.probe.trace import Bools, Numbers, PageMass, PageTrace


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How many pages a head may have: a ``share`` of those that are there, one at least, beside
    ``sinks`` pages in front and the ``newest`` ones. Raises InvalidArgument."""

    share: float = 0.2
    sinks: int = 1
    newest: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InvalidArgument("share", f"{self.share} is not over 0 and at most 1")
        if self.sinks < 0 or self.newest < 0:
            raise InvalidArgument("sinks", "a number of pages is not less than 0")

    def between(self, n_pages: int) -> tuple[int, int]:
        """Return the pages that count, ``[first, last)``."""
        return min(self.sinks, n_pages), max(n_pages - self.newest, min(self.sinks, n_pages))

    def pages(self, n_counted: int) -> int:
        """Return how many of the pages that count may be there."""
        return min(n_counted, max(1, round(self.share * n_counted)))


@dataclass(frozen=True, slots=True)
class Recalled:
    """By ranking: the mean over heads, by step, of the ``mass`` and of the ``reads`` that would have been
    there; NaN in steps in which no page counts, or nothing of one was read."""

    mass: Mapping[str, Numbers]  # [step]
    reads: Mapping[str, Numbers]

    def mean(
        self, name: str, which: str = "mass", first: int = 0, stop: int | None = None
    ) -> float:
        """Return the mean over those of steps ``[first, stop)`` that count; NaN where none does."""
        return mean_there(getattr(self, which)[name][first:stop])

    def by_decile(self, name: str, which: str = "mass", n: int = 10) -> Numbers:
        """Return the means over ``n`` equal parts of the steps; NaN where none counts."""
        found: Numbers = getattr(self, which)[name]
        parts = [p[~np.isnan(p)] for p in np.array_split(found, n)]
        return np.array([p.mean() if len(p) else np.nan for p in parts])


def mean_there(values: Numbers) -> float:
    """Return the mean of what is not NaN; NaN where all is."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")


def recall(
    trace: PageTrace,
    budget: PageBudget | None = None,
    names: Sequence[str] = tuple(RANKINGS),
    beside: Mapping[str, PageRanking] | None = None,
) -> Recalled:
    """Play a trace past rankings; those of ``beside`` are new ones, of your own. Raises InvalidArgument."""
    budget = budget or PageBudget()
    rankings = {name: ranking(name, len(trace.header.heads), trace.n_pages) for name in names}
    rankings |= beside or {}
    mass: dict[str, list[float]] = {name: [] for name in rankings}
    reads: dict[str, list[float]] = {name: [] for name in rankings}
    for step in trace.each():
        for name, each in rankings.items():
            each.foresee(step[0])
            there = resident(each.scores(), step[0].shape[1], budget)
            found = _recalled(there, step, budget)
            mass[name].append(found[0])
            reads[name].append(found[1])
            each.see(*step)
    return Recalled(
        {name: np.array(found) for name, found in mass.items()},
        {name: np.array(found) for name, found in reads.items()},
    )


def ranking(name: str, n_heads: int, n_pages: int) -> PageRanking:
    """Return a ranking by name. Raises InvalidArgument."""
    if name not in RANKINGS:
        near = nearest(name, list(RANKINGS), 1)
        hint = f"did you mean {near[0]}?" if near else f"some of {', '.join(RANKINGS)}"
        raise InvalidArgument("ranking", f"there is no {name!r}", hint)
    return RANKINGS[name](n_heads, n_pages)


def resident(
    scores: Numbers, n_pages: int, budget: PageBudget, counts: Numbers | None = None
) -> Bools:
    """Return [head, page] which of ``n_pages`` are there: those apart, and the best of the others by
    ``scores`` [head, >= page], of equal ones the newer: as many as the budget has, or ``counts`` [head]."""
    there = np.ones((len(scores), n_pages), bool)
    first, last = budget.between(n_pages)
    if first == last:
        return there
    order = np.argsort(-scores[:, first:last][:, ::-1], axis=1, kind="stable")  # newest of equals
    n = budget.pages(last - first) if counts is None else counts[:, None]
    best = np.broadcast_to(np.arange(last - first) < n, order.shape)
    np.put_along_axis(there, last - 1 - order, best, axis=1)
    return there


def _recalled(
    there: Bools, step: tuple[PageMass, Bools], budget: PageBudget
) -> tuple[float, float]:
    """Return the mean shares of mass and of reads that were there, of pages that count."""
    first, last = budget.between(there.shape[1])
    inside = there[:, first:last]
    return tuple(  # type: ignore[return-value]
        _share(values[:, first:last].astype(np.float64), inside) for values in step
    )


def _share(values: Numbers, there: Bools) -> float:
    total = values.sum(1)
    some = total > 0
    return float(((values * there).sum(1)[some] / total[some]).mean()) if some.any() else np.nan


def inflection(values: Numbers) -> tuple[int, float]:
    """Return where two straight lines fit ``values`` [step] best, and how much the slope changes there.

    The break is the first step of the second line; NaN are left out. Raises InvalidArgument for less than
    six numbers.
    """
    at = np.flatnonzero(~np.isnan(values))
    if len(at) < 6:
        raise InvalidArgument(
            "values",
            f"{len(at)} numbers are too few for two lines",
            "record more steps: at least six must count",
        )
    x, y = at.astype(np.float64), values[at]
    best, found = np.inf, (0, 0.0)
    for cut in range(3, len(x) - 2):
        (left, err_left), (right, err_right) = _line(x[:cut], y[:cut]), _line(x[cut:], y[cut:])
        if err_left + err_right < best - 1e-15:
            best, found = err_left + err_right, (int(at[cut]), right - left)
    return found


def _line(x: Numbers, y: Numbers) -> tuple[float, float]:
    """Return the slope of the best line, and the squares that it leaves."""
    x, y = x - x.mean(), y - y.mean()
    slope = float((x * y).sum() / (x * x).sum())
    return slope, float(((y - slope * x) ** 2).sum())

"""Whether drifts have changed: the last few of them are counted against those before. No torch.

::

    before: n of them, sorted   q is the r-th smallest        last k: x of them are above q
    of all n + k, the x + n - r largest have x of the last k or more among them

which is as likely as drawing these, whatever drifts are distributed like (hypergeometric). It is
asked of several k, since nobody knows when a change began, and at several levels: a change may show
in the largest drifts only, or in the usual ones while the largest stay what they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray

AIM = 0.01  # part of the answers that misses the bound, aimed at
LEAST = 19  # audits that make a bound: the largest of so many is passed by one answer in twenty
RECENT = (3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)  # audits that are held against those before
LEVELS = np.array([[0.5, 0.75, 0.9]])  # of those before: what is usual
LOW = np.array([[0.1, 0.25, 0.5]])
CHANCE = 1e-4  # of counts above a level, each time; 1 alarm for nothing in 3,500 audits in all
BESIDE = 1e-3  # of counts below one, where the bound was passed twice besides
FLOOR = 1e-6  # nats; below that all is rounding
ROUNDING = 1e-3  # part by which a drift may pass a bound: sums in another order


def passes(drift: float, bound: float) -> bool:
    """Tell whether a drift is over a bound, by more than rounding."""
    return drift > max(bound * (1 + ROUNDING), FLOOR)


def bound_rank(n: int, aim: float) -> int:
    """Return which of ``n`` drifts is the bound of the next."""
    return min(n, ceil((n + 1) * (1 - aim)))


def broken(drifts: Sequence[float]) -> bool:
    """Tell whether the last drifts pass the bound of those before them more often than chance has it;
    or twice, and are others besides: many fall below the usual ones."""
    recent = _recent(drifts)
    return recent is not None and _broken(recent)


def worse(drifts: Sequence[float]) -> bool:
    """Tell whether the last drifts are larger than those before them, also where none of them passes
    the bound."""
    recent = _recent(drifts)
    return recent is not None and _worse(recent)


def changed(drifts: Sequence[float]) -> tuple[bool, bool]:
    """Return whether they are `broken`, and whether they are that or `worse`: both are of the same counts."""
    recent = _recent(drifts)
    if recent is None:
        return False, False
    breach = _broken(recent)
    return breach, breach or _worse(recent)


def _broken(recent: _Recent) -> bool:
    bound, _, low = recent.levels
    missed = recent.above(bound.ranks)
    twice = missed[:, 0] > 1
    return bool(
        (missed >= bound.enough).any()
        or (twice.any() and (recent.below(low.ranks) >= low.enough)[twice].any())
    )


def _worse(recent: _Recent) -> bool:
    usual = recent.levels[1]
    return bool((recent.above(usual.ranks) >= usual.enough).any())


@lru_cache(maxsize=1 << 16)
def chance(n: int, k: int, x: int, drawn: int) -> float:
    """Return how likely it is that of ``drawn`` out of ``n`` and ``k``, ``x`` or more are of the k."""
    ways = sum(comb(k, i) * comb(n, drawn - i) for i in range(x, min(k, drawn) + 1))
    return ways / comb(n + k, drawn)


@dataclass(frozen=True, slots=True)
class _Levels:
    """For each k which of the drifts before are levels, and how many of the last k beyond one are hardly ever."""

    ranks: NDArray[np.int64]  # [k, level]
    enough: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Recent:
    """For each k (a row) and each of the last drifts: how many of those before the last k are
    smaller, ``known``, or no larger, ``up_to``. What is not of the last k has -1 there."""

    levels: tuple[_Levels, _Levels, _Levels]  # the bound, what is usual, what is low
    known: NDArray[np.int64]  # [k, drift]
    up_to: NDArray[np.int64]

    def above(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of the last k are above the drift of each rank [k, level] before them."""
        found: NDArray[np.int64] = (self.known[:, None, :] >= ranks[:, :, None]).sum(2)
        return found

    def below(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many are below."""
        mine = self.up_to[:, None, :] >= 0
        found: NDArray[np.int64] = (mine & (self.up_to[:, None, :] < ranks[:, :, None])).sum(2)
        return found


def _recent(drifts: Sequence[float]) -> _Recent | None:
    """Count each of the last drifts among those before; None where there are too few."""
    found = np.maximum(np.array(drifts, float), FLOOR)
    if (cuts := _cuts(len(found))) is None:
        return None
    levels, mine, before = cuts
    m = mine.shape[1]
    first, last = np.sort(found[:-m]), found[-m:]
    smaller = np.searchsorted(first, last / (1 + ROUNDING), side="left")
    no_larger = np.searchsorted(first, last * (1 + ROUNDING), side="right")
    among = before @ (last[:, None] < last[None, :] / (1 + ROUNDING))
    beside = before @ (last[:, None] <= last[None, :] * (1 + ROUNDING))
    known, up_to = (np.where(mine, x, -1) for x in (smaller + among, no_larger + beside))
    return _Recent(levels, known, up_to)


@lru_cache(maxsize=1 << 10)
def _cuts(
    size: int,
) -> tuple[tuple[_Levels, _Levels, _Levels], NDArray[np.bool_], NDArray[np.int64]] | None:
    """Return the levels of ``size`` drifts for each k, and which of the last ones (of the largest k) are of
    the last k or are before them."""
    ks = np.array([k for k in RECENT if size - k >= LEAST], int)
    if not len(ks):
        return None
    m, n = int(ks[-1]), (size - ks)[:, None]
    at = m - ks  # of the last m, those in front of the last k are before, too
    bound = np.array([[bound_rank(int(x), AIM)] for x in size - ks])
    usual, low = np.ceil(n * LEVELS).astype(int), np.maximum(1, (n * LOW).astype(int))
    levels = (
        _Levels(bound, _enough(n, ks[:, None], n - bound, CHANCE)),
        _Levels(usual, _enough(n, ks[:, None], n - usual, CHANCE)),
        _Levels(low, _enough(n, ks[:, None], low - 1, BESIDE)),
    )
    mine = np.arange(m)[None, :] >= at[:, None]
    before = np.tri(m + 1, m, -1, dtype=int)[at]  # [k, drift] 1 for those
    return levels, mine, before


@np.vectorize
def _enough(n: int, k: int, others: int, least: float) -> int:
    """Return how many of the last ``k`` are hardly ever beyond a level that ``others`` of the ``n`` before are
    beyond; one more than there are where no number is."""

    def unlikely(x: int) -> bool:
        return x * n > k * (others + 1) and chance(n, k, x, x + others) <= least

    return bisect_left(range(k + 1), True, key=unlikely)

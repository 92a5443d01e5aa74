"""Bootstrap intervals: whole cases (or streams) are drawn, since their questions are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
LEVEL = 0.95
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its interval (`LEVEL`)."""

    value: float
    low: float
    high: float

    def to_list(self) -> list[float]:
        """Return [value, low, high], rounded to six digits."""
        return [float(f"{x:.6g}") for x in (self.value, self.low, self.high)]

    def has(self, x: float) -> bool:
        """Whether ``x`` lies within the bounds."""
        return self.low <= x <= self.high


def mean(cases: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Return the mean over all values; ``cases`` holds the values of each case."""
    sums, sizes = _sums(cases)
    return interval(float(sums.sum() / sizes.sum()), drawn_means(cases, seed))


def ratio(
    found: Sequence[Sequence[float]], full: Sequence[Sequence[float]], seed: int = 0
) -> Interval:
    """Return the mean of ``found`` over that of ``full``, of the same cases drawn together."""
    above, below, drawn = _paired(found, full, seed)
    return interval(
        float(_over(above.sum(), below.sum())), _over(above[drawn].sum(1), below[drawn].sum(1))
    )


def difference(
    found: Sequence[Sequence[float]], other: Sequence[Sequence[float]], seed: int = 0
) -> Interval:
    """Return the mean of ``found`` less that of ``other``, of the same cases drawn together."""
    a, b, drawn = _paired(found, other, seed)
    n = _sums(found)[1]
    gap = a - b
    return interval(float(gap.sum() / n.sum()), gap[drawn].sum(1) / n[drawn].sum(1))


def drawn_means(cases: Sequence[Sequence[float]], seed: int = 0) -> NDArray[np.float64]:
    """Return the means of cases that are drawn anew, [draw]: of one seed the same cases for all."""
    sums, sizes = _sums(cases)
    drawn = _draws(len(cases), seed)
    return np.asarray(sums[drawn].sum(1) / sizes[drawn].sum(1))


def slope(streams: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> Interval:
    """Return the least-squares slope of (x, y) over all streams, drawn as wholes."""
    moments = np.array([_moments(stream) for stream in streams])
    drawn = _draws(len(streams), seed)
    return interval(float(_slope(moments.sum(0))), _slope(moments[drawn].sum(1)))


def quantile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), q))


def _sums(cases: Sequence[Sequence[float]]) -> tuple[_Floats, _Floats]:
    return np.array([float(sum(c)) for c in cases]), np.array([float(len(c)) for c in cases])


def _paired(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int
) -> tuple[_Floats, _Floats, NDArray[np.int64]]:
    if [len(c) for c in a] != [len(c) for c in b]:
        raise ValueError("the two are not of the same questions")
    return _sums(a)[0], _sums(b)[0], _draws(len(a), seed)


def _draws(n: int, seed: int) -> NDArray[np.int64]:
    """Return indices of cases [draw, case]."""
    return np.random.default_rng(seed).integers(0, n, (DRAWS, n))


def interval(value: float, drawn: _Floats) -> Interval:
    """Return an estimate with the bounds of what was ``drawn``, [draw]."""
    tail = (1 - LEVEL) / 2
    finite = drawn[np.isfinite(drawn)]
    if finite.size == 0:
        return Interval(value, value, value)
    low, high = np.quantile(finite, (tail, 1 - tail))
    return Interval(value, float(low), float(high))


def _over(above: _Floats, below: _Floats) -> _Floats:
    """Divide; nothing right in both is no loss."""
    safe = np.where(below == 0, 1.0, below)
    return np.where(below == 0, np.where(above == 0, 1.0, np.inf), above / safe)


def _moments(stream: Sequence[tuple[float, float]]) -> _Floats:
    x, y = np.array(stream, dtype=np.float64).T
    return np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])


def _slope(moments: _Floats) -> _Floats:
    n, x, y, xx, xy = np.moveaxis(moments, -1, 0)
    below = n * xx - x * x
    return np.asarray((n * xy - x * y) / np.where(below == 0, np.nan, below))

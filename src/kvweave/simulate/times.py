"""Random times and popularities: exponential, heavy-tailed, bursty, Zipf.

All times are drawn with the mean that was asked for, so that a heavy tail changes their shape and not
the load.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from math import log
from random import Random
from typing import Literal, get_args

Shaped = Literal["exponential", "lognormal", "pareto"]
SHAPES: tuple[str, ...] = get_args(Shaped)
SIGMA = 1.5  # of the logarithm: the median is a third of the mean
ALPHA = 1.5  # of Pareto times: think times in SURGE (Barford, Crovella, SIGMETRICS'98)


def draw_time(rng: Random, mean: float, shape: Shaped = "exponential") -> float:
    """Return a random time of this mean, in its unit."""
    if shape == "lognormal":
        return rng.lognormvariate(log(mean) - SIGMA**2 / 2, SIGMA)
    if shape == "pareto":
        return mean * (ALPHA - 1) / ALPHA * rng.paretovariate(ALPHA)
    return rng.expovariate(1 / mean)


def draw_gap(rng: Random, mean: float, cv: float) -> float:
    """Return a gap between arrivals: gamma, with ``cv`` = deviation / mean.

    1 is a Poisson process. Over 1 arrivals come in bursts, as BurstGPT models what it measured (arXiv
    2401.17644).
    """
    return rng.gammavariate(1 / cv**2, mean * cv**2)


class Zipf:
    """Ranks 0 to n - 1, rank r with weight (r + 1) ** -s."""

    def __init__(self, n: int, s: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -s for rank in range(n)))

    def draw(self, rng: Random) -> int:
        """Return a rank."""
        return min(bisect(self._sums, rng.random() * self._sums[-1]), len(self._sums) - 1)

"""How sure a mean over seeds is."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

RESAMPLES = 2000


def interval(values: Sequence[float], share: float = 0.95, seed: int = 0) -> list[float]:
    """Return ``[mean, low, high]``: the percentile bootstrap of the mean.

    Efron and Tibshirani 1993, section 13.3. With one value all three are it.
    """
    rng, n = Random(seed), len(values)
    if n == 1:
        return [float(values[0])] * 3
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(RESAMPLES))
    tail = (1 - share) / 2
    low, high = (means[round(at * (RESAMPLES - 1))] for at in (tail, 1 - tail))
    return [sum(values) / n, low, high]

"""How unequally attention is spread over pages (KU1): the share of the top fifth, and Gini's index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.probe.trace import PageMass

TOP = 0.2


def top_share(values: PageMass, top: float = TOP) -> NDArray[np.float64]:
    """Return the share [...] that the ``top`` part of pages holds of ``values`` [..., page], at least one
    page; NaN where all is 0."""
    n = max(1, round(top * values.shape[-1]))
    best = -np.sort(-values.astype(np.float64), axis=-1)
    total = best.sum(-1)
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = best[..., :n].sum(-1) / total
    return found


def gini(values: PageMass) -> NDArray[np.float64]:
    """Return Gini's index [...] of ``values`` [..., page]: 0 where all are equal, (n - 1) / n where one page
    has all; NaN where all is 0."""
    ordered = np.sort(values.astype(np.float64), axis=-1)
    n = values.shape[-1]
    weights = 2 * np.arange(1, n + 1) - n - 1
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = (ordered * weights).sum(-1) / (n * ordered.sum(-1))
    return found

"""How long until a page is read again (KU1): in steps, and in other pages read meanwhile.

The stack distance of an access is how many *other* pages the same head has read in the steps
between this access and the one before it: a cache of that head with more pages than that, which lets
go of the one that was not read for longest, would have had it (Mattson et al., 1970). All pages of a
step are read at once, so those of the two steps themselves do not count. Instead of a tree for each head
the last reads of all heads are sorted in one array: the same numbers, a search instead of a walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.probe.trace import Bools, TraceSteps

DECILES = 10
Histogram = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Distances:
    """How often each distance came: [decile of decoding, distance]; ``first`` [decile] reads are of
    pages that no step had read."""

    stack: Histogram
    steps: Histogram
    first: Histogram

    def cdf(self, which: str = "stack", decile: int | None = None) -> NDArray[np.float64]:
        """Return P(distance <= i) of accesses that had one before; empty where there is none."""
        counts: Histogram = getattr(self, which)
        found = counts.sum(0) if decile is None else counts[decile]
        total = found.sum()
        return found.cumsum() / total if total else np.zeros(0)

    def median(self, which: str = "stack", decile: int | None = None) -> float:
        """Return the distance that half of the accesses do not pass; NaN where there is none."""
        return self.quantile(0.5, which, decile)

    def quantile(self, share: float, which: str = "stack", decile: int | None = None) -> float:
        """Return the distance that so many of the accesses do not pass; NaN where there is none."""
        cdf = self.cdf(which, decile)
        return float(np.searchsorted(cdf, share)) if len(cdf) else float("nan")


class ReuseDistances:
    """Histogram them over steps that come one block after the other, ``n_steps`` in all."""

    def __init__(self, n_heads: int, n_pages: int, n_steps: int) -> None:
        self._last = np.full((n_heads, n_pages), -1, np.int64)
        self._stack = np.zeros((DECILES, n_pages + 1), np.int64)
        self._steps = np.zeros((DECILES, max(n_steps, 1)), np.int64)
        self._first = np.zeros(DECILES, np.int64)
        self._n_steps = n_steps

    def add(self, some: TraceSteps) -> None:
        """Count the accesses of some steps."""
        for i in range(some.n):
            step = some.first + i
            self._step(step, some.access[..., i], step * DECILES // self._n_steps)

    def _step(self, step: int, access: Bools, decile: int) -> None:
        last = self._last[:, : access.shape[1]]
        heads, pages = np.nonzero(access & (last >= 0))
        before = last[heads, pages]
        n_heads, n_pages = last.shape
        # heads stand one behind the other in the order of their number, so one search finds all
        wide = step + 2
        order = np.sort((last + 1) + wide * np.arange(n_heads)[:, None], axis=1).ravel()
        upto = np.searchsorted(order, before + 1 + wide * heads, side="right")
        later = (heads + 1) * n_pages - upto  # pages of the head that were read after that
        self._stack[decile, : n_pages + 1] += np.bincount(later, minlength=n_pages + 1)
        waits = np.bincount(step - before, minlength=1)
        self._steps[decile, : len(waits)] += waits
        self._first[decile] += int((access & (last < 0)).sum())
        last[access] = step

    def found(self) -> Distances:
        """Return what was counted."""
        return Distances(self._stack, self._steps, self._first)

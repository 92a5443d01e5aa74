"""What would have told which pages the next step reads (KU2): rankings of pages, one idea a class.

A `PageRanking` is asked before it is shown: ``scores`` of step t know steps before t only, but for the
oracle's. Add one here and in `RANKINGS`.
"""

from __future__ import annotations

import numpy as np

from kvweave.probe.milestone import Milestone
from kvweave.probe.ranking import PageRanking, Scores
from kvweave.probe.trace import Bools, PageMass

HALF_LIFE = 16.0  # steps, of `ema`


class Newest(PageRanking):
    """The pages written last: a sliding window (StreamingLLM, arXiv 2309.17453)."""

    def scores(self) -> Scores:
        """Return the page's number."""
        return np.broadcast_to(np.arange(self.shape[1], dtype=np.float64), self.shape)


class Recent(PageRanking):
    """The pages read last: LRU."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.last = np.full(self.shape, -1.0)

    def scores(self) -> Scores:
        """Return the step of the last read."""
        return self.last

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.last[:, : access.shape[1]][access] = self.step


class Cumulative(PageRanking):
    """The pages that had most attention in all (H2O, arXiv 2306.14048)."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.total = np.zeros(self.shape)

    def scores(self) -> Scores:
        """Return the sum of mass."""
        return self.total

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.total[:, : mass.shape[1]] += mass


class Ema(PageRanking):
    """The same with a half-life: what was read long ago counts less."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.total = np.zeros(self.shape)

    def scores(self) -> Scores:
        """Return the sum of mass, as it has faded."""
        return self.total

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.total *= 0.5 ** (1 / HALF_LIFE)
        self.total[:, : mass.shape[1]] += mass


class Overdue(PageRanking):
    """Pages that are not late yet: by the time since their last read over the longest time that ever
    passed between two (LazyEviction, arXiv 2506.15969, section 4)."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.last, self.longest = np.full(self.shape, -1.0), np.zeros(self.shape)

    def scores(self) -> Scores:
        """Return minus the time in units of that; one read alone is one step's."""
        late = -(self.step - self.last) / np.maximum(self.longest, 1)
        return np.where(self.last < 0, -np.inf, late)

    def _see(self, mass: PageMass, access: Bools) -> None:
        last, longest = self.last[:, : access.shape[1]], self.longest[:, : access.shape[1]]
        again = access & (last >= 0)
        longest[again] = np.maximum(longest[again], self.step - last[again])
        last[access] = self.step


class Stability(PageRanking):
    """Pages that are read in most of the steps since they are there."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.reads, self.age = np.zeros(self.shape), np.zeros(n_pages)

    def scores(self) -> Scores:
        """Return the share of these steps."""
        share: Scores = self.reads / np.maximum(self.age, 1)
        return share

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.reads[:, : access.shape[1]] += access
        self.age[: access.shape[1]] += 1


class Chance(PageRanking):
    """Any pages: what a budget is worth without an idea."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self._rng = np.random.default_rng(0)

    def scores(self) -> Scores:
        """Return random numbers, the same in each run."""
        return self._rng.random(self.shape)


class Oracle(PageRanking):
    """What the step reads: the most that any ranking can reach."""

    def __init__(self, n_heads: int, n_pages: int) -> None:
        super().__init__(n_heads, n_pages)
        self.next = np.zeros(self.shape)

    def foresee(self, mass: PageMass) -> None:
        """Take the mass of the step to come."""
        self.next[:, : mass.shape[1]] = mass

    def scores(self) -> Scores:
        """Return it."""
        return self.next


RANKINGS: dict[str, type[PageRanking]] = {
    "newest": Newest,
    "recent": Recent,
    "cumulative": Cumulative,
    "ema": Ema,
    "recurrence": Overdue,
    "stability": Stability,
    "milestone": Milestone,
    "random": Chance,
    "oracle": Oracle,
}

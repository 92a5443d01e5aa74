"""What misses cost where most pages rest on a slower tier: a page trace played past tiers.

Each head keeps in the fast tier the pages that a ranking puts first, within its budget, and what stands
apart. What a step reads and is not there is fetched: a step waits for what its decoding does not hide. A
page that was fetched stays until the ranking lets go of it. Numbers are of this model of tiers; the trace is
real. `bench/stalls.py` plays the same `Residence` with the engine's own tiers, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.probe.predict import Oracle
from kvweave.probe.ranking import PageRanking, Scores
from kvweave.probe.recalling import PageBudget, ranking, resident
from kvweave.probe.trace import Bools, PageMass, PageTrace


@dataclass(frozen=True, slots=True)
class SlowTier:
    """Where pages rest that are not in the fast tier: ``bandwidth`` bytes a second, ``latency`` seconds
    once for all that is fetched together, and ``each`` page's own. Raises InvalidArgument."""

    name: str = "dram"
    bandwidth: float = 25e9
    latency: float = 10e-6
    each: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0 or self.each < 0:
            raise InvalidArgument(
                "tier", f"{self.name}: {self.bandwidth:g} B/s, {self.latency:g} s, {self.each:g} s"
            )

    def seconds(self, n_bytes: float, n_pages: int) -> float:
        """Return how long it takes to fetch so much."""
        if not n_pages:
            return 0.0
        return self.latency + n_pages * self.each + n_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class TierPlay:
    """What a ranking came to: ``stalls`` [step] seconds, ``fetched`` [step] bytes, ``misses`` [step] pages."""

    ranking: str
    tier: str
    stalls: NDArray[np.float64]
    fetched: NDArray[np.float64]
    misses: NDArray[np.int64]
    reads: int  # pages read in all, those that stand apart included

    @property
    def stall(self) -> float:
        """Seconds a step waits, in the mean."""
        return float(self.stalls.mean()) if len(self.stalls) else 0.0

    @property
    def miss_rate(self) -> float:
        """The part of reads that had to be fetched."""
        return float(self.misses.sum() / self.reads) if self.reads else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """``page_bytes`` [head] of a page, by layer and head as the trace has them (one number: all alike);
    ``decode`` seconds of a step, ``hidden`` the part of them in which pages can come, ``ahead`` whether pages
    that the ranking wants are brought before the step asks for them. With a ``deadline`` these are the most wanted that
    come within so many seconds, and no others. Raises InvalidArgument."""

    page_bytes: float | Sequence[float] = 16 * 2 * 128 * 2  # 16 rows of 128 in half precision
    decode: float = 0.03
    hidden: float = 0.0
    ahead: bool = False
    deadline: float | None = None
    budget: PageBudget = field(default_factory=PageBudget)

    def __post_init__(self) -> None:
        if self.deadline is not None and not (self.ahead and self.deadline > 0):
            reason = f"{self.deadline:g} s is for pages that are brought ahead, and more than 0"
            raise InvalidArgument("deadline", reason)


class Residence:
    """Which pages [head, page] are in the fast tier as a trace goes on; no clock, and nothing is moved.

    For each step: `brings`, then `misses`, then `ends`.
    """

    def __init__(
        self, n_pages: int, each: PageRanking, tier: SlowTier, setting: Setting, n_heads: int
    ) -> None:
        self.ranking, self.tier, self.how = each, tier, setting
        self.sizes = np.broadcast_to(np.asarray(setting.page_bytes, np.float64), n_heads)
        self.there = np.zeros((n_heads, n_pages), bool)

    def brings(self, n: int) -> Bools:
        """Return what is brought before a step of ``n`` pages: what the ranking wants and is not there. What it
        does not want goes."""
        there = self.there[:, :n]
        first, last = self.how.budget.between(n)
        there[:, :first] = there[:, last:] = True  # sinks, and what has just been written
        if not self.how.ahead and not isinstance(self.ranking, Oracle):
            return np.zeros_like(there)
        scores = self.ranking.scores()[:, :n]
        brought: Bools = resident(scores, n, self.how.budget) & ~there
        if self.how.deadline is not None and not isinstance(self.ranking, Oracle):
            brought &= self._in_time(brought, scores)
        self._keep(there | brought, scores)
        return brought

    def misses(self, access: Bools) -> Bools:
        """Return what a step reads and is not there."""
        found: Bools = access & ~self.there[:, : access.shape[1]]
        return found

    def ends(self, mass: PageMass, access: Bools) -> None:
        """Show the step to the ranking: what was fetched is there, and what it puts last goes."""
        self.ranking.see(mass, access)
        n = access.shape[1]
        self._keep(self.there[:, :n] | access, self.ranking.scores()[:, :n])

    def n_bytes(self, pages: Bools) -> float:
        """Return the bytes of some pages [head, page]."""
        return float((pages.sum(1) * self.sizes).sum())

    def seconds(self, pages: Bools) -> float:
        """Return how long it takes to fetch them together."""
        return self.tier.seconds(self.n_bytes(pages), int(pages.sum()))

    def _keep(self, held: Bools, scores: Scores) -> None:
        """Let go of what the ranking puts last, until the budget is kept."""
        n = held.shape[1]
        best = resident(np.where(held, scores, -np.inf), n, self.how.budget)
        self.there[:, :n] = best & held

    def _in_time(self, pages: Bools, scores: Scores) -> Bools:
        """Return those of ``pages`` that come by the deadline, the most wanted first."""
        assert self.how.deadline is not None
        heads, at = np.nonzero(pages)
        order = np.argsort(-scores[heads, at], kind="stable")
        heads, at = heads[order], at[order]
        took = self.tier.latency + np.cumsum(
            self.tier.each + self.sizes[heads] / self.tier.bandwidth
        )
        n = int(np.searchsorted(took, self.how.deadline, "right"))
        found = np.zeros_like(pages)
        found[heads[:n], at[:n]] = True
        return found


def play(
    trace: PageTrace,
    name: str,
    tier: SlowTier | None = None,
    setting: Setting | None = None,
    own: PageRanking | None = None,
) -> TierPlay:
    """Play a trace past a ranking, ``own`` where it is given, and new. Raises InvalidArgument.

    Without ``ahead`` a page comes when a step reads it, and rankings only choose which go; with it they are
    brought while the step before runs, and what that takes longer than the step is waited for.
    """
    tier, how = tier or SlowTier(), setting or Setting()
    n_heads = len(trace.header.heads)
    each = own or ranking(name, n_heads, trace.n_pages)
    fast = Residence(trace.n_pages, each, tier, how, n_heads)
    stalls, fetched, misses, reads = [], [], [], 0
    for mass, access in trace.each():
        each.foresee(mass)
        brought = fast.brings(access.shape[1])
        missing = fast.misses(access)
        stall = max(0.0, fast.seconds(missing) - how.hidden * how.decode)
        stalls.append(stall + max(0.0, fast.seconds(brought) - how.decode))
        fetched.append(fast.n_bytes(missing) + fast.n_bytes(brought))
        misses.append(int(missing.sum()))
        reads += int(access.sum())
        fast.ends(mass, access)
    return TierPlay(
        name, tier.name, np.array(stalls), np.array(fetched), np.array(misses, np.int64), reads
    )

"""What misses cost where most pages rest on slower tiers: a page trace played past them.

::

    fast tier     what a ranking puts first, within the budget, and what stands apart
      | ^         goes when the ranking lets go of it; a step that reads it fetches it, and waits
    slow tier 0   of what has gone the best by the ranking, as much as there is room for
      |           (sinks in the background; comes straight to the fast tier)
    slow tier 1   ... the last has room for all

Tiers are read side by side: a step waits for the slowest of those it asks, less what its decoding hides. Numbers are of
this model of tiers; the trace is real. `bench/stalls.py` plays the same `Residence` with the engine's own tiers, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.probe.places import POLICIES, Places
from kvweave.probe.predict import Oracle
from kvweave.probe.ranking import PageRanking, Scores
from kvweave.probe.recalling import PageBudget, ranking
from kvweave.probe.trace import Bools, PageMass, PageTrace


@dataclass(frozen=True, slots=True)
class SlowTier:
    """Where pages rest that are not in the fast tier: ``bandwidth`` bytes a second, ``latency`` seconds
    once for all that is fetched together, and ``each`` page's own. It has room for the ``share`` of a head's
    pages; the last of a stack has room for all. Raises InvalidArgument."""

    name: str = "dram"
    bandwidth: float = 25e9
    latency: float = 10e-6
    each: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0 and self.each >= 0):
            raise InvalidArgument(
                "tier",
                f"{self.name}: {self.bandwidth:g} B/s, {self.latency:g} s, {self.each:g} s",
                "give a bandwidth over 0, and latency= and each= from 0 up",
            )
        if not 0 < self.share <= 1:
            reason = f"{self.name} has room for {self.share:g} of the pages"
            raise InvalidArgument("tier", reason, "over 0, and 1 at most")

    @classmethod
    def parse(cls, text: str) -> SlowTier:
        """Return the tier that ``NAME:SHARE:BANDWIDTH:LATENCY[:EACH]`` says. Raises InvalidArgument."""
        name, *numbers = text.split(":")
        try:
            said = [float(each) for each in numbers]
        except ValueError:
            said = []
        if not name or len(said) not in (3, 4):
            hint = "NAME:SHARE:BANDWIDTH:LATENCY, as in dram:0.3:25e9:1e-5"
            raise InvalidArgument("tier", f"{text!r} does not say one", hint)
        share, bandwidth, latency, each = [*said, 0.0][:4]
        return cls(name, bandwidth, latency, each, share)

    def seconds(self, n_bytes: float, n_pages: int) -> float:
        """Return how long it takes to fetch so much."""
        if not n_pages:
            return 0.0
        return self.latency + n_pages * self.each + n_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class TierPlay:
    """What a ranking came to: ``stalls`` [step] seconds, ``fetched`` and ``sunk`` [step] bytes (sunk: from one
    slow tier to the next), ``misses`` [step] pages, and of all misses how many each tier had."""

    ranking: str
    stalls: NDArray[np.float64]
    fetched: NDArray[np.float64]
    sunk: NDArray[np.float64]
    misses: NDArray[np.int64]
    by_tier: Mapping[str, int]
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

    For each step: `brings`, then `misses`, then `ends`. Raises InvalidArgument for no slow tier.
    """

    def __init__(
        self,
        n_pages: int,
        each: PageRanking,
        tiers: SlowTier | Sequence[SlowTier],
        setting: Setting,
        n_heads: int,
        places: Places | None = None,
    ) -> None:
        self.ranking, self.how = each, setting
        self.tiers = (tiers,) if isinstance(tiers, SlowTier) else tuple(tiers)
        if len({tier.name for tier in self.tiers}) < max(1, len(self.tiers)):
            raise InvalidArgument(
                "tiers",
                "there is none, or two have one name",
                "give one or more, each with a name of its own",
            )
        self.places = places or Places(setting.budget, n_heads)
        self.sizes = np.broadcast_to(np.asarray(setting.page_bytes, np.float64), n_heads)
        self.there = np.zeros((n_heads, n_pages), bool)
        self.below = np.zeros((n_heads, n_pages), np.int8)  # the slow tier of what is not there
        self.sunk = 0.0  # bytes that went from one slow tier to the next, in all

    def brings(self, n: int) -> Bools:
        """Return what is brought before a step of ``n`` pages: what the ranking wants and is not there. What it
        does not want goes."""
        there = self.there[:, :n]
        first, last = self.how.budget.between(n)
        there[:, :first] = there[:, last:] = True  # sinks, and what has just been written
        if not self.how.ahead and not isinstance(self.ranking, Oracle):
            return np.zeros_like(there)
        scores = self.ranking.scores()[:, :n]
        brought: Bools = self.places.holds(scores, n) & ~there
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
        self.places.see(access)
        n = access.shape[1]
        self._keep(self.there[:, :n] | access, self.ranking.scores()[:, :n])

    def n_bytes(self, pages: Bools) -> float:
        """Return the bytes of some pages [head, page] on slow tiers."""
        return float((pages.sum(1) * self.sizes).sum()) * self.places.moved

    def counts(self, pages: Bools) -> list[int]:
        """Return how many of some pages each slow tier has."""
        below = self.below[:, : pages.shape[1]][pages]
        return [int((below == i).sum()) for i in range(len(self.tiers))]

    def seconds(self, pages: Bools) -> float:
        """Return how long it takes to fetch them together, from each tier what rests there."""
        below, took = self.below[:, : pages.shape[1]], 0.0
        for i, tier in enumerate(self.tiers):
            own = pages & (below == i)
            took = max(took, tier.seconds(self.n_bytes(own), int(own.sum())))
        return took

    def _keep(self, held: Bools, scores: Scores) -> None:
        """Let go of what the ranking puts last, until the budget is kept."""
        n = held.shape[1]
        there = self.there[:, :n]
        kept = self.places.holds(np.where(held, scores, -np.inf), n) & held
        self.below[:, :n][there & ~kept] = (
            0  # till it leaves, a page is known by where it came from
        )
        there[:] = kept
        self._sink(scores, n)

    def _sink(self, scores: Scores, n: int) -> None:
        """Let what slow tiers have no room for go to the next, the last by the ranking first."""
        there, below = self.there[:, :n], self.below[:, :n]
        for i, tier in enumerate(self.tiers[:-1]):
            own = ~there & (below == i)
            over = own.sum(1) - max(1, round(tier.share * n))
            if (over <= 0).all():
                continue
            order = np.argsort(np.where(own, scores, np.inf), axis=1, kind="stable")  # last first
            going = np.zeros_like(own)
            np.put_along_axis(going, order, np.arange(n)[None] < over[:, None], axis=1)
            below[going] = i + 1
            self.sunk += self.n_bytes(going)

    def _in_time(self, pages: Bools, scores: Scores) -> Bools:
        """Return those of ``pages`` that come by the deadline, of each tier the most wanted first."""
        assert self.how.deadline is not None
        found = np.zeros_like(pages)
        for i, tier in enumerate(self.tiers):
            heads, at = np.nonzero(pages & (self.below[:, : pages.shape[1]] == i))
            order = np.argsort(-scores[heads, at], kind="stable")
            heads, at = heads[order], at[order]
            one = tier.each + self.sizes[heads] * self.places.moved / tier.bandwidth
            n = int(np.searchsorted(tier.latency + np.cumsum(one), self.how.deadline, "right"))
            found[heads[:n], at[:n]] = True
        return found


def play(
    trace: PageTrace,
    name: str,
    tiers: SlowTier | Sequence[SlowTier] | None = None,
    setting: Setting | None = None,
    own: PageRanking | None = None,
) -> TierPlay:
    """Play a trace past a ranking or one of `POLICIES`, ``own`` where it is given, and new. Raises InvalidArgument.

    Without ``ahead`` a page comes when a step reads it, and rankings only choose which go; with it they are
    brought while the step before runs, and what that takes longer than the step is waited for.
    """
    how, n_heads = setting or Setting(), len(trace.header.heads)
    policy = POLICIES.get(name, Places)
    each = own or ranking(policy.ranking or name, n_heads, trace.n_pages)
    places = policy(how.budget, n_heads)
    fast = Residence(trace.n_pages, each, tiers or SlowTier(), how, n_heads, places)
    rows: list[tuple[float, float, float, list[int]]] = []
    reads = 0
    for mass, access in trace.each():
        each.foresee(mass)
        sunk, brought = fast.sunk, fast.brings(access.shape[1])
        missing = fast.misses(access)
        stall = max(0.0, fast.seconds(missing) - how.hidden * how.decode)
        stall += max(0.0, fast.seconds(brought) - how.decode)
        fetched, counts = fast.n_bytes(missing) + fast.n_bytes(brought), fast.counts(missing)
        reads += int(access.sum())
        fast.ends(mass, access)
        rows.append((stall, fetched, fast.sunk - sunk, counts))
    stalls, moved, gone = (np.array([row[i] for row in rows], np.float64) for i in range(3))
    by_tier = np.array([row[3] for row in rows], np.int64).reshape(-1, len(fast.tiers))
    names = [tier.name for tier in fast.tiers]
    totals = dict(zip(names, by_tier.sum(0).tolist(), strict=True))
    return TierPlay(name, stalls, moved, gone, by_tier.sum(1), totals, reads)

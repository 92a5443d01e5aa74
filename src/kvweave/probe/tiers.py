"""What misses cost where most pages rest on a slower tier: a page trace played past tiers.

Each head keeps in the fast tier the pages that a ranking puts first, within its budget, and what stands
apart. What a step reads and is not there is fetched: a step waits for what its decoding does not hide. A
page that was fetched stays until the ranking lets go of it. Numbers are of this model of tiers; the trace is
real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.probe.predict import Oracle
from kvweave.probe.ranking import PageRanking
from kvweave.probe.recalling import PageBudget, ranking, resident
from kvweave.probe.trace import PageTrace


@dataclass(frozen=True, slots=True)
class SlowTier:
    """Where pages rest that are not in the fast tier: ``bandwidth`` bytes a second and ``latency`` seconds
    once for all that a step fetches. Raises InvalidArgument."""

    name: str = "dram"
    bandwidth: float = 25e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise InvalidArgument(
                "tier", f"{self.name}: {self.bandwidth:g} B/s, {self.latency:g} s"
            )

    def seconds(self, n_bytes: float) -> float:
        """Return how long it takes to fetch so much."""
        return self.latency + n_bytes / self.bandwidth if n_bytes else 0.0


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
    that the ranking wants are brought before the step asks for them."""

    page_bytes: float | Sequence[float] = 16 * 2 * 128 * 2  # 16 rows of 128 in half precision
    decode: float = 0.03
    hidden: float = 0.0
    ahead: bool = False
    budget: PageBudget = field(default_factory=PageBudget)


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
    sizes = np.broadcast_to(np.asarray(how.page_bytes, np.float64), n_heads)
    each = own or ranking(name, n_heads, trace.n_pages)
    there = np.zeros((n_heads, trace.n_pages), bool)
    stalls, fetched, misses, reads = [], [], [], 0
    for mass, access in trace.each():
        n = access.shape[1]
        first, last = how.budget.between(n)
        there[:, :first] = there[:, last:n] = True  # sinks, and what has just been written
        moved = 0.0
        each.foresee(mass)
        if how.ahead or isinstance(each, Oracle):
            wanted = resident(each.scores(), n, how.budget)
            moved = float(((wanted & ~there[:, :n]).sum(1) * sizes).sum())
            there[:, :n] = wanted
        missing = access & ~there[:, :n]
        late = float((missing.sum(1) * sizes).sum())
        reads += int(access.sum())
        stall = max(0.0, tier.seconds(late) - how.hidden * how.decode)
        stall += max(0.0, tier.seconds(moved) - how.decode)
        stalls.append(stall)
        fetched.append(late + moved)
        misses.append(int(missing.sum()))
        each.see(mass, access)
        # what was fetched is there; what the ranking puts last goes, until the budget is kept
        held = there[:, :n] | access
        scores = np.where(held, each.scores()[:, :n], -np.inf)
        there[:, :n] = resident(scores, n, how.budget) & held
    return TierPlay(
        name, tier.name, np.array(stalls), np.array(fetched), np.array(misses, np.int64), reads
    )

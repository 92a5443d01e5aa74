"""Policies of the page-tier simulator that do more than rank: who has how much of the fast tier, and in how many bits.

A `Places` says which pages a head may have there. The policies of papers are told by the parts that a trace of
pages can show: what their forms of fewer bits cost an answer is not in it (`bench/policies_tokens.py` asks that).
Add one here and in `POLICIES`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvweave.probe.ranking import Scores
from kvweave.probe.recalling import PageBudget, resident
from kvweave.probe.trace import Bools


class Places:
    """Each head has the same number of pages, those that the ranking puts first, as they are."""

    ranking: ClassVar[str] = ""
    moved: ClassVar[float] = 1.0  # bytes of a page on slower tiers, as a share of one as it is

    def __init__(self, budget: PageBudget, n_heads: int) -> None:
        self.budget, self.n_heads = budget, n_heads

    def holds(self, scores: Scores, n: int) -> Bools:
        """Return [head, page] which of ``n`` pages may be in the fast tier; -inf are not wanted."""
        return resident(scores, n, self.budget)

    def see(self, access: Bools) -> None:
        """Take what a step read [head, page]."""


class ByAge(Places):
    """TTKV (arXiv 2604.19769): the newest pages as they are, older ones below in 8 bits of 16."""

    ranking = "newest"
    moved = 0.5


class ByHead(Places):
    """FlexiCache (arXiv 2511.00868): of heads that read what they have just read fewer pages stay.

    The half whose reads are most alike from step to step, so far, has a third as many as the other, all together
    what they would have alike. The paper's unstable heads keep all of their pages, and it ranks anew
    now and then; here each step does, by attention with a half-life.
    """

    ranking = "ema"
    TIMES: ClassVar[float] = 3.0

    def __init__(self, budget: PageBudget, n_heads: int) -> None:
        super().__init__(budget, n_heads)
        self._last: Bools | None = None
        self._alike, self._steps = np.zeros(n_heads), 0

    def holds(self, scores: Scores, n: int) -> Bools:
        """Return the pages that stay; all heads alike before two steps were seen."""
        if not self._steps or self.n_heads < 2:
            return super().holds(scores, n)
        first, last = self.budget.between(n)
        half = self.n_heads // 2
        total, others = self.budget.share * self.n_heads, self.n_heads - half
        more = min(1.0, total * self.TIMES / (half + self.TIMES * others))
        shares = np.full(self.n_heads, more)
        shares[np.argsort(-self._alike, kind="stable")[:half]] = (total - more * others) / half
        counts = np.maximum(1, np.rint(shares * (last - first)))
        return resident(scores, n, self.budget, counts)

    def see(self, access: Bools) -> None:
        """Count how alike the step's reads are to those of the one before."""
        if self._last is not None:
            before = np.zeros_like(access)
            before[:, : self._last.shape[1]] = self._last
            either = (before | access).sum(1)
            self._alike += np.where(either > 0, (before & access).sum(1) / np.maximum(either, 1), 1)
            self._steps += 1
        self._last = access


class ByBits(Places):
    """DiffKV (arXiv 2412.03131): pages of much attention in 8 bits of keys and 4 of values, others in 4 and 2.

    Half of a budget's bytes for either, so that it holds four times as many pages as in 16 bits. The paper
    drops what is left; here it rests below, in 4 and 2 bits.
    """

    ranking = "cumulative"
    moved = 3 / 16

    def holds(self, scores: Scores, n: int) -> Bools:
        """Return the pages that stay in either form."""
        first, last = self.budget.between(n)
        bytes_of = self.budget.pages(last - first) if last > first else 0
        wanted = bytes_of / 2 / (6 / 16) + bytes_of / 2 / (3 / 16)
        return resident(scores, n, self.budget, np.full(self.n_heads, max(1, round(wanted))))


POLICIES: dict[str, type[Places]] = {"ttkv": ByAge, "flexicache": ByHead, "diffkv": ByBits}

"""Which pages go (KU5): classes of pages, one idea a function.

A class says of each head in which order its pages go, and nothing of how many: that is the same for
all classes, in each group of heads whose rows are equal, so that all free the same bytes::

    milestone, other, early, late, random    the same pages in every head
    high, low, scattered                     each head's own; scattered: at random
    stable, unstable                         at random, twice as many in half the heads of a group

`other` and `random` are what `milestone`, `early` and `late` are compared with; `scattered` is for the
rest. Add one here and in `CLASSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.probe.heads import stability
from kvweave.probe.recalling import PageBudget
from kvweave.probe.trace import Numbers, PageTrace, joined
from kvweave.run.base import NO_SLOTS, Ints

Orders = Sequence[Ints]  # [head] of pages, the first to go first; of a head without any none goes
APART = PageBudget()  # pages that stay: the sink and the newest


@dataclass(frozen=True)
class EvictionCase:
    """What is known when pages go: ``trace`` up to step ``until``, and the ``pages`` that may go."""

    trace: PageTrace
    until: int
    pages: Ints  # increasing
    groups: Sequence[Ints]  # of heads, all rows of a group of one size
    seed: int = 0

    @property
    def n_heads(self) -> int:
        """Heads of the trace."""
        return len(self.trace.header.heads)

    @cached_property
    def scores(self) -> Numbers:
        """[head, page that may go]: attention a step, the mean over the steps so far in which the page
        was not among the newest."""
        total = np.zeros((self.n_heads, int(self.pages[-1]) + 1))
        age = np.zeros(total.shape[1])
        for step, (mass, _) in enumerate(self.trace.each()):
            if step == self.until:
                break
            old = min(APART.between(mass.shape[1])[1], len(age))
            total[:, :old] += mass[:, :old]
            age[:old] += 1
        return (total / np.maximum(age, 1))[:, self.pages]

    @cached_property
    def steadiness(self) -> Numbers:
        """[head]: `stability` so far."""
        blocks = [some for some in self.trace if some.first < self.until]
        return stability(joined(blocks, self.n_heads, self.trace.n_pages), 0, self.until)

    @cached_property
    def marked(self) -> Ints:
        """The pages with a milestone so far. Raises InvalidArgument where none is known."""
        marks = self.trace.notes.get("milestones")
        if not isinstance(marks, list) or not all(type(step) is int for step in marks):
            hint = "record it with notes={'milestones': [steps]}"
            raise InvalidArgument("classes", "the trace names no steps as milestones", hint)
        header = self.trace.header
        found = [(header.prompt + step) // header.page for step in marks]
        marked: Ints = np.intersect1d(self.pages, np.array(found, np.int64))
        if not len(marked):
            raise InvalidArgument(
                "classes",
                "no milestone is on a page that may go",
                "name steps whose pages are neither the first nor the newest",
            )
        return marked

    def shuffled(self, pages: Ints) -> Ints:
        """Return ``pages`` in a random order, the same for a seed."""
        return np.random.default_rng(self.seed).permutation(pages)

    def everywhere(self, pages: Ints) -> Orders:
        """Return the same pages for every head."""
        return [pages] * self.n_heads

    def scattered(self) -> list[Ints]:
        """Return all pages in a random order for each head."""
        rng = np.random.default_rng(self.seed)
        return [rng.permutation(self.pages) for _ in range(self.n_heads)]

    def halves(self, values: Numbers) -> Orders:
        """Return the same for the half of each group with most of ``values`` [head], and none for the
        others; of an odd number the one in the middle is in both halves. Raises InvalidArgument where
        no group has two heads."""
        if max(map(len, self.groups)) == 1:
            raise InvalidArgument(
                "classes",
                "no two heads have rows of one size: there is no half",
                "ask for no halves",
            )
        orders = self.scattered()
        for group in self.groups:
            ranked = group[np.argsort(-values[group], kind="stable")]
            for head in ranked[-(-len(group) // 2) :]:
                orders[head] = NO_SLOTS
        return orders


def _other(case: EvictionCase) -> Orders:
    return case.everywhere(case.shuffled(np.setdiff1d(case.pages, case.marked)))


def _by_score(case: EvictionCase, sign: int) -> Orders:
    return [case.pages[np.argsort(sign * own, kind="stable")] for own in case.scores]


CLASSES: dict[str, Callable[[EvictionCase], Orders]] = {
    "milestone": lambda case: case.everywhere(case.shuffled(case.marked)),
    "other": _other,
    "early": lambda case: case.everywhere(case.pages),
    "late": lambda case: case.everywhere(case.pages[::-1]),
    "random": lambda case: case.everywhere(case.shuffled(case.pages)),
    "high": lambda case: _by_score(case, -1),
    "low": lambda case: _by_score(case, 1),
    "stable": lambda case: case.halves(case.steadiness),
    "unstable": lambda case: case.halves(-case.steadiness),
    "scattered": EvictionCase.scattered,
}


def most(orders: Orders, groups: Sequence[Ints]) -> int:
    """Return how many pages a head can go, the mean over each group of heads."""
    found = []
    for group in groups:
        there = [len(orders[head]) for head in group if len(orders[head])]
        found.append(min(there, default=0) * len(there) // len(group))
    return min(found)


def going(orders: Orders, groups: Sequence[Ints], n: int) -> list[Ints]:
    """Return the pages [head], increasing, that go when it is ``n`` a head in the mean of each group."""
    gone = [NO_SLOTS] * len(orders)
    for group in groups:
        some = [head for head in group if len(orders[head])]
        each, more = divmod(n * len(group), len(some))
        for i, head in enumerate(some):
            gone[head] = np.sort(orders[head][: each + (i < more)])
    return gone

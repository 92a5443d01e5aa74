"""Which options of `auto` suit a model, learned while there is time: an answer that is audited is woven again
in each way, and what the ways differ by adds up. No torch.

::

    audit     of each way: KL (nats) to a full prefill, and what it computed    (`Learner.saw`)
    earned    of each way: nats that it would have saved over the usual one
    again     each `EVERY` answers: the best of those that have earned it       (`Learner.recipe`)

What few answers show says nothing of questions that are seldom asked, and the usual way holds there
where most others do not (P2 and P7 of docs/fidelity.md: 1.7 nats). So a way is taken once it has
saved `EARNED` nats, and left as soon as it has lost them.

Each tenant's answers choose for that tenant, and each share has its own. What is long ago counts less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite, log, sqrt
from typing import Any

from kvweave.weave.recipes import NATS, NONE, RECIPES, USUAL, nearest

LEAST = 8  # answers, below which chance chooses
EARNED = 0.2  # nats, all answers together, that a way saves before it is taken
AHEAD, BEHIND = 1.0, -2.0  # nats: no more is held for it, or against it
EVERY = 8  # from one choice to the next
MOST = 64  # answers; what is known counts for half as many then
SELDOM = 4  # once so many are known, one audit in so many adds to them
WAYS = (NONE, *RECIPES)  # that are tried
MOST_KINDS = 64  # tenants and shares; of who has most, what is known least is forgotten first

Tried = Mapping[str, tuple[float, float]]  # way -> KL (nats), cost (of the context)


@dataclass(slots=True)
class Learned:
    """What the ways came to in ``n`` answers, one without a repair among them: sums of the square root of the
    KL, and of the cost. A KL grows with the square of what is wrong; of roots, one answer is not all
    there is of a sum, and small ones do not count as much as large ones."""

    n: int = 0
    recipe: str = USUAL
    n_asked: int = field(default=0, compare=False)  # whether to try one, since the start
    roots: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAYS, 0.0))
    costs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAYS, 0.0))
    gains: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(WAYS, 0.0)
    )  # nats, over the usual way

    def saw(self, found: Tried) -> bool:
        """Take in an answer; return whether another recipe is best now."""
        for recipe, (kl, cost) in found.items():
            self.roots[recipe] += sqrt(kl + NATS)
            self.costs[recipe] += cost
            gain = self.gains[recipe] + found[USUAL][0] - kl
            self.gains[recipe] = min(AHEAD, max(BEHIND, gain))
        self.n += 1
        was = self.recipe
        if self.gains[was] < 0:
            self.recipe = USUAL
        if self.n < LEAST or self.n % EVERY:
            return was != self.recipe
        earned = [r for r in RECIPES if r == USUAL or self.gains[r] >= EARNED]
        logs = {way: 2 * log(max(total, 1e-9) / self.n) for way, total in self.roots.items()}
        costs = {recipe: self.costs[recipe] / self.n for recipe in earned}
        self.recipe = nearest(logs, costs, self.recipe if self.recipe in earned else USUAL)
        if self.n >= MOST:
            self.n //= 2
            for sums in (self.roots, self.costs):
                sums.update({recipe: total / 2 for recipe, total in sums.items()})
        return was != self.recipe


class Learner:
    """What was learned of one model, by tenant and share."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, float], Learned] = {}

    def __len__(self) -> int:
        """Of how many tenants and shares something is known."""
        return len(self._tallies)

    def recipe(self, tenant: str, share: float) -> str | None:
        """Return the options that are best for this tenant at this share; None: the usual ones, or nobody
        knows."""
        known = self._tallies.get((tenant, round(share, 3)))
        return None if known is None or known.recipe == USUAL else known.recipe

    def knows_little(self, tenant: str, share: float) -> bool:
        """Tell whether no choice was made yet for this tenant at this share."""
        known = self._tallies.get((tenant, round(share, 3)))
        return known is None or known.n < LEAST

    def wants(self, tenant: str, share: float) -> bool:
        """Tell whether an answer is to be woven in all ways; of those of whom enough is known, now and then."""
        known = self._tallies.get((tenant, round(share, 3)))
        if known is None:
            return True
        known.n_asked += 1
        return known.n < MOST // 2 or known.n_asked % SELDOM == 0

    def saw(self, tenant: str, share: float, found: Tried) -> str | None:
        """Take in what all ways came to in an answer; return the recipe that is best, if that is another
        one now. What is no number teaches nothing."""
        if found.keys() != set(WAYS) or not all(
            isfinite(x) for each in found.values() for x in each
        ):
            return None
        at = tenant, round(share, 3)
        if at not in self._tallies:
            while len(self._tallies) >= MOST_KINDS:
                self._forget()
            self._tallies[at] = Learned()
        return self._tallies[at].recipe if self._tallies[at].saw(found) else None

    def _forget(self) -> None:
        """Forget that of which least is known, of who has most."""
        had = Counter(tenant for tenant, _ in self._tallies)
        most = [at for at in self._tallies if had[at[0]] == max(had.values())]
        del self._tallies[min(most, key=lambda at: self._tallies[at].n)]

    def report(self) -> list[dict[str, Any]]:
        """Return what is known, for a page or a file: numbers, nothing of any text."""
        return [
            {"tenant": tenant, "share": share, "n": known.n, "recipe": known.recipe,
             "roots": dict(known.roots), "costs": dict(known.costs), "gains": dict(known.gains)}
            for (tenant, share), known in sorted(self._tallies.items(), key=lambda each: each[0])
        ]  # fmt: skip

    def totals(self) -> tuple[tuple[str, str, int], ...]:
        """Return share, recipe and answers, all tenants together."""
        found: Counter[tuple[str, str]] = Counter()
        for (_, share), known in self._tallies.items():
            found[f"{share:g}", known.recipe] += known.n
        return tuple((*at, n) for at, n in sorted(found.items()))

    @classmethod
    def of(cls, told: list[Mapping[str, Any]]) -> Learner:
        """Return one of a report; what another version counted is left out. Raises ValueError, KeyError,
        TypeError, AttributeError for what is none."""
        made, mine = cls(), set(WAYS)
        for each in told[:MOST_KINDS]:
            sums = [
                {str(r): float(x) for r, x in each.get(k, {}).items()}
                for k in ("roots", "costs", "gains")
            ]
            n, recipe, share = int(each["n"]), str(each["recipe"]), float(each["share"])
            if not 0 <= n <= MOST or not all(
                map(isfinite, (share, *chain(*(known.values() for known in sums))))
            ):
                raise ValueError(f"{n} answers, {share}: no numbers that were learned")
            if all(known.keys() == mine for known in sums) and recipe in RECIPES:
                made._tallies[str(each["tenant"]), share] = Learned(n, recipe, 0, *sums)
        return made

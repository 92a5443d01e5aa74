"""Which options of `auto` suit a model: of those that nothing beats at their own cost, the nearest. No torch.

No single set is right for all models. One looks up what it says in the first rows of chunks, another
finds it wherever the question points; what was best on the models that this repository trains is up
to four times as far off as it might be on one that is left out (docs/repair.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf, log
from statistics import fmean

import numpy as np

from kvweave.weave.calibration import DRAFT, RANKED

THIRDS = 1  # of the budget, for first rows of chunks whatever a look says
ROUNDS = 2
USUAL = f"{DRAFT}@{THIRDS}@{ROUNDS}"  # what `auto` does where nobody asked
LOOKING = [f"{n}@{thirds}@{rounds}" for thirds in (0, 1, 2) for rounds in (1, 2) for n in (2, 0)]
FIRST_ROWS = ("0@3@1", "0@3@0")  # without a look: as many more as that would compute, or none more
RECIPES = (USUAL, *(r for r in LOOKING if r != USUAL), *FIRST_ROWS, *RANKED)
NEAR = 1.05  # of the least KL that anything reaches at a recipe's own cost, or it is not considered
BETTER = 0.9  # of the KL of the one that stays otherwise, at least
NONE = "none"  # not a recipe: nothing is repaired
FURTHER = 4  # times as much: as far as a cost is taken to go on in proportion
NATS = 1e-4  # below that all are alike
PASS = 0.004  # of the context: a pass of one row took as long as 18 rows more of 4,200 (19 M, CPU)

WayAt = tuple[str, float]  # a recipe at a share


def best(
    kl: Mapping[WayAt, float],
    cost: Mapping[WayAt, float],
    shares: Sequence[float],
    stays: str = USUAL,
) -> str:
    """Return the recipe of the least KL over the ``shares``, among those than which nothing is much nearer at
    their own cost: at a share some compute more than others. That which ``stays`` does unless another
    is better by more than chance would have it.

    ``kl`` (nats, the geometric mean over cases, since one case may be most of a sum) and ``cost`` (of the
    context, the mean) are of all recipes, also at other shares, between which they are reached.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for at in kl:
        curves.setdefault(at[0], []).append((cost[at], kl[at]))

    def over(at: WayAt) -> float:
        return kl[at] / min(reached(curve, cost[at]) for curve in curves.values())

    mean = {r: fmean(log(kl[r, share]) for share in shares) for r in curves}
    beaten = {r: fmean(log(over((r, share))) for share in shares) for r in curves}
    least = min(beaten.values())
    found = min((r for r in curves if beaten[r] <= least + log(NEAR)), key=mean.__getitem__)
    gain = max(beaten[stays] - least, mean[stays] - mean[found])
    return stays if gain <= -log(BETTER) else found


def nearest(logs: Mapping[str, float], costs: Mapping[str, float], stays: str = USUAL) -> str:
    """Return the recipe that comes nearest for what it computes, where all are known at one share only.

    ``logs`` are those of the mean KL of each recipe and of `NONE`, without a repair, from which the logarithm is
    taken to fall in proportion to the ``costs``: so all are compared at the cost of the one that
    ``stays``, unless another is better by more than chance would have it.
    """
    none, mine = logs[NONE], costs[stays]

    def there(recipe: str) -> float:
        return (logs[recipe] - none) * mine / max(costs[recipe], mine / FURTHER, 1e-9)

    found = min(costs, key=there)
    return found if there(found) - there(stays) < log(BETTER) else stays


def reached(points: Sequence[tuple[float, float]], cost: float) -> float:
    """Return the least KL that is reached at a cost: ``points`` are (cost, KL) of one method, between two
    of which the logarithm of the KL is taken to be straight; infinite below the first."""
    known = sorted(points)
    if cost < known[0][0]:
        return inf
    xs, ys = [p[0] for p in known], [log(max(p[1], 1e-9)) for p in known]
    return exp(float(np.interp(cost, xs, ys)))

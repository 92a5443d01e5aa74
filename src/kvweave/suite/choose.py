"""Which options of `auto` suit a model: all are tried on its text, and the best one is kept for each share.

No single set is right for all models. One looks up what it says in the first rows of chunks, another
finds it wherever the question points; what was best on the models that this repository trains is up
to four times as far off as it might be on one that is left out (docs/repair.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean

import numpy as np

from kvweave.suite.calibrate import FLOOR
from kvweave.suite.exam import Trial
from kvweave.suite.method import Method
from kvweave.weave.repair.auto import ROUNDS, THIRDS
from kvweave.weave.repair.rollout import LOOKAHEAD

USUAL = f"{LOOKAHEAD}@{THIRDS}@{ROUNDS}"  # what `auto` does where nobody asked
LOOKING = [f"{n}@{thirds}@{rounds}" for thirds in (0, 1, 2) for rounds in (1, 2) for n in (2, 0)]
RECIPES = (USUAL, *(r for r in LOOKING if r != USUAL), "0@3@1")  # the last: first rows, and no look
NEAR = 1.05  # of the least KL that anything reaches at a recipe's own cost, or it is not considered
LEAST = 8  # cases, below which chance chooses
BETTER = 0.9  # of the KL of `auto` as it is, at least, or that stays
NATS = 100 * FLOOR  # below that all are alike

_Case = tuple[str, int]
_Told = dict[_Case, tuple[float, float]]  # of each case KL and cost
_Cells = dict[tuple[str, float], _Told]  # of each recipe at each share


@dataclass(frozen=True, slots=True)
class BestRecipe:
    """The options that were best at a share. ``kl`` and ``usual_kl`` (nats, of what was chosen and of
    `auto` without options) are of cases that did not choose: each half of them tells of the other."""

    share: float
    recipe: str
    kl: float
    usual_kl: float


def methods(shares: Iterable[float]) -> list[Method]:
    """Return all options at all shares."""
    return [Method(f"auto:{r}", share, modes=("forget",)) for share in shares for r in RECIPES]


def choose(
    trials: Iterable[Trial], shares: Sequence[float], together: bool = False
) -> list[BestRecipe]:
    """Return what was best at each share, or ``together`` at all of them: a bound goes on from one share to
    the next. Raises ValueError for fewer cases than `LEAST`."""
    seen: dict[str, dict[_Case, list[Trial]]] = {}
    for t in trials:
        seen.setdefault(t.method, {}).setdefault((t.protocol, t.case), []).append(t)
    cells: _Cells = {
        (r, s): {
            case: (fmean(t.kl for t in found), fmean(t.cost for t in found))
            for case, found in seen.get(f"auto:{r} {s:.0%}", {}).items()
        }
        for r in RECIPES
        for s in shares
    }
    cases = sorted(set.intersection(*(set(each) for each in cells.values())))
    if len(cases) < LEAST:
        raise ValueError(f"{len(cases)} cases are too few to choose on; {LEAST} at least")
    made = []
    halves = (cases[::2], cases[1::2])
    for group in [list(shares)] if together else [[share] for share in shares]:
        found = _best(cells, group, cases)
        told = [
            (_best(cells, group, mine), case)
            for mine, others in (halves, halves[::-1])
            for case in others
        ]
        for share in group:
            away = fmean(cells[recipe, share][case][0] for recipe, case in told)
            usual = fmean(cells[USUAL, share][case][0] for case in cases)
            made.append(BestRecipe(share, found, away, usual))
    return made


def _best(cells: _Cells, group: Sequence[float], cases: Sequence[_Case]) -> str:
    """Return the recipe of the least KL, among those than which nothing is much nearer at their own cost: at
    a share some compute more than others. By the geometric mean: one case may be most of a sum."""
    kl = {at: exp(fmean(log(told[c][0] + NATS) for c in cases)) for at, told in cells.items()}
    cost = {at: fmean(told[c][1] for c in cases) for at, told in cells.items()}
    curves: dict[str, list[tuple[float, float]]] = {}
    for at in cells:
        curves.setdefault(at[0], []).append((cost[at], kl[at]))

    def over(at: tuple[str, float]) -> float:
        return kl[at] / min(reached(curve, cost[at]) for curve in curves.values())

    mean = {r: fmean(log(kl[r, share]) for share in group) for r in RECIPES}
    beaten = {r: fmean(log(over((r, share))) for share in group) for r in RECIPES}
    least = min(beaten.values())
    found = min((r for r in RECIPES if beaten[r] <= least + log(NEAR)), key=mean.__getitem__)
    stays = max(beaten[USUAL] - least, mean[USUAL] - mean[found]) <= -log(BETTER)
    return USUAL if stays else found


def reached(points: Sequence[tuple[float, float]], cost: float) -> float:
    """Return the least KL that is reached at a cost: ``points`` are (cost, KL) of one method, between two
    of which the logarithm of the KL is taken to be straight; infinite below the first."""
    known = sorted(points)
    if cost < known[0][0]:
        return inf
    xs, ys = [p[0] for p in known], [log(max(p[1], 1e-9)) for p in known]
    return exp(float(np.interp(cost, xs, ys)))

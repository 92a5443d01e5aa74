"""Which options of `auto` suit a model: all are tried on its text, and the best one is kept for each share.

No single set is right for all models. One looks up what it says in the first rows of chunks, another
finds it wherever the question points; what was best on the models that this repository trains is up
to four times as far off as it might be on one that is left out (docs/repair.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean

from kvweave.suite.calibrate import FLOOR
from kvweave.suite.exam import Trial
from kvweave.suite.method import Method
from kvweave.weave.repair.auto import ROUNDS, THIRDS
from kvweave.weave.repair.rollout import LOOKAHEAD

USUAL = f"{LOOKAHEAD}@{THIRDS}@{ROUNDS}"  # what `auto` does where nobody asked
LOOKING = [f"{n}@{thirds}@{rounds}" for thirds in (0, 1, 2) for rounds in (1, 2) for n in (2, 0)]
RECIPES = (USUAL, *(r for r in LOOKING if r != USUAL), "0@3@1")  # the last: first rows, and no look
LEAST = 8  # cases, below which chance chooses
BETTER = 0.9  # of the KL of `auto` as it is, at least, or that stays
NATS = 100 * FLOOR  # below that all are alike

_Case = tuple[str, int]
_Kl = dict[str, dict[_Case, list[float]]]  # of each recipe, of each case, at each share


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
    seen: dict[str, dict[_Case, list[float]]] = {}
    for t in trials:
        seen.setdefault(t.method, {}).setdefault((t.protocol, t.case), []).append(t.kl)
    cells = {(r, s): seen.get(f"auto:{r} {s:.0%}", {}) for r in RECIPES for s in shares}
    cases = sorted(set.intersection(*(set(each) for each in cells.values())))
    if len(cases) < LEAST:
        raise ValueError(f"{len(cases)} cases are too few to choose on; {LEAST} at least")
    made = []
    for group in [list(shares)] if together else [[share] for share in shares]:
        kl = {r: {c: [fmean(cells[r, s][c]) for s in group] for c in cases} for r in RECIPES}
        halves, found = (cases[::2], cases[1::2]), _best(kl, cases)
        told = [
            (kl[_best(kl, mine)][case], kl[USUAL][case])
            for mine, others in (halves, halves[::-1])
            for case in others
        ]
        for i, share in enumerate(group):
            away, usual = fmean(a[i] for a, _ in told), fmean(b[i] for _, b in told)
            made.append(BestRecipe(share, found, away, usual))
    return made


def _best(kl: _Kl, cases: Sequence[_Case]) -> str:
    """Return the recipe of the least KL, by the geometric mean: one case may be most of a sum."""
    away = {r: fmean(log(x + NATS) for case in cases for x in kl[r][case]) for r in RECIPES}
    found = min(RECIPES, key=away.__getitem__)
    return found if away[found] < away[USUAL] + log(BETTER) else USUAL

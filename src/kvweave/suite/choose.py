"""Which options of `auto` suit a model: all are tried on its text, and the best one is kept for each share
(`kvweave.weave.recipes`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from kvweave.suite.exam import Trial
from kvweave.suite.method import Method
from kvweave.weave.recipes import NATS, RECIPES, USUAL, WayAt, best

LEAST = 8  # cases, below which chance chooses

_Case = tuple[str, int]
_Told = dict[_Case, tuple[float, float]]  # of each case KL and cost
_Cells = dict[WayAt, _Told]


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
    """A geometric mean does not see the few cases in which a way is lost, so the plain one of what is chosen
    is no more than the usual way's."""

    def plain(recipe: str) -> float:
        return sum(cells[recipe, share][case][0] for share in group for case in cases)

    sound = {r for r in RECIPES if plain(r) <= plain(USUAL)}
    mine = {at: told for at, told in cells.items() if at[0] in sound}
    kl = {at: exp(fmean(log(told[c][0] + NATS) for c in cases)) for at, told in mine.items()}
    cost = {at: fmean(told[c][1] for c in cases) for at, told in mine.items()}
    return best(kl, cost, group)

"""The questions asked of traces, as numbers: what a report prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.probe.distance import DECILES, Distances, ReuseDistances
from kvweave.probe.heads import Overlap, milestone_overlap, rank_overlap, stability
from kvweave.probe.recalling import PageBudget, Recalled, inflection, recall
from kvweave.probe.shares import gini, top_share
from kvweave.probe.trace import Numbers, PageTrace, TraceSteps

DRAWS = 500  # of a bootstrap
FEWEST = 8  # steps of a trace that says anything


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over heads and its interval of 95 %, by bootstrap over these; NaN where there is none."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return format(self, "")

    def __format__(self, sign: str) -> str:
        """With ``+`` all numbers have a sign."""
        mean, low, high = (f"{value:{sign}.2f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Findings:
    """What one trace says. ``label`` names it in figures."""

    label: str
    trace: PageTrace
    distances: Distances
    top: Estimate  # share of the top fifth of pages, by head
    gini: Estimate
    recalled: Recalled
    inflection: tuple[int, float] | None  # of `recent`: the step, and the change of the slope
    alike: Estimate  # pages read in one step and the next
    halves: tuple[
        float, float
    ]  # stability of heads in both halves: overlap of the top, rank correlation
    milestones: Overlap | None
    stability: Numbers  # [head]
    by_head: Mapping[str, Numbers]  # what `top`, `gini` and `alike` are the means of
    phases: Mapping[str, Mapping[str, float]]  # of `notes`: steps, alike, and recall by ranking

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, JSON-ready."""
        header = self.trace.header
        found: dict[str, Any] = {
            "file": self.trace.path.name,
            "label": self.label,
            "steps": self.trace.n_steps,
            "pages": self.trace.n_pages,
            "heads": len(header.heads),
            "page": header.page,
            "rule": str(header.rule),
            "complete": self.trace.complete,
            "reuse_distance_median": _number(self.distances.median()),
            "reuse_steps_median": _number(self.distances.median("steps")),
            "reuse_distance_median_by_decile": [
                _number(self.distances.median(decile=d)) for d in range(DECILES)
            ],
        }
        for name in ("top", "gini", "alike"):
            of: Estimate = getattr(self, name)
            found[name] = [_number(of.mean), _number(of.low), _number(of.high)]
        found["recall"] = {name: _number(self.recalled.mean(name)) for name in self.recalled.mass}
        found["recall_by_decile"] = {
            name: [_number(v) for v in self.recalled.by_decile(name)] for name in self.recalled.mass
        }
        found["inflection"] = self.inflection and [self.inflection[0], _number(self.inflection[1])]
        found["halves"] = [_number(v) for v in self.halves]
        found["phases"] = {
            phase: {name: _number(v) for name, v in said.items()}
            for phase, said in self.phases.items()
        }
        marked = self.milestones
        found["milestones"] = marked and {
            name: getattr(marked, name)
            for name in ("recall", "precision", "chance", "n_milestones")
        }
        return found


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)


def find(
    trace: PageTrace,
    budget: PageBudget | None = None,
    progress: Callable[[int], None] | None = None,
) -> Findings:
    """Ask a trace. Raises InvalidArgument for one of too few steps."""
    if trace.n_steps < FEWEST:
        raise InvalidArgument(
            "trace", f"{trace.path.name} has {trace.n_steps} steps", "decode more"
        )
    budget = budget or PageBudget()
    counter = ReuseDistances(len(trace.header.heads), trace.n_pages, trace.n_steps)
    total = np.zeros((len(trace.header.heads), trace.n_pages))
    age = np.zeros(trace.n_pages)
    whole, half = trace.whole(), trace.n_steps // 2
    counter.add(whole)
    for mass, _ in trace.each():
        total[:, : mass.shape[1]] += mass
        age[: mass.shape[1]] += 1
        if progress is not None:
            progress(1)
    first, last = budget.between(trace.n_pages)
    per_step = (total / np.maximum(age, 1))[:, first:last].astype(np.float32)
    stable = stability(whole)
    by_head = {"top": top_share(per_step), "gini": gini(per_step), "alike": stable}
    recalled = recall(trace, budget)
    marks = trace.notes.get("milestones")
    return Findings(
        str(trace.notes.get("label") or trace.path.stem),
        trace,
        counter.found(),
        estimate(by_head["top"]),
        estimate(by_head["gini"]),
        recalled,
        _inflection(recalled),
        estimate(stable),
        rank_overlap(stability(whole, 0, half), stability(whole, half)),
        _milestones(trace, marks),
        stable,
        by_head,
        _phases(trace, whole, recalled),
    )


def estimate(values: Numbers) -> Estimate:
    """Return the mean of ``values`` [head] with its interval; NaN are left out."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Estimate(*[float("nan")] * 3)
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))


def _inflection(recalled: Recalled) -> tuple[int, float] | None:
    try:
        return inflection(recalled.mass["recent"])
    except InvalidArgument:
        return None


def _milestones(trace: PageTrace, marks: Sequence[int] | None) -> Overlap | None:
    if not marks:
        return None
    try:
        return milestone_overlap(trace, marks)
    except InvalidArgument:
        return None


def _phases(trace: PageTrace, whole: TraceSteps, recalled: Recalled) -> dict[str, dict[str, float]]:
    found = {}
    for each in trace.notes.get("phases") or ():
        first, stop = each["first"], min(each["stop"], trace.n_steps)
        if stop - first < 2:
            continue
        found[each["name"]] = {
            "steps": float(stop - first),
            "alike": float(stability(whole, first, stop).mean()),
            **{name: recalled.mean(name, "mass", first, stop) for name in recalled.mass},
        }
    return found

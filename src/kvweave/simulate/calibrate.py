"""Costs fitted to an engine's own log, a JSON object a line for each answer.

::

    {"seconds": 0.41, "computed": 830, "attended": 2.1e6, "loaded": {"ram": 9e7, "disk": 4e6}}

``seconds`` to the first token without the queue, ``computed`` tokens (repaired and prefilled),
``attended``: over these, the tokens that stand before each, summed; ``loaded``: bytes placed, by the
tier they came from. `entry` makes such a line from an answer's plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.weave.plan import Plan

LogRow = dict[str, Any]
_Floats = NDArray[np.float64]
FEWEST = 8  # answers


@dataclass(frozen=True)
class Fit:
    """What a log says. Seconds per unit; None where the log shows no such cost."""

    n: int
    fixed: float  # seconds of any answer
    token: float  # seconds per computed token
    attended: float  # seconds per token that a computed one has before it
    byte: dict[str, float]  # seconds per byte, by tier
    error: float  # median of |predicted / measured - 1|, each answer left out of its fit's fifth

    def cost(self, cost: Cost = DEFAULT) -> Cost:
        """Return the costs with what was fitted. Raises InvalidArgument when tokens cost nothing."""
        if self.token <= 0:
            raise InvalidArgument(
                "calibrate", "tokens cost nothing in this log", "log answers of different lengths"
            )
        doubles_at = round(self.token / self.attended) if self.attended > 0 else 10**9
        return replace(cost, seconds=self.token, doubles_at=max(1, doubles_at), fixed=self.fixed)

    def tiers(self, tiers: Sequence[Tier]) -> list[Tier]:
        """Return tiers with the bandwidths that were fitted; those without keep theirs."""
        return [
            replace(tier, bandwidth=1 / self.byte[tier.name])
            if self.byte.get(tier.name, 0.0) > 0
            else tier
            for tier in tiers
        ]


def entry(plan: Plan, seconds: float) -> LogRow:
    """Return the log's line of an answer: its plan, and ``usage["ttft"]`` as seconds.

    Repaired rows are taken to lie in the middle of their part, prefilled ones at its end.
    """
    computed, attended, loaded = 0, 0.0, dict[str, int]()
    for span in plan.spans:
        first = span.position + span.n_tokens - span.n_prefilled
        computed += span.n_prefilled + span.n_repaired
        attended += span.n_prefilled * (first + span.n_prefilled / 2)
        attended += span.n_repaired * (span.position + span.n_tokens / 2)
        if span.placed and span.n_bytes:
            loaded[span.tier] = loaded.get(span.tier, 0) + span.n_bytes
    return {"seconds": seconds, "computed": computed, "attended": attended, "loaded": loaded}


def read_log(path: str | Path) -> list[LogRow]:
    """Return the lines of a log. Raises InvalidArgument, which names the line, and OSError."""
    with open(path, encoding="utf-8") as lines:
        return parse_log(lines)


def parse_log(lines: Iterable[str]) -> list[LogRow]:
    """Return the answers in lines. Raises InvalidArgument, which names the line."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            numbers = [row["seconds"], row["computed"], row["attended"], *row["loaded"].values()]
            if not all(isfinite(x) and x >= 0 for x in numbers) or row["seconds"] == 0:
                raise ValueError("a number is negative, infinite, or took no time")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            hint = "a log has seconds, computed, attended and loaded in each line"
            raise InvalidArgument("calibrate", f"line {number}: {what}", hint) from error
        rows.append(row)
    return rows


def fit(rows: Sequence[LogRow]) -> Fit:
    """Return the costs that explain a log: least squares of relative errors, none below 0.

    The error is that of a five-fold cross-validation. Raises InvalidArgument for a short log.
    """
    if len(rows) < FEWEST:
        what = f"{len(rows)} answers are too few"
        raise InvalidArgument("calibrate", what, f"log {FEWEST} at least")
    names = sorted({name for row in rows for name in row["loaded"]})
    made = [
        [1.0, row["computed"], row["attended"], *(row["loaded"].get(name, 0) for name in names)]
        for row in rows
    ]
    terms, seconds = np.array(made, float), np.array([row["seconds"] for row in rows], float)
    folds = np.arange(len(rows)) % 5
    errors = np.empty(len(rows))
    for fold in range(5):
        mine = folds == fold
        found = _solve(terms[~mine], seconds[~mine])
        errors[mine] = np.abs(terms[mine] @ found / seconds[mine] - 1)
    fixed, token, attended, *byte = (float(x) for x in _solve(terms, seconds))
    by_tier = dict(zip(names, byte, strict=True))
    return Fit(len(rows), fixed, token, attended, by_tier, float(np.median(errors)))


def _solve(terms: _Floats, seconds: _Floats) -> _Floats:
    """Return the factors, none negative: the most negative is left out until none is."""
    scaled = terms / seconds[:, None]
    size = np.abs(scaled).max(axis=0)
    used = [i for i in range(terms.shape[1]) if size[i] > 0]
    found = np.zeros(terms.shape[1])
    while used:
        part = np.linalg.lstsq(scaled[:, used] / size[used], np.ones(len(seconds)), rcond=None)[0]
        if part.min() >= 0:
            found[used] = part / size[used]
            break
        del used[int(part.argmin())]
    return found

"""Calibrate the gate from outcomes of `auto`, and measure what the calibration is worth.

Every outcome of `auto` holds the evidence of its repair and the true KL. For evidence at one share
a regression makes a score of the drift at that and every wider share; along the score, the upper
quantile of the KL in bins of like score, never decreasing, is the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ModelFingerprint
from kvweave.suite.exam import Trial
from kvweave.weave.calibration import Calibration, Curve, Evidence

Array = NDArray[np.float64]
_Item = tuple[str, int, int, str, int]  # protocol, case, item, mode, prunes
SHARES = (0.05, 0.15, 0.30)  # where a repair may begin, and where it may go on to
COVERAGE = 0.95
QUANTILE = 0.98  # of a bin: above COVERAGE, since the next context is of no protocol seen here
BINS = 16
PER_BIN = 20  # questions, where there are few: the largest of 19 is passed by one in twenty
FLOOR = 1e-6  # nats; below that all KL is alike
RIDGE = 1e-2
MARGIN = 0.3  # decades that a feature may lie outside what was seen


@dataclass(frozen=True, slots=True)
class Observation:
    """One question: the evidence and the true KL (nats) of `auto` at every share."""

    item: _Item
    evidence: dict[float, Evidence]
    kl: dict[float, float]
    right: dict[float, float]
    repaired: dict[float, float]  # part of the candidates


def gather(outcomes: Iterable[Trial], shares: Sequence[float] = SHARES) -> list[Observation]:
    """Return the questions that `auto` answered at all ``shares``."""
    found: dict[_Item, Observation] = {}
    labels = {f"auto {share:.0%}": share for share in shares}
    for o in outcomes:
        share = labels.get(o.method)
        if share is None or o.evidence is None or not o.candidates:
            continue
        item = (o.protocol, o.case, o.item, o.mode, o.prunes)
        seen = found.setdefault(item, Observation(item, {}, {}, {}, {}))
        seen.evidence[share] = Evidence(**o.evidence)
        seen.kl[share], seen.right[share] = o.kl, o.right
        seen.repaired[share] = o.repaired / o.candidates
    return [s for s in found.values() if len(s.kl) == len(shares)]


def fit(
    seen: Sequence[Observation],
    fingerprint: ModelFingerprint,
    shares: Sequence[float] = SHARES,
    bins: int | None = None,
) -> Calibration:
    """Return the calibration that ``seen`` gives, in so many ``bins`` of like score. Raises ValueError
    when there is too little."""
    bins = BINS if bins is None else bins
    if len(seen) < 10 * bins:
        raise ValueError(f"{len(seen)} questions are too few to calibrate on; {10 * bins} at least")
    curves = []
    for start in shares:
        features = np.array([s.evidence[start].features() for s in seen])
        for share in shares:
            if share >= start:
                kl = np.array([s.kl[share] for s in seen])
                curves.append(_curve((start, share), features, kl, bins))
    return Calibration(fingerprint, COVERAGE, len(seen), tuple(curves))


def bins_of(n: int) -> int:
    """Return the bins of so few questions: each has what a bound for 19 in 20 takes."""
    return max(2, min(BINS, n // PER_BIN))


def _curve(shares: tuple[float, float], features: Array, kl: Array, bins: int) -> Curve:
    x = np.hstack([features, np.ones((len(features), 1))])
    y = np.log10(kl + FLOOR)
    gram = x.T @ x + RIDGE * len(x) * np.diag([*np.ones(features.shape[1]), 0.0])
    weights = np.linalg.solve(gram, x.T @ y)
    score = x @ weights
    order = np.argsort(score, kind="stable")
    edges, bounds = [], []
    for part in np.array_split(order, bins):
        edges.append(float(score[part[-1]]))
        bounds.append(float(np.quantile(kl[part], QUANTILE, method="higher")))
    rising = np.maximum.accumulate(bounds)
    low, high = features.min(0) - MARGIN, features.max(0) + MARGIN
    found = (weights, edges, rising, low, high)
    return Curve(*shares, *(_floats(x) for x in found))


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(f"{v:.6g}") for v in values)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a bound costs and keeps on questions: ``under`` is the part whose KL is at most the
    bound given for it, ``within`` the part at most ``max_drift``, ``right`` the accuracy."""

    max_drift: float | None
    n: int
    under: float
    within: float | None
    repaired: float
    full: float  # part repaired wholly
    right: float
    share_right: float  # accuracy without a bound

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        seen: Sequence[Observation],
        max_drift: float | None,
        start: float,
    ) -> Kept:
        """Let the gate decide on every question as `auto` would."""
        chosen = [_decide(calibration, s, max_drift, start) for s in seen]
        kl = np.array([0.0 if c is None else s.kl[c] for s, c in zip(seen, chosen, strict=True)])
        bound = np.array(
            [
                0.0 if c is None else calibration.bounds(s.evidence[start])[c]
                for s, c in zip(seen, chosen, strict=True)
            ]
        )
        return cls(
            max_drift=max_drift,
            n=len(seen),
            under=float(np.mean(kl <= bound)),
            within=None if max_drift is None else float(np.mean(kl <= max_drift)),
            repaired=_mean(1.0 if c is None else s.repaired[c] for s, c in zip(seen, chosen, strict=True)),
            full=_mean(float(c is None) for c in chosen),
            right=_mean(1.0 if c is None else s.right[c] for s, c in zip(seen, chosen, strict=True)),
            share_right=_mean(s.right[start] for s in seen),
        )  # fmt: skip


def halves(
    seen: Sequence[Observation],
    fingerprint: ModelFingerprint,
    bounds: Sequence[float | None],
    bins: int | None = None,
) -> list[dict[str, object]]:
    """Calibrate on every other protocol and let the gate decide on the rest, both ways round.

    Raises ValueError when one half is too little to calibrate on.
    """
    names = sorted({s.item[0] for s in seen})
    parts = (names[::2], names[1::2])
    questions = [[s for s in seen if s.item[0] in part] for part in parts]
    fitted = [fit(half, fingerprint, bins=bins) for half in questions]  # both, before any is tested
    made: list[dict[str, object]] = []
    for calibration, rest, mine, other in zip(
        fitted, questions[::-1], parts, parts[::-1], strict=True
    ):
        for bound in bounds:
            kept = Kept.of(calibration, rest, bound, min(SHARES))
            made.append({"fit_on": mine, "tested_on": other} | asdict(kept))
    return made


def _decide(
    calibration: Calibration, seen: Observation, max_drift: float | None, start: float
) -> float | None:
    """Return the share the gate stops at; None for all rows."""
    if max_drift is None:
        return start
    bounds = calibration.bounds(seen.evidence[start])
    return next((share for share, bound in bounds.items() if bound <= max_drift), None)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0

"""Predict how far a woven context is from a full prefill, and repair more where that is too far.

::

    look          the question's rows over the unrepaired context: attention, predictions
    repair        `auto` chooses rows, and a few random ones; all are recomputed
    evidence      what that changed: predictions of the question, values of the random rows
    bound         the model's calibration turns evidence into an upper bound of the drift
    again         over ``max_drift``: the smallest share whose bound is under it, at last all rows

A calibration is measured on the protocols of the fidelity suite (`kvweave check --suite
--calibrate`), holds for one model fingerprint, and says which share of contexts like those it
was measured on stay under the bound. Without one the drift is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import CorruptChunk, InvalidArgument
from kvweave.weave.parts import Placement
from kvweave.weave.repair import Strategy
from kvweave.weave.scores import Look, Scores

FILE = "calibration.json"  # in a home or beside a checkpoint
PROBES = 2  # of the rows repaired, drawn at random: an unbiased sample of how stale the rest is


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a first repair showed.

    ``moved`` and ``moved_max`` are the mean and the largest KL (nats) over the question's rows of
    the next-token predictions after the repair to those before it; ``stale`` the relative change of
    the random rows' values, averaged over layers (0 is none); ``left`` the part of the question's
    attention that goes to rows which stay approximate (0..1); ``changed`` is ``stale`` of the rows
    the question attends to, weighted by that attention.
    """

    share: float
    moved: float
    moved_max: float
    stale: float
    left: float
    changed: float

    def features(self) -> tuple[float, ...]:
        """Return the logarithms a calibration weighs."""
        found = (self.moved, self.moved_max, self.stale, self.left, self.changed)
        return tuple(torch.tensor(found, dtype=torch.float64).add(1e-6).log10().tolist())


@dataclass(frozen=True, slots=True)
class Curve:
    """Upper bounds of the drift after repairing ``share``, by the evidence at ``start``.

    ``weights`` (one a feature, then a constant) make a score; the bound is that of the first of
    ``edges`` (increasing) not below the score, infinite beyond the last. Evidence with a feature
    outside ``low`` to ``high`` is unlike what was measured: nothing is known of it then.
    """

    start: float
    share: float
    weights: tuple[float, ...]
    edges: tuple[float, ...]
    bounds: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def bound(self, evidence: Evidence) -> float:
        """Return the upper bound (nats); infinite where nothing is known."""
        *weights, constant = self.weights
        features = evidence.features()
        within = zip(self.low, features, self.high, strict=True)
        if not all(low <= f <= high for low, f, high in within):
            return inf
        score = constant + sum(w * f for w, f in zip(weights, features, strict=True))
        for edge, bound in zip(self.edges, self.bounds, strict=True):
            if score <= edge:
                return bound
        return inf


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one model's drift looked like: ``coverage`` of the cases stayed under the bound."""

    fingerprint: ModelFingerprint
    coverage: float
    n: int  # questions it was measured on
    curves: tuple[Curve, ...]

    def starts(self) -> list[float]:
        """Return the shares a repair may begin with."""
        return sorted({c.start for c in self.curves})

    def bounds(self, evidence: Evidence) -> dict[float, float]:
        """Return share -> upper bound for the shares from ``evidence.share`` on."""
        mine = [c for c in self.curves if c.start == evidence.share]
        return {c.share: c.bound(evidence) for c in sorted(mine, key=lambda c: c.share)}

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a saved calibration. Raises CorruptChunk when it is not one."""
        try:
            found = json.loads(path.read_text())
            curves = tuple(_curve(c) for c in found.pop("curves"))
            mine = ModelFingerprint.from_dict(found.pop("fingerprint"))
            return cls(mine, float(found["coverage"]), int(found["n"]), curves)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptChunk(str(path), f"not a calibration: {error}") from error


def _curve(data: Mapping[str, object]) -> Curve:
    names = ("weights", "edges", "bounds", "low", "high")
    lists = {k: tuple(map(float, data[k])) for k in names}  # type: ignore[call-overload]
    return Curve(float(data["start"]), float(data["share"]), **lists)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was chosen: ``drift`` is the bound (None: unknown), ``complete`` says that every row
    that was not exact is recomputed, ``in_place`` that these and the question's rows are there."""

    chosen: Tensor
    drift: float | None = None
    evidence: Evidence | None = None
    complete: bool = False
    in_place: bool = False


def find(fingerprint: ModelFingerprint, paths: Sequence[Path]) -> Calibration | None:
    """Return the first calibration of this model among the files that exist."""
    for path in paths:
        if path.exists():
            found = Calibration.load(path)
            if found.fingerprint == fingerprint:
                return found
    return None


def chosen(
    file: str | None, fingerprint: ModelFingerprint, places: Sequence[Path | None]
) -> Calibration | None:
    """Return the calibration in ``file``, or the one that lies in one of ``places``.

    Raises ModelMismatch for another model's file, CorruptChunk.
    """
    if file is None:
        return find(fingerprint, [place / FILE for place in places if place is not None])
    found = Calibration.load(Path(file))
    fingerprint.require(found.fingerprint)
    return found


def check_bound(
    max_drift: float | None, calibration: Calibration | None, repair: str, share: float
) -> None:
    """Raise InvalidArgument for a bound that nothing could keep."""
    if max_drift is None:
        return
    if not max_drift >= 0:
        raise InvalidArgument("max_drift", f"{max_drift} is not a number from 0 up (nats)")
    if repair != "auto":
        raise InvalidArgument("max_drift", f"{repair!r} repairs a fixed share", 'use repair="auto"')
    if calibration is None:
        reason = "this model has no calibration, so its drift is unknown"
        raise InvalidArgument("max_drift", reason, "run: kvweave check --suite --calibrate")
    if share not in calibration.starts():
        shares = ", ".join(map(str, calibration.starts()))
        raise InvalidArgument("share", f"the model was not calibrated for {share}", f"use {shares}")


def run(
    scores: Scores,
    spans: Sequence[Placement],
    strategy: Strategy,
    share: float,
    calibration: Calibration | None,
    max_drift: float | None,
) -> Verdict:
    """Repair ``share`` of the rows of ``spans``, or as many as ``max_drift`` takes.

    Without a question nothing tells what matters: a bound then takes all rows. So does a context
    of which most is new: looking at it would compute the new rows once more, which costs more.
    """
    candidates = scores.candidates(spans)
    if scores.unready.numel() == 0 or candidates.numel() == 0:
        if max_drift is None or not spans:
            placed = [p for p in spans if p.source != "kept"]  # what was, was chosen before
            return Verdict(scores.choose(placed, strategy, share))
        return _everything(scores, spans, None)
    if candidates.numel() <= scores.unready.numel():  # a look would cost as much
        return Verdict(scores.slots(spans), 0.0, complete=True)
    before = scores.look()
    budget = round(share * candidates.numel())
    n_probes = min(PROBES, budget // 8) if budget < candidates.numel() else 0
    probes = _probes(candidates, n_probes)
    chosen = scores.choose(spans, strategy, (budget - probes.numel()) / candidates.numel())
    evidence, chosen = _measure(scores, before, candidates, (chosen, probes), share)
    bounds = {} if calibration is None else calibration.bounds(evidence)
    if max_drift is None:
        bound = bounds.get(share, inf)
        return Verdict(chosen, bound if bound < inf else None, evidence, in_place=True)
    for wider, bound in bounds.items():
        if bound <= max_drift:
            if wider > share:
                chosen = torch.unique(torch.cat([chosen, scores.choose(spans, strategy, wider)]))
                scores.repair(chosen)
            return Verdict(chosen, bound, evidence, in_place=True)
    return _everything(scores, spans, evidence)


def _everything(scores: Scores, spans: Sequence[Placement], evidence: Evidence | None) -> Verdict:
    slots = scores.slots(spans)
    scores.repair(slots)
    return Verdict(slots, 0.0, evidence, complete=True, in_place=True)


def _probes(candidates: Tensor, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(candidates.numel())
    order = torch.randperm(candidates.numel(), generator=generator)[:n]
    return candidates[order.sort().values]


def _measure(
    scores: Scores,
    before: Look,
    candidates: Tensor,
    rows: tuple[Tensor, Tensor],
    share: float,
) -> tuple[Evidence, Tensor]:
    """Recompute the chosen and the random rows; return what that showed, and all of them."""
    chosen, probes = rows
    todo = torch.unique(torch.cat([chosen, probes]))
    old = scores.placed_values(todo)
    logits = scores.repair(todo)
    after, was = logits.double().log_softmax(-1), before.logits.double().log_softmax(-1)
    kl = (after.exp() * (after - was)).sum(-1).clamp_min(0)
    changes = torch.zeros(todo.numel(), dtype=torch.float64)
    for layer, values in enumerate(scores.rows.v):
        new = values[todo.to(values.device)]
        distance = (new - old[layer]).double().norm(dim=(1, 2))
        changes += (distance / new.double().norm(dim=(1, 2)).clamp_min(1e-30)).cpu()
    changes /= len(old)
    mass = before.mass.double()
    paid = mass[todo]
    stays = mass[candidates].sum() - paid.sum()
    evidence = Evidence(
        share=share,
        moved=float(kl.mean()),
        moved_max=float(kl.max()),
        stale=float(changes[torch.isin(todo, probes)].mean()) if probes.numel() else 0.0,
        left=float(stays / mass.sum().clamp_min(1e-30)),
        changed=float((changes * paid).sum() / mass.sum().clamp_min(1e-30)),
    )
    return evidence, todo

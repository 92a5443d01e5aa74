"""What one model's drift looked like on the fidelity suite: turns evidence into a bound. No torch.

A calibration is measured on the protocols of the suite (`kvweave check --suite --calibrate`), holds
for one model fingerprint, and says which share of contexts like those it was measured on stay under
the bound. Without one the drift is unknown. It was measured on rows as they are computed, so it
says nothing of contexts whose rows, or whose chunks, went through something lossy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import inf, isnan, log10
from pathlib import Path

from kvweave.chunk.file import soon
from kvweave.chunk.guard import as_ours
from kvweave.chunk.identity import ModelFingerprint
from kvweave.chunk.rebuild import sum_of
from kvweave.errors import CorruptChunk, InvalidArgument, of_system
from kvweave.weave.learned import WRONG, parsed, write_learned

CHOICE = 3  # how the gate chooses rows: bounds of another choice are not its own
DRAFT = 2  # tokens of a reply that the gate drafts, at most
STRATEGY = f"auto:{DRAFT}:{CHOICE}"
RANKED = ("query", "boundary")  # strategies by which the gate may choose instead
FILE = "calibration.json"  # in a home or beside a checkpoint

N_FEATURES = 5  # of evidence

Recipes = tuple[tuple[float, str], ...]  # share, options of `auto`


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
        return tuple(log10(x + 1e-6) for x in found)


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
    strategy: str = STRATEGY  # whose evidence and repair it is of
    source: str = "suite"  # or text, prompts: what it was measured on
    recipes: Recipes = ()  # share -> options of `auto` that were best here

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return sum_of(asdict(self))

    def starts(self) -> list[float]:
        """Return the shares a repair may begin with."""
        return sorted({c.start for c in self.curves})

    def bounds(self, evidence: Evidence) -> dict[float, float]:
        """Return share -> upper bound for the shares from ``evidence.share`` on."""
        mine = [c for c in self.curves if c.start == evidence.share]
        return {c.share: c.bound(evidence) for c in sorted(mine, key=lambda c: c.share)}

    def recipe(self, share: float) -> str | None:
        """Return what was best at the share nearest to this one, in proportion; None: nobody asked."""
        near = (abs(log10(max(share, 1e-3) / at)) for at, _ in self.recipes)
        return min(zip(near, self.recipes, strict=True), default=(0.0, (0.0, None)))[1][1]

    def save(self, path: Path) -> None:
        """Write it as JSON: all of it, or nothing. Raises StoreError, NoSpace."""
        try:
            write_learned(path, asdict(self))
        except OSError as error:
            raise of_system(error, "write", path) from error

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a saved calibration. Raises CorruptChunk when it is not one, StoreError."""
        try:
            found = parsed(path.read_bytes())
            curves = tuple(_curve(c) for c in found.pop("curves"))
            mine = ModelFingerprint.from_dict(found.pop("fingerprint"))
            how = str(found.get("strategy", "auto")), str(found.get("source", "suite"))
            best = tuple((_share(at), options(name)) for at, name in found.get("recipes", ()))
            return cls(mine, float(found["coverage"]), int(found["n"]), curves, *how, best)
        except OSError as error:
            raise of_system(error, "read", path) from error
        except WRONG as error:
            hint = "remove it, or calibrate again"
            raise CorruptChunk(str(path), f"not a calibration: {error}", hint=hint) from error


def _curve(data: Mapping[str, object]) -> Curve:
    names = ("weights", "edges", "bounds", "low", "high")
    lists = {k: tuple(map(float, data[k])) for k in names}  # type: ignore[call-overload]
    wanted = (N_FEATURES + 1, len(lists["edges"]), len(lists["edges"]), N_FEATURES, N_FEATURES)
    if tuple(map(len, lists.values())) != wanted or any(map(isnan, chain(*lists.values()))):
        raise ValueError("a curve that is none")
    return Curve(float(data["start"]), float(data["share"]), **lists)  # type: ignore[arg-type]


def _share(at: object) -> float:
    found = float(at)  # type: ignore[arg-type]
    if not 0 < found <= 1:
        raise ValueError(f"{at!r} is no share")
    return found


def options(words: object) -> str:
    """Return what `auto` takes behind its name: tokens drafted, thirds hedged, rounds, or one of `RANKED`.
    Raises ValueError."""
    if words in RANKED:
        return str(words)
    draft, thirds, rounds = map(int, str(words).split("@"))
    if not (0 <= draft <= DRAFT and 0 <= thirds <= 3 and rounds >= (thirds < 3)):
        raise ValueError(f"{words!r} are no options of auto")
    return f"{draft}@{thirds}@{rounds}"


def calibration_of(
    fingerprint: ModelFingerprint, file: str | None, places: Sequence[Path | None]
) -> Calibration | None:
    """Return the calibration in ``file``, or the first of this model that lies in one of ``places``.

    Raises ModelMismatch for another model's file, CorruptChunk, StoreError where nobody can tell.
    """
    if file is not None:
        found = Calibration.load(Path(file))
        fingerprint.require(found.fingerprint)
        return found
    for path in [place / FILE for place in places if place is not None]:
        mine = soon(partial(_loaded, path), path)
        if mine is not None and mine.fingerprint == fingerprint:
            return mine
    return None


def _loaded(path: Path) -> Calibration | None:
    with as_ours(path):
        there = path.exists()
    return Calibration.load(path) if there else None


def fitting(known: Calibration | None, measured_as: str) -> Calibration | None:
    """Return a calibration where it bounds this strategy: of another it says nothing."""
    if known is None or known.strategy != measured_as or not known.curves:
        return None
    return known


def measured(
    known: Calibration | None, measured_as: str, share: float, learned: str | None = None
) -> tuple[Calibration | None, str | None]:
    """Return what bounds this strategy, and the options of `auto` that this model was best with: those that
    were ``learned`` where there is no calibration; None where others were asked for, or nobody measured."""
    if known is None and measured_as == STRATEGY:
        return None, learned
    if known is None or known.strategy != measured_as:
        return None, None
    return fitting(known, measured_as), known.recipe(share)


def check_nats(max_drift: float) -> None:
    """Raise InvalidArgument unless ``max_drift`` is a number from 0 up."""
    if not max_drift >= 0:
        raise InvalidArgument("max_drift", f"{max_drift} is not a number from 0 up (nats)")


def check_bound(
    max_drift: float | None, calibration: Calibration | None, repair: str, share: float
) -> None:
    """Raise InvalidArgument for a bound that nothing could keep."""
    if max_drift is None:
        return
    check_nats(max_drift)
    if repair != "auto":
        raise InvalidArgument("max_drift", f"{repair!r} repairs a fixed share", 'use repair="auto"')
    if calibration is None:
        reason = "this model has no calibration, so its drift is unknown"
        raise InvalidArgument("max_drift", reason, "run: kvweave check --suite --calibrate")
    if share not in calibration.starts():
        shares = ", ".join(map(str, calibration.starts()))
        raise InvalidArgument("share", f"the model was not calibrated for {share}", f"use {shares}")

"""What audits of answers say: a bound of the drift for each kind of reuse, and whether it is kept.

::

    answer    promised: the bound of its cell        (None: nothing is known of it yet)
    audit     its true drift -> under the promise?   coverage, bet, alarm
                             -> the cell's window     the bound of the next answers

The bound is conformal: the upper quantile of the cell's last audits, one more taken into account
than there are, so that it holds for the next answer whatever the drift is distributed like, as long
as answers are like those before. Where they change, the quantile follows the misses (adaptive
conformal inference, Gibbs and Candès 2021).

An alarm is raised where the last few audits pass the bound of those before them more often than
chance would have it: a bound that takes in each audit soon fits again, and would hide it. Also
where the usual ones are larger, whether or not they pass it (`kvweave.weave.shift`).
A bound that comes from elsewhere, a calibration, is bet against: each audit pays, misses much,
and a fortune means that more than one answer in twenty misses; from then on nothing is promised in
the cell by this calibration, whatever becomes of the alarm. With an alarm all that was known of
the cell is forgotten, until audits have made a new bound; where the promise broke, its answers are
repaired wholly meanwhile. No torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Literal

from kvweave.chunk.guard import as_ours
from kvweave.chunk.identity import ModelFingerprint
from kvweave.chunk.rebuild import there
from kvweave.errors import CorruptChunk, FormatTooNew
from kvweave.weave.learned import WRONG, parsed
from kvweave.weave.learning import Learner
from kvweave.weave.shift import AIM, FLOOR, LEAST, bound_rank, changed, passes

PROMISED = 0.95  # part of the answers whose drift is at most the bound
WINDOW = 300  # audits a bound is made of: what was before them is another time
GAMMA = 0.002  # how fast the quantile follows misses
STAKE = 5.0  # of the fortune in a bet: four misses in a row are a fortune
FORTUNE = 1000.0  # audits between two such alarms for nothing, on average, at least
PROBE = 4  # under an alarm one answer in so many is woven as it was asked for, to be audited
MOST_CELLS = 256  # of who has most of them, what was audited least is forgotten first
AUDIT_FILE = "audit.json"  # in a home

Way = Literal["asked", "probe", "full"]


@dataclass(frozen=True, slots=True, order=True)
class AuditCell:
    """All that a drift depends on besides model and text: answers of one cell share a bound.

    ``repair`` is the strategy with its options, ``share`` of the rows; ``bounded`` where a
    ``max_drift`` was asked for. ``codec``: what the reused chunks went through at rest. ``rows``:
    how the rows of the context rest. ``policy``: what was done with what was pruned, or the token
    policy that let go of rows. ``bases``: of which bases reused KV was: the context's ``own``, or
    ``others`` too. ``thinned``: what left some rows only of reused chunks. ``positions``: ``keep``
    where there are gaps. ``tenant``: whose answers, so that nobody's text can raise an alarm for others.
    """

    repair: str
    share: float
    bounded: bool = False
    codec: str = "raw"
    rows: str = "raw"
    policy: str = "forget"
    tenant: str = ""
    bases: str = "own"
    thinned: str = ""
    positions: str = "compact"

    @property
    def strategy(self) -> str:
        """The strategy without its options."""
        return self.repair.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Promised:
    """A bound (nats) and how often bounds of its cell were kept; None where that is unknown. Under an
    ``alarm``, or where a calibration was ``belied``, no other bound holds either."""

    bound: float | None
    coverage: float | None
    alarm: bool = False
    belied: bool = False


@dataclass(frozen=True, slots=True)
class CellReport:
    """What is known of one cell: for a page, or a metric.

    ``n_missed`` of the ``n_promised`` audited answers that had a bound were over it.
    """

    cell: AuditCell
    bound: float | None
    n_audits: int
    n_promised: int
    n_missed: int
    alarm: bool
    n_alarms: int

    @property
    def coverage(self) -> float | None:
        """Part of the promises that were kept; each was made before its audit was seen."""
        return 1 - self.n_missed / self.n_promised if self.n_promised else None

    def to_dict(self) -> dict[str, Any]:
        """Return it, JSON-ready."""
        return asdict(self) | {"coverage": self.coverage}


@dataclass(slots=True)
class AuditedCell:
    """What audits have found in one cell."""

    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    aim: float = AIM
    fortune: float = 1.0
    alarm: bool = False
    breach: bool = False  # it was raised since the promise was not kept
    belied: bool = False  # the calibration's promise was not kept: it is not made any more
    n_audits: int = 0
    n_promised: int = 0
    n_missed: int = 0
    n_alarms: int = 0
    n_answers: int = 0  # under the present alarm

    def bound(self) -> float | None:
        """Return the upper bound (nats) of the next drift; None while too little is known."""
        if len(self.window) < LEAST or self.aim <= 0:
            return None
        found = sorted(self.window)[bound_rank(len(self.window), self.aim) - 1]
        return max(FLOOR, found) if isfinite(found) else None

    def saw(self, drift: float, promised: float | None) -> bool:
        """Take in a true drift; return whether that raises an alarm."""
        self.n_audits += 1
        bound = self.bound() if promised is None else promised
        missed = bound is not None and passes(drift, bound)
        if bound is not None:
            expected = max(AIM, 1 / (len(self.window) + 1))  # the largest of n is no better
            self.aim = min(AIM, self.aim + GAMMA * (expected - missed))
        if promised is not None:
            self.n_promised, self.n_missed = self.n_promised + 1, self.n_missed + missed
            self._bet(missed)
        self.window.append(drift)
        breach, news = changed(self.window)
        lost = self.fortune >= FORTUNE
        breach |= lost
        raised = not self.alarm and (breach or news)
        if raised:
            self.belied |= lost
            self.breach = breach
            self.window.clear()
            self.alarm, self.n_alarms, self.n_answers = True, self.n_alarms + 1, 0
            self.aim, self.fortune = AIM, 1.0
            self.window.append(drift)
        if self.alarm and len(self.window) >= LEAST:
            self.alarm = False
        return raised

    def _bet(self, missed: bool) -> None:
        """Bet that more than one in twenty misses; never with less than one had at first, so that a
        long time of keeping the promise does not hide the day it breaks."""
        if not self.alarm:  # what was promised before it is no news
            pay = 1 + STAKE * (missed - (1 - PROMISED))
            self.fortune = max(1.0, self.fortune) * pay


_FIELDS = {"cell"} | {each.name for kind in (AuditCell, AuditedCell) for each in fields(kind)}


class Auditor:
    """The audits of one model, by cell."""

    def __init__(self) -> None:
        self._cells: dict[AuditCell, AuditedCell] = {}
        self.learner = Learner()
        self.n_failed = 0  # audits that came to nothing
        self.calibration = ""  # whose promises were bet against; "": there is none

    def __len__(self) -> int:
        """How many cells something is known of."""
        return len(self._cells)

    @property
    def alarmed(self) -> bool:
        """Whether some cell has an alarm."""
        return any(known.alarm for known in self._cells.values())

    def promise(self, cell: AuditCell | None) -> Promised:
        """Return what may be said of an answer of this cell before it is audited."""
        known = self._cells.get(cell) if cell is not None else None
        if known is None:
            return Promised(None, None)
        kept = known.n_promised - known.n_missed
        coverage = kept / known.n_promised if known.n_promised else None
        return Promised(known.bound(), coverage, known.alarm, known.belied)

    def way(self, cell: AuditCell) -> Way:
        """Return how the next answer of this cell is woven: as ``asked``; where the promise broke ``full``ly
        repaired, or now and then as a ``probe``, of which nothing is promised."""
        known = self._cells.get(cell)
        if known is None or not (known.alarm and (known.breach or cell.bounded)):
            return "asked"
        known.n_answers += 1
        if cell.bounded:  # who asked for a bound gets no answer without
            return "full"
        return "full" if known.n_answers % PROBE else "probe"

    def saw(self, cell: AuditCell, drift: float, promised: float | None) -> bool:
        """Take in the true drift (nats) of an answer; return whether that raises an alarm."""
        if cell not in self._cells:
            while len(self._cells) >= MOST_CELLS:
                whose = Counter(c.tenant for c in self._cells).most_common(1)[0][0]
                mine = [c for c in self._cells if c.tenant == whose]
                del self._cells[min(mine, key=lambda c: self._cells[c].n_audits)]
            self._cells[cell] = AuditedCell()
        return self._cells[cell].saw(drift, promised)

    def report(self) -> Iterator[CellReport]:
        """Yield what is known, cell by cell."""
        for cell, known in sorted(self._cells.items()):
            yield CellReport(
                cell, known.bound(), known.n_audits, known.n_promised, known.n_missed,
                known.alarm, known.n_alarms,
            )  # fmt: skip

    # ---- between runs

    def told(self, model: ModelFingerprint) -> dict[str, Any]:
        """Return what is known, for a file: numbers only, nothing of any text."""
        names = [each.name for each in fields(AuditedCell) if each.name != "window"]
        cells = [
            {"cell": asdict(cell), "window": list(known.window)}
            | {name: getattr(known, name) for name in names}
            for cell, known in self._cells.items()
        ]
        told = {"fingerprint": model.to_dict(), "calibration": self.calibration, "cells": cells}
        return told | {"tried": self.learner.report()}

    @classmethod
    def load(cls, path: Path, model: ModelFingerprint, calibration: str = "") -> Auditor:
        """Read what was saved; of another model nothing is known, and against another ``calibration``
        nothing. Raises CorruptChunk, FormatTooNew, StoreError."""
        made = cls()
        made.calibration = calibration
        with as_ours(path):
            text = path.read_bytes() if there(path) else None
        if text is None:
            return made
        try:
            told = parsed(text)
            if more := {*_fields(told["cells"])} - _FIELDS:
                unknown = f"the field {', '.join(sorted(more))}"
                raise FormatTooNew(str(path), 2, 1, unknown)
            if ModelFingerprint.from_dict(told["fingerprint"]) == model:
                made._cells = dict(map(_known, filter(_is_of_one_kind, told["cells"])))
                made.learner = Learner.of(told.get("tried", []))
                if told.get("calibration", "") != calibration:
                    made._calibrated_anew()
        except WRONG as error:
            raise CorruptChunk(str(path), f"no audits: {error}", hint="remove it") from error
        return made

    def _calibrated_anew(self) -> None:
        """Forget what was found against promises of a calibration that is not there any more."""
        for cell, known in list(self._cells.items()):
            known.belied, known.fortune = False, 1.0
            if cell.bounded and known.alarm:  # all its answers are repaired: no audit would end it
                del self._cells[cell]


def _is_of_one_kind(told: Mapping[str, Any]) -> bool:
    """Tell whether answers of a cell were alike: before a cell told what left rows out and where there
    were gaps, those that may have had either were in one with those that had not."""
    return "thinned" in told["cell"] or told["cell"].get("policy", "forget") == "forget"


def _fields(cells: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for told in cells:
        yield from told
        yield from told["cell"]


def _known(told: Mapping[str, Any]) -> tuple[AuditCell, AuditedCell]:
    rest = {key: value for key, value in told.items() if key not in ("cell", "window")}
    window = deque((float(x) for x in told["window"]), maxlen=WINDOW)
    made = AuditCell(**told["cell"]), AuditedCell(window, **rest)
    wanted = asdict(AuditCell("", 0.0)) | asdict(AuditedCell())
    found = asdict(made[0]) | asdict(made[1])
    if any(not _is_like(found[name], value) for name, value in wanted.items()):
        raise TypeError("a cell that is none")
    if any(map(isnan, (*window, made[1].aim, made[1].fortune))):
        raise ValueError("what is no number")
    return made


def _is_like(found: object, wanted: object) -> bool:
    kind = type(wanted)
    return isinstance(found, (kind, int) if kind is float else kind)

"""Shadow audits: while there is time, a few of the answers given are held against a full prefill.

::

    answer      its tokens, and what was predicted when they were chosen, are put aside   (`take`)
    time        a full prefill of the same tokens at the same positions                   (`audit`)
    then        true drift -> its cell's bound, its line in the ledger                    (`Auditor`)
    more time   the same answer, woven in other ways (`kvweave.weave.trying`)             (`Learner`)

An audit is a request in the background, in short pieces: whatever else is asked for runs first. What
is put aside lies in memory only, and is charged there: it takes room that nothing has, and is let
go of when something wants it.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.chunk.file import soon
from kvweave.chunk.guard import free_name
from kvweave.errors import CorruptChunk, KVWeaveError, OverBudget, StoreError
from kvweave.run.base import Backend, Ints, Rows, Steps, Work
from kvweave.run.loop import Loop, Request, Task, new_key
from kvweave.store.shelf import Shelf
from kvweave.weave.audit import AUDIT_FILE, AuditCell, Auditor
from kvweave.weave.calibration import DRAFT
from kvweave.weave.check import COMPARED
from kvweave.weave.costs import AnswerCost
from kvweave.weave.learned import LearnedFile
from kvweave.weave.learning import WAYS
from kvweave.weave.passes import SLICE
from kvweave.weave.shift import passes
from kvweave.weave.trying import Again, Woven

AUDITS = "||audit"  # of no namespace: whose memory it is
MOST = 8  # answers that wait for their audit
MOST_BYTES = 64 << 20  # of the predictions of these
HELD = 4  # times its predictions: a full prefill's, and another way's, in pieces too
UNDER_ALARM = 4  # times the share of time, until there is a new bound
EARLY = 64  # answers, since the start, that need no time put by for them: of their like nothing is known
T = TypeVar("T")
log = logging.getLogger("kvweave.weave")


@dataclass(eq=False, slots=True)
class Sample:
    """An answer put aside: ``tokens`` and ``positions`` of its context up to the last prediction,
    and the ``logits`` [prediction, vocab] it was sampled from, the last of these."""

    cell: AuditCell
    promised: float | None
    tokens: Ints
    positions: Ints
    logits: Tensor
    cost: AnswerCost | None = None
    again: Again | None = None  # what it takes to weave it in other ways

    @property
    def n_bytes(self) -> int:
        """Bytes it takes of memory."""
        host = self.tokens.nbytes + self.positions.nbytes
        return host + self.logits.numel() * self.logits.element_size()


@dataclass(frozen=True, slots=True)
class Audit:
    """The true ``drift`` (nats a token) of an answer, and what was ``promised`` of it before."""

    cell: AuditCell
    drift: float
    promised: float | None
    alarm: bool  # it raised one

    @property
    def kept(self) -> bool | None:
        """Whether the promise was; None where there was none."""
        return None if self.promised is None else not passes(self.drift, self.promised)


class Watch:
    """Keeps the logits that the last ``n`` tokens of an answer are chosen from, ``a_row`` bytes each."""

    def __init__(self, n: int, a_row: int) -> None:
        self.kept: deque[Tensor] = deque(maxlen=n)
        self.n_bytes = n * a_row  # at most

    def stop(self) -> None:
        """Let go of them; nothing is kept from here on."""
        self.kept = deque(maxlen=0)

    def __call__(self, logits: Tensor) -> None:
        try:
            self.kept.append(logits.clone())
        except Exception:  # no memory: an answer is worth more than its audit
            self.stop()


class Shadow:
    """Puts answers aside and audits them, for ``share`` of the time spent computing; 0 is never.

    With a share of 1 every answer is taken, else some by chance, so that none is likelier for what
    it says. Touched by who drives the loop.
    """

    def __init__(
        self,
        backend: Backend,
        shelf: Shelf,
        share: float = 0.0,
        home: Path | None = None,
        calibration: str = "",
    ) -> None:
        self.backend, self.shelf, self.share = backend, shelf, share
        self._file = None if home is None else LearnedFile(home / AUDIT_FILE)
        self.auditor = self._load(calibration)
        self._random = random.Random()
        self._waiting: list[Sample] = []
        self._watching: WeakSet[Watch] = WeakSet()  # of answers under way
        self._running: dict[int, tuple[Loop, int]] = {}  # audits under way: bytes of their rows
        self._n_early, self._ahead = 0, 0.0  # answers audited early, and the seconds it took
        shelf.spare = self.spare

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def in_use(self) -> bool:
        """Whether answers are audited, or were by an earlier run."""
        return bool(self.share or len(self.auditor))

    # ---- answers

    def watch(self, sure: bool = False) -> Watch | None:
        """Return what is to see the logits of an answer that begins, if it may be audited; ``sure``
        where it has to be."""
        if not self.share:
            return None
        a_row = self.backend.n_vocab * self.backend.dtype.itemsize
        n = max(1, min(COMPARED, MOST_BYTES // MOST // a_row))  # few where there are many words
        likely = 1.0 if sure or self.share >= 1 else 0.5 / (1 + len(self._waiting))
        if self._random.random() >= likely or n * a_row > self.shelf.room:
            return None
        made = Watch(n, a_row)
        self._watching.add(made)
        self._charge()
        return made

    def leave(self, watch: Watch | None) -> None:
        """Let go of what was seen of an answer that is not audited."""
        if watch is not None and watch in self._watching:
            self._watching.discard(watch)
            self._charge()

    def take(
        self,
        watch: Watch,
        cell: AuditCell,
        promised: float | None,
        given: tuple[Ints, Ints],
        about: tuple[AnswerCost, Again | None],
    ) -> None:
        """Put an answer aside; ``given`` are tokens and positions up to its last prediction. One of
        those that wait goes where there are too many."""
        self.leave(watch)
        if not watch.kept:
            return
        made = Sample(cell, promised, *given, torch.stack(list(watch.kept)), *about)
        if made.n_bytes > self.shelf.room:
            return
        self._waiting.append(made)
        while len(self._waiting) > MOST:
            del self._waiting[self._random.randrange(MOST)]
        self._charge()

    def spare(self) -> None:
        """Let go of all that waits, is seen of answers, and of audits under way: their memory is wanted."""
        self._waiting.clear()
        for watch in self._watching:
            watch.stop()
        self._watching.clear()
        running, self._running = self._running, {}
        for key, (loop, _) in running.items():
            loop.cancel(key)
        self._charge()

    # ---- audits

    def is_due(self, loop: Loop) -> bool:
        """Tell whether there is an answer to audit, and time was put by for it, or it needs none."""
        return bool(self._waiting) and (self._affords(loop) or self._early() is not None)

    def _affords(self, loop: Loop) -> bool:
        alarmed = any(self.auditor.promise(sample.cell).alarm for sample in self._waiting)
        share = self.share * (UNDER_ALARM if alarmed else 1)  # nobody hurries for who is gone
        return loop.seconds["audit"] - self._ahead <= share * loop.seconds[""]

    def _early(self) -> int | None:
        """Return which answer that waits is the first of whose like too little is known to promise a drift,
        or to choose a way; None where all are, or so many were that it has to wait like others."""
        new = (i for i, sample in enumerate(self._waiting) if self._is_new(sample))
        return next(new, None) if self._n_early < EARLY else None

    def _is_new(self, sample: Sample) -> bool:
        known, again = self.auditor.promise(sample.cell), sample.again
        if known.alarm:
            return False
        unlearned = again is not None and self.auditor.learner.knows_little(
            sample.cell.tenant, again.share
        )
        return unlearned or (sample.promised is None and known.bound is None)

    def audit(self, loop: Loop) -> Task[Audit | None]:
        """Audit the answer that waits longest, or the first that needs no time put by where there is none, as
        a task of ``loop``; None when that came to nothing, which is counted and hurts nobody."""
        if not self._waiting:
            return None
        early = None if self._affords(loop) else self._early()
        sample, rows = self._waiting.pop(early or 0), self.backend.new_rows()
        spent, self._n_early = loop.seconds["audit"], self._n_early + (early is not None)
        n = len(sample.tokens) + DRAFT
        n_bytes = rows.bytes_for(n) + sample.n_bytes * (1 if sample.again is None else HELD)
        audit: Audit | None = None
        try:
            if n_bytes > self.shelf.room:
                self._charge()
                raise OverBudget(n_bytes, self.shelf.budget, 0)
            rows.reserve(n)
            found = yield from self._aside(loop, rows, n_bytes, drifting(rows, sample))
            if found is not None:
                audit = self._found(sample, found[1])
                yield from self._learn(loop, rows, n_bytes, (sample, found[0]))
        except Exception as error:
            known = isinstance(error, KVWeaveError)
            log.log(logging.INFO if known else logging.ERROR, "an audit came to nothing: %s", error)
        finally:
            self._charge()
            if early is not None:
                self._ahead += loop.seconds["audit"] - spent
        self.auditor.n_failed += audit is None
        return audit

    def _aside(self, loop: Loop, rows: Rows, n_bytes: int, steps: Steps[T]) -> Task[T | None]:
        """Run steps in the background, with ``n_bytes`` charged; None where that was called off."""
        found: list[T] = []

        def kept() -> Steps[None]:
            found.append((yield from steps))

        key = new_key()
        try:
            self._running[key] = loop, n_bytes
            self._charge()
            yield Request(key, rows, kept(), None, background="audit")
        finally:
            loop.cancel(key)
            self._running.pop(key, None)
            self._charge()
        return found[0] if found else None

    def _learn(
        self, loop: Loop, rows: Rows, n_bytes: int, about: tuple[Sample, Tensor]
    ) -> Task[None]:
        """Weave an answer in all ways there are, where that is wanted, and note how near each came. Under
        an alarm time is for audits, and the way stays whose bound they make."""
        (sample, truth), auditor = about, self.auditor
        again, tenant, learner = sample.again, sample.cell.tenant, auditor.learner
        if again is None or auditor.promise(sample.cell).alarm:
            return
        stood = again.stands() if learner.wants(tenant, again.share) else None
        found: dict[str, tuple[float, float]] = {}
        for way in WAYS if stood is not None else ():
            if n_bytes > self.shelf.room or again.stands() != stood:  # given back; or others' rows
                return
            steps = again.weaving(rows, sample.tokens, len(truth), way)
            near = yield from self._aside(loop, rows, n_bytes, nearness(steps, truth))
            if near is None:
                return
            found[way] = near
        best = learner.saw(tenant, again.share, found)
        if best is not None:
            log.info("auto repairs as %s at a share of %g from here on", best, again.share)
            self._tell()

    def _found(self, sample: Sample, drift: float) -> Audit:
        if sample.cost is not None:
            sample.cost.measured = drift if isfinite(drift) else None
        was = self.auditor.promise(sample.cell).alarm
        raised = self.auditor.saw(sample.cell, drift, sample.promised)
        if raised or was != self.auditor.promise(sample.cell).alarm:
            self._tell()  # an engine that dies would promise again what was not kept
        if raised:
            log.warning(
                "an alarm: drifts of answers like %s are not what they were; until audits have made a "
                "new bound nothing is promised, and where the old one broke, all is repaired",
                sample.cell,
            )  # fmt: skip
        return Audit(sample.cell, drift, sample.promised, raised)

    def close(self) -> None:
        """Let go of what waits; with a home, write down what audits have found: numbers, no text."""
        self._waiting.clear()
        self._running.clear()
        self._watching.clear()
        self._charge()
        if (file := self._file) is None or not len(self.auditor):
            return
        try:
            soon(partial(file.now, self.auditor.told(self.backend.fingerprint)), file.path)
        except (OSError, StoreError) as error:
            log.warning("what audits have found is lost: %s", error)

    def _tell(self) -> None:
        """Have it written down what audits have found, while nobody waits."""
        if self._file is not None:
            self._file.later(self.auditor.told(self.backend.fingerprint))

    def _load(self, calibration: str) -> Auditor:
        if self._file is None:
            return Auditor()
        file = self._file.path
        try:
            read = partial(Auditor.load, file, self.backend.fingerprint, calibration)
            return soon(read, file)
        except CorruptChunk as error:  # they can be made again
            log.warning("audits begin anew: %s", error)
            with suppress(OSError, StoreError):
                soon(lambda: file.rename(free_name(file)), file)
        except StoreError as error:  # they may well be whole: they stay
            log.warning("audits begin anew, and are not written down: %s", error)
            self._file = None
        made = Auditor()
        made.calibration = calibration
        return made

    def _charge(self) -> None:
        running = sum(n_bytes for _, n_bytes in self._running.values())
        seen = sum(watch.n_bytes for watch in self._watching)
        self.shelf.charge(AUDITS, running + seen + sum(s.n_bytes for s in self._waiting))


def drifting(rows: Rows, sample: Sample) -> Steps[tuple[Tensor, float]]:
    """Return the logits [prediction, vocab] that a full prefill in ``rows`` has for an answer's predictions,
    and the mean KL (nats) of these to them. Raises ArithmeticError when that predicts nothing."""
    n = len(sample.tokens)
    found, kept = [], n - len(sample.logits)
    for at in range(0, n, SLICE):
        slots = np.arange(at, min(n, at + SLICE))
        want = np.flatnonzero(slots >= kept)
        found.append((yield Work(rows, sample.tokens[slots], slots, sample.positions[slots], want)))
    truth = torch.cat(found)
    return truth, drift_of(truth, sample.logits)


def nearness(weaving: Steps[Woven], truth: Tensor) -> Steps[tuple[float, float]]:
    """Return the mean KL (nats) of what another way predicts to the truth, and its cost."""
    found, cost = yield from weaving
    return drift_of(truth, found), cost


def drift_of(wanted: Tensor, found: Tensor) -> float:
    """Return the mean KL (nats) of ``found`` logits [row, vocab] to the ``wanted`` ones; infinite
    where they are no numbers. Raises ArithmeticError when the wanted ones are none."""
    true, had = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    if bool(true.isnan().any()):
        raise ArithmeticError("the full prefill predicted nothing")
    terms = torch.where(true.isneginf(), 0.0, true.exp() * (true - had))
    drift = float(terms.sum(-1).clamp_min(0).mean())
    return drift if drift == drift else float("inf")


def given_of(
    prompt: Sequence[NDArray[np.uint32]], out: Sequence[int], rows: Rows
) -> tuple[Ints, Ints]:
    """Return tokens and positions of a context up to an answer's last prediction."""
    tokens = np.concatenate([np.concatenate(prompt).astype(np.int64), np.array(out[:-1], np.int64)])
    return tokens, rows.positions[: len(tokens)].copy()

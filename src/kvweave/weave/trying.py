"""An answer's context woven again in another way, to see how near that would have come: while nobody waits.

::

    audit    a full prefill of the answer                                   truth
    again    [base][chunk][chunk] | question, placed anew, one way to repair, the answer forced behind it
             its predictions against the truth's                            KL, and what it computed

It uses what lies in memory and leaves no trace: no policy counts it as a use, nothing is brought up
from below, nothing is kept. Where something is gone since, nothing is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import ChunkNotFound, LoadFailed
from kvweave.run.base import Backend, Ints, Rows, Steps, Work
from kvweave.store.kv import KV
from kvweave.weave.audit import AuditCell
from kvweave.weave.calibration import STRATEGY
from kvweave.weave.deps import Dependence
from kvweave.weave.parts import (
    Available,
    Part,
    Placement,
    Seen,
    Source,
    Truth,
    positions_of,
    resolve,
)
from kvweave.weave.passes import SLICE, Passes, replays, union
from kvweave.weave.recipes import NONE, PASS
from kvweave.weave.repair import Auto, NoRepair, Wish
from kvweave.weave.sources import Sought, Sources, runs
from kvweave.weave.weaving import Weaving

PLAIN = AuditCell("", 0.0)  # nothing but reuse
NOTHING = Available(False, (), False)
Woven = tuple[Tensor, float]


@dataclass(frozen=True, slots=True)
class Again:
    """What an answer's context was woven of: ``parts``, those with rows of their own in ``had``, ``share``
    of these to repair."""

    backend: Backend
    sources: Sources
    dependence: Dependence
    parts: tuple[Part, ...]
    had: frozenset[int]  # uids
    share: float

    def placed(self) -> tuple[list[Placement], dict[int, KV]] | None:
        """Return where all would be placed now, and its KV by uid; None where it is not what it was."""
        asked, loaded = Sought(self.had), dict[int, KV]()

        def find(part: Part, seen: Seen) -> Available:
            known = part.uid in self.had  # else it was computed there
            return self.sources.at_hand(part, seen, asked, loaded) if known else NOTHING

        try:
            placed = resolve(self.parts, [], find)
        except ChunkNotFound:
            return None
        same = self.had == {p.part.uid for p in placed if p.ready}
        return None if not same or any(kv.altered for kv in loaded.values()) else (placed, loaded)

    def stands(self) -> list[tuple[Source, Truth]] | None:
        """Return what the rows of each part would be now: ways over others are not compared."""
        found = self.placed()
        return None if found is None else [(p.source, p.truth) for p in found[0]]

    def weaving(self, rows: Rows, tokens: Ints, n_last: int, way: str) -> Steps[Woven]:
        """Return the logits [prediction, vocab] of the last ``n_last`` of the context's last row and all
        ``tokens`` behind the parts, and what the repair computed, of the context. ``rows`` are written
        anew. Raises LoadFailed."""
        placed, computed = self._placing(rows), Effort()
        n = placed[-1].slots[1]
        missing = np.concatenate([np.arange(p.slot + p.ready, p.slots[1]) for p in placed])
        passes = Passes(
            self.backend, rows, tokens[:n], positions_of(placed), missing, placed,
            self.dependence, np.zeros(n, bool),
        )  # fmt: skip
        end = yield from computed.counting(self._repairing(passes, way), len(self.backend.layers))
        behind = np.arange(n, len(tokens))
        positions = passes.positions[-1] + 1 + np.arange(len(behind))
        want = np.arange(max(0, len(behind) - n_last), len(behind))
        more = []
        for part in sliced(Work(rows, tokens[behind], behind, positions, want)):
            more.append((yield part))
        rows_more, passes_more = computed.rows - len(missing), computed.passes - 1
        cost = max(0.0, rows_more / n) + PASS * max(0, passes_more)
        return torch.cat([end, *more])[-n_last:], cost

    def _placing(self, rows: Rows) -> list[Placement]:
        """Write what is placed, and keep nothing of it: the shelf may let it go. Raises LoadFailed."""
        found = self.placed()
        if found is None:
            raise LoadFailed(self.parts[0].id, "missing: what the context was made of has changed")
        placed, loaded = found
        rows.truncate(0)
        if moving := [p for p in placed if p.ready]:
            exact = next((p.slot for p in moving if not p.exact), None)
            rows.place(runs(moving, {}, loaded), positions_of(placed), exact)
        return placed

    def _repairing(self, passes: Passes, way: str) -> Steps[Tensor]:
        """Repair, compute the rest and return the logits [1, vocab] of the last row."""
        strategy = NoRepair() if way == NONE else Auto()
        verdict = yield from strategy.repair(passes, Wish(self.share, recipe=way))
        chosen = union(np.setdiff1d(verdict.chosen, passes.left), np.array([passes.n - 1]))
        rest = union(chosen, passes.left)
        return (yield passes.work(rest, want=np.array([len(rest) - 1])))


class Effort:
    """Rows, in passes through all layers, and passes."""

    def __init__(self) -> None:
        self.rows, self.passes = 0.0, 0

    def add(self, work: Work, n_layers: int) -> None:
        """Count a pass."""
        deep = n_layers if work.last is None else work.last
        self.rows += work.n * deep / n_layers
        self.passes += 1

    def counting(self, steps: Steps[Tensor], n_layers: int) -> Steps[Tensor]:
        """Run steps in slices, and count what they compute."""
        go: Callable[[], Work] = partial(next, steps)
        while True:
            try:
                work = go()
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            self.add(work, n_layers)
            found = []
            for part in sliced(work):
                found.append((yield part))
            go = partial(steps.send, torch.cat(found))


def sliced(work: Work) -> list[Work]:
    """Return a work in pieces that nobody waits long for."""
    return [work.part(at, min(work.n, at + SLICE)) for at in range(0, work.n, SLICE)]


def again_of(
    weaving: Weaving, backend: Backend, sources: Sources, dependence: Dependence
) -> Again | None:
    """Return what it takes to weave an answer's context in other ways; None where that would teach nothing:
    somebody chose the way, or more than reuse is approximate."""
    cell, parts, auto = weaving.cell, tuple(p.part for p in weaving.placed), weaving.strategy
    usual = isinstance(auto, Auto) and auto.measured_as == STRATEGY and not auto.evidence
    if cell is None or weaving.alarm or not usual or sources.bases.foreign(parts):
        return None
    if not weaving.wish.share:  # all ways are the same
        return None
    plain = replace(cell, repair="", share=0.0, tenant="") == PLAIN
    if not plain or replays(backend) or any(part.frozen or part.virtual for part in parts):
        return None
    had = frozenset(p.part.uid for p in weaving.placed if p.ready)
    return Again(backend, sources, dependence, parts, had, weaving.wish.share)

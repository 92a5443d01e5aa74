"""The contract of a repair strategy: look at a placed context, choose rows.

Derive from `Strategy`, give it a ``name`` and a ``choose``, enter it in ``STRATEGIES`` of the
package, and give it to ``tests/weave/test_strategies.py``. A strategy that has to see attention is
a job: ``mass = yield from view.attention()``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvweave.run.base import NO_SLOTS, Ints, Steps
from kvweave.weave.calibration import Calibration, Evidence
from kvweave.weave.parts import Placement
from kvweave.weave.passes import Floats, Passes, union

SETTLED = 0.2  # of the change of a chunk's first row: what rows deep in it change


@dataclass(frozen=True, slots=True)
class Wish:
    """How much repair a context asks for: a ``share`` of its rows, or what ``max_drift`` (nats)
    takes by the model's calibration. ``recipe``: the options of `auto` that this model was measured
    with, where it was."""

    share: float
    max_drift: float | None = None
    calibration: Calibration | None = None
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy chose: slots to recompute, increasing.

    ``drift`` is a bound (nats), None where nothing is known. ``in_place``: they and the question's
    rows are recomputed already, and ``end`` [vocab] are the logits of the context's last row.
    """

    chosen: Ints
    drift: float | None = None
    evidence: Evidence | None = None
    in_place: bool = False
    end: Tensor | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may look at. Slots are indices into the context's rows, all arrays on the host.

    The jobs cost a pass each; per candidate row they return:

    - ``attention()``: the attention mass the rows not yet computed (the question) pay to it;
    - ``needs(n)``: the squares of that, without the first layer, whose rows depend on nothing but
      their token, and with what ``n`` drafted tokens of the reply pay;
    - ``reads(slots, weights)``: the squares of what these rows pay once they are recomputed here,
      each counting its weight;
    - ``deviation(layer, what)``: how far the placed "k", "v" or "kv" of a layer are from recomputed
      ones (squared L2).
    """

    passes: Passes
    spans: Sequence[Placement]  # parts that are placed and not exact
    candidates: Ints  # [n] their slots, increasing
    budget: int  # rows to choose
    random: np.random.Generator

    @property
    def placed(self) -> Sequence[Placement]:
        """All parts, front to back."""
        return self.passes.placed

    def attention(self) -> Steps[Floats]:
        """Return the question's attention."""
        if not len(self.passes.unready):
            return np.zeros(len(self.candidates))
        return (yield from self.passes.attention())[self.candidates]

    def needs(self, n_draft: int) -> Steps[Floats]:
        """Return what the question and a drafted reply attend to; zeros without a question."""
        if not len(self.passes.unready):
            return np.zeros(len(self.candidates))
        return (yield from self.passes.look(n_draft)).mass[self.candidates]

    def reads(self, slots: Ints, weights: Floats) -> Steps[Floats]:
        """Return what recomputed rows attend to."""
        return (yield from self.passes.reads(slots, weights))[self.candidates]

    def deviation(self, layer: int, what: str) -> Steps[Floats]:
        """Return how far rows are from recomputed ones."""
        return (yield from self.passes.deviation(self.candidates, layer, what))

    def change(self) -> Floats:
        """Return how much a repair is expected to change each candidate's values, squared (0..1].

        A row of a chunk that was computed by itself has seen the chunk's rows before it and nothing
        else: the first rows change most, as 1/(1 + rows before it), down to a floor; measured on
        four models (docs/LOG.md, 2026-11-23). Rows computed among other chunks are at the floor.
        """
        return SETTLED + (1 - SETTLED) / (1 + self.depth())

    def depth(self) -> Floats:
        """Return how many rows of its chunk stand before each candidate; infinite for rows that were
        computed among other chunks."""
        before = np.full(self.passes.n, np.inf)
        for p in self.spans:
            if p.origin == "canonical":
                before[p.slot : p.slot + p.ready] = np.arange(p.ready)
        return before[self.candidates]

    def pooled(self, need: Floats) -> Floats:
        """Return ``need`` [candidate] of which rows of one token of one chunk have as much as all of
        them together. Where a chunk stands twice a reader finds either and pays each a half, whose
        squares are half of what it pays one; and a copy left stale says something else. New text
        that was computed early (`Passes.early`) is no copy of anything.
        """
        ids = {id: i for i, id in enumerate({p.part.id for p in self.spans})}
        if len(ids) == len(self.spans):
            return need
        token = -1 - np.arange(self.passes.n)
        for p in self.spans:
            first = (ids[p.part.id] << 32) + p.part.start
            token[p.slot : p.slot + p.ready] = np.arange(first, first + p.ready)
        _, which = np.unique(token[self.candidates], return_inverse=True)
        total = np.zeros(len(which))
        np.add.at(total, which, need)
        return total[which]

    def dependence(self) -> Floats:
        """Return the attention mass each candidate paid to other chunks when it was last computed
        among them (mean over heads and layers), 0 where nothing is recorded. Costs nothing."""
        passes, found = self.passes, np.zeros(self.passes.n)
        for p in self.spans:
            found[p.slot : p.slot + p.ready] = passes.dependence.of([p])
        return found[self.candidates]


class Strategy:
    """Chooses rows. ``choose`` alone makes one; `Auto`, which bounds what is left, has its own
    ``repair``."""

    name = ""
    records = False  # a context records what its rows read of other chunks
    rank = 0  # > 0: patches of that rank are stored and used
    draft = 0  # tokens of the reply it drafts at most: rows to have room for
    looks = False  # at what the question attends to: which rows are chosen depends on it

    @property
    def measured_as(self) -> str:
        """What a calibration has to be of to say something of it."""
        return ""

    @property
    def copies(self) -> int:
        """Layers whose rows it copies for a while."""
        return 0

    def choose(self, view: View) -> Ints | Steps[Ints]:
        """Return slots to recompute, a subset of ``view.candidates``, in increasing order."""
        raise NotImplementedError

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Choose ``wish.share`` of the rows that are placed and not exact."""
        spans = [p for p in passes.placed if p.repairable]
        chosen = yield from self.select(passes, spans, passes.candidates(spans), wish.share)
        return Verdict(union(chosen, passes.early))

    def select(
        self, passes: Passes, spans: Sequence[Placement], candidates: Ints, share: float
    ) -> Steps[Ints]:
        """Return ``choose`` of a share of the candidates."""
        if not len(candidates):
            return NO_SLOTS
        budget = round(share * len(candidates))
        found = self.choose(View(passes, spans, candidates, budget, np.random.default_rng(0)))
        slots = (yield from found) if isinstance(found, Generator) else found
        return slots[np.isin(slots, candidates)]


def best(view: View, scores: Floats) -> Ints:
    """Return the slots of the ``budget`` highest ``scores`` [candidate], increasing; of equal ones
    the first."""
    top = np.argsort(-scores, kind="stable")[: view.budget]
    return view.candidates[np.sort(top)]

"""What repair strategies rank rows by: deviation and attention, measured in passes of their own;
and the passes of the gate, which look at the question before and after a repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.run.attention import BLOCK, Segment
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.weave.deps import Dependence
from kvweave.weave.parts import Placement
from kvweave.weave.repair import Strategy, View

QUESTION = 32  # rows whose attention tells what a question needs; it stands at the end
TOGETHER = 96  # unready rows before these that run with them: one pass, but the slower attention
ASKS = 0.2  # what a row of the question counts beside one of a drafted reply
NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Look:
    """What the question sees: attention ``mass`` [slot], its rows' and the draft's ``logits`` [row,
    vocab], and the ``draft`` of the reply's first tokens."""

    mass: Tensor
    logits: Tensor
    draft: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """A placed context before its repair: ``tokens`` and ``positions`` [slot], ``unready`` slots.

    ``repaired`` [slot] marks rows that an earlier weave recomputed behind what still stands there.
    """

    runner: Runner
    rows: KVRows
    tokens: Tensor
    positions: Tensor
    unready: Tensor
    placed: Sequence[Placement]
    dependence: Dependence
    repaired: Tensor
    lookahead: int = 0  # tokens of the reply to draft; the rows have room for them
    looks: list[Look] = field(default_factory=list)  # at most one
    replaced: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # slots, old values
    ends: list[Tensor] = field(default_factory=list)  # the last row's logits after each `repair`

    def slots(self, spans: Sequence[Placement]) -> Tensor:
        """Return the slots of ``spans`` that have rows, increasing."""
        found = [torch.arange(p.slot, p.slot + p.ready) for p in spans]
        return torch.cat(found) if found else NOTHING

    def candidates(self, spans: Sequence[Placement]) -> Tensor:
        """Return those of them that a repair may recompute."""
        slots = self.slots(spans)
        return slots[~self.repaired[slots]]

    def choose(self, spans: Sequence[Placement], strategy: Strategy, share: float) -> Tensor:
        """Return the slots of ``spans`` that ``strategy`` would recompute, increasing."""
        candidates = self.candidates(spans)
        if not candidates.numel():
            return NOTHING
        view = View(
            placed=self.placed,
            spans=spans,
            candidates=candidates,
            budget=round(share * candidates.numel()),
            deviation=lambda layer, what: self.deviation(candidates, layer, what),
            attention=lambda: self.attention()[candidates],
            dependence=lambda: self.dependence.of(spans)[torch.isin(self.slots(spans), candidates)],
            needs=lambda: self.needs()[candidates],
            reads=lambda slots, weights: self.reads(slots, weights)[candidates],
            generator=torch.Generator().manual_seed(0),
        )
        chosen = strategy.choose(view)
        return chosen[torch.isin(chosen, candidates)]

    def deviation(self, candidates: Tensor, layer: int, what: str) -> Tensor:
        """Return the squared distance of placed rows of one layer from recomputed ones.

        Layers up to ``layer`` are computed for all rows on a copy.
        """
        layer = min(layer, len(self.rows.k) - 1)
        scratch = self.rows.clone(layers=layer + 1)
        todo = torch.unique(torch.cat([candidates, self.unready]))
        for slots in torch.split(todo, BLOCK):
            self._run(scratch, slots, layer, None)
        at = candidates.to(self.rows.device)
        total = torch.zeros(candidates.numel(), device=self.rows.device)
        for name, new, old in (("k", scratch.k, self.rows.k), ("v", scratch.v, self.rows.v)):
            if name in what:
                total += (new[layer][at] - old[layer][at]).float().square().sum((1, 2))
        return total.cpu()

    def attention(self) -> Tensor:
        """Return the attention mass [slot] that the last `QUESTION` unready rows pay, over heads
        and all layers but the last.

        Computes the unready rows over the unrepaired context; the main pass computes them again.
        """
        mass = torch.zeros(self.tokens.numel(), device=self.rows.device)
        last = len(self.rows.k) - 1  # its keys are the last thing anyone asks for
        question = self.unready[-QUESTION:]
        for slots in torch.split(self.unready[:-QUESTION], BLOCK):
            self._run(self.rows, slots, last, None)
        self._run(self.rows, question, last, mass)
        return mass.cpu()

    def look(self) -> Look:
        """Return what the last `QUESTION` unready rows see, over the rows as they were placed, and
        what the drafted reply behind them sees.

        The first layer does not count: its keys and values are right wherever a row stands.
        """
        if not self.looks:
            n = self.tokens.numel()
            mass = torch.zeros(n + self.lookahead, device=self.rows.device)
            early, question = self.unready[:-QUESTION], self.unready[-QUESTION:]
            if early.numel() > TOGETHER:
                for slots in torch.split(early, BLOCK):
                    self._run(self.rows, slots, len(self.rows.k) - 1, None)
                early = NOTHING
            weights = torch.cat([torch.zeros(early.numel()), torch.full(question.shape, ASKS)])
            slots = torch.cat([early, question])
            logits = self._see(slots, self.tokens, question.numel(), mass, weights)
            tokens = self.tokens
            while self._goes_on(tokens.numel() - n, token := logits[-1].argmax().view(1)):
                slots, tokens = torch.tensor([tokens.numel()]), torch.cat([tokens, token])
                logits = torch.cat([logits, self._see(slots, tokens, 1, mass, torch.ones(1))])
            self.rows.truncate(n)
            self.looks.append(Look(mass[:n].cpu(), logits, tokens[n:]))
        return self.looks[0]

    def _goes_on(self, n: int, token: Tensor) -> bool:
        """Whether ``token`` may be the draft's next behind ``n``: there is a position for it, and it
        ends nothing."""
        if n >= self.lookahead or int(self.unready[-1]) < self.tokens.numel() - 1:
            return False
        free = self.runner.limit - 1 - int(self.positions[-1])
        return n < free and int(token) not in self.runner.ends

    def _see(
        self, slots: Tensor, tokens: Tensor, n_want: int, mass: Tensor, weights: Tensor
    ) -> Tensor:
        """Run ``slots`` of ``tokens`` [slot], the draft's included; add the attention they pay, each
        times its weight, to ``mass``, and return the last ``n_want`` rows' logits."""
        at = slots.to(self.rows.device)
        segment = Segment(
            self.rows, tokens[at], slots, self._positions(at), mass=mass,
            mass_from=min(1, len(self.rows.k) - 1), mass_of=weights.to(mass),
        )  # fmt: skip
        want = torch.arange(at.numel() - n_want, at.numel(), device=at.device)
        return self.runner.forward([segment], want)

    def _positions(self, slots: Tensor) -> Tensor:
        """Return the positions of slots; those behind the context follow on."""
        last = self.tokens.numel() - 1
        return self.positions[slots.clamp_max(last)] + (slots - last).clamp_min(0)

    def needs(self) -> Tensor:
        """Return the attention mass [slot] of `look`; zeros when there is no question."""
        if not self.unready.numel():
            return torch.zeros(self.tokens.numel())
        return self.look().mass

    def reads(self, slots: Tensor, weights: Tensor) -> Tensor:
        """Return the attention mass [slot] that ``slots`` pay when they are recomputed in place,
        each times its weight, the first layer not counted."""
        self.rows.settle()
        mass = torch.zeros(self.tokens.numel(), device=self.rows.device)
        last = len(self.rows.k) - 1
        for part, weight in zip(
            torch.split(slots, BLOCK), torch.split(weights, BLOCK), strict=True
        ):
            at = part.to(self.rows.device)
            self.replaced.append((part, [v[at].clone() for v in self.rows.v]))
            segment = Segment(
                self.rows, self.tokens[at], part, self.positions[at], mass=mass,
                mass_from=min(1, last), mass_of=weight.to(mass),
            )  # fmt: skip
            self.runner.forward([segment], NOTHING)
        return mass.cpu()

    def placed_values(self, slots: Tensor) -> list[Tensor]:
        """Return the values [row, head, dim] of ``slots`` in each layer as they were placed."""
        self.rows.settle()
        found = [v[slots.to(v.device)].clone() for v in self.rows.v]
        for part, old in reversed(self.replaced):
            here = torch.isin(slots, part)
            there = torch.isin(part, slots)
            for layer, values in enumerate(old):
                found[layer][here.to(values.device)] = values[there.to(values.device)]
        return found

    def repair(self, chosen: Tensor) -> Tensor:
        """Recompute ``chosen`` and all unready rows in place; return the logits of the question and
        of the reply that was drafted behind it."""
        n = self.tokens.numel()
        draft = self.looks[0].draft if self.looks else self.tokens[:0]
        behind = torch.arange(n, n + draft.numel())
        question = torch.cat([self.unready[-QUESTION:], behind])
        todo = torch.cat([torch.unique(torch.cat([chosen, self.unready])), behind])
        tokens, found = torch.cat([self.tokens, draft]), []
        for slots in torch.split(todo, BLOCK):
            at = slots.to(self.rows.device)
            segment = Segment(self.rows, tokens[at], slots, self._positions(at))
            wanted = torch.isin(slots, question).nonzero()[:, 0].to(at.device)
            found.append(self.runner.forward([segment], wanted))
        self.rows.truncate(n)
        logits = torch.cat(found)
        if n - 1 in self.unready[-1:]:
            self.ends.append(logits[-1 - draft.numel()])
        return logits

    def _run(self, rows: KVRows, slots: Tensor, last: int, mass: Tensor | None) -> None:
        if slots.numel():
            at = slots.to(rows.device)
            segment = Segment(rows, self.tokens[at], slots, self.positions[at], mass=mass)
            self.runner.forward([segment], NOTHING, stop_after=last)

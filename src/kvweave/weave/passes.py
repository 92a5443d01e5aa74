"""Passes over one placed context before its repair: what strategies rank rows by, and the gate.

Every method that needs the model is a job (`Steps`): it yields works and goes on when their logits
are there, so that the loop runs other contexts beside it. What comes down to the host comes down
once a method: a look is one sync, whatever it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.run.base import NO_SLOTS, AddedUp, Backend, Ints, Observer, Rows, Steps, Work
from kvweave.run.upload import up
from kvweave.weave.deps import Dependence
from kvweave.weave.keeping import Keeper
from kvweave.weave.parts import Placement

QUESTION = 16  # rows whose attention tells what a question needs; it stands at the end
SLICE = 64  # rows of a pass that nobody waits for: what a request may have to wait for it
SURE = 0.1  # a reply whose first token is less likely than that is not drafted
ASKS = 0.2  # what a row of the question counts beside its last one, which predicts

Floats = NDArray[np.float64]


class Mass(Observer):
    """Adds up the attention that keys get: ``total`` [slot], each row counting its weight.

    ``squared`` adds its squares: what is wrong with a row reaches a reader in proportion to the
    attention it gets there, the reader's KL grows with the square of what reaches it, and errors of
    different rows, heads and layers do not add up in one direction.

    Layers before ``first_layer`` do not count, nor do rows up to the first whose weight is not 0.
    """

    def __init__(
        self,
        n: int,
        weights: Floats,
        device: torch.device,
        first_layer: int = 0,
        squared: bool = False,
    ) -> None:
        self.squared = squared
        self.sums: AddedUp = AddedUp(weights, first_layer, squared)
        counted = np.flatnonzero(weights)
        self.range = (int(counted[0]), len(weights)) if len(counted) else (0, 0)
        self.first_layer = first_layer
        self._device = device
        self._weights: Tensor | None = None
        self._squares: Tensor | None = None
        self.total = torch.zeros(n, device=device)
        self._now = torch.zeros_like(self.total)

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        """All rows from the first that counts on."""
        return self.range if layer >= self.first_layer else (0, 0)

    def begin(self) -> None:
        """Take back what a pass added that did not end."""
        self._now.zero_()

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Add the weights of all heads."""
        heads, n, n_keys = weights.shape
        if self.squared:
            weights = self._square(weights)
        if self._weights is None:
            self._weights = up(self.sums.weights.astype(np.float32), self._device)
        each = self._weights[first : first + n].to(weights.dtype).repeat(heads)
        self._now[begin : begin + n_keys] += each @ weights.reshape(heads * n, n_keys)

    def _square(self, weights: Tensor) -> Tensor:
        """Return their squares, in one place: new memory for each layer costs more than the products."""
        n = weights.numel()
        if self._squares is None or len(self._squares) < n or self._squares.dtype != weights.dtype:
            self._squares = weights.new_empty(n)
        return torch.mul(weights, weights, out=self._squares[:n].view(weights.shape))

    def add(self, found: Tensor) -> None:
        """Add what a backend added up."""
        n = min(len(found), len(self._now))
        self._now[:n] += found[:n]

    def end(self) -> None:
        """Count what was added."""
        self.total += self._now


@dataclass(frozen=True, slots=True)
class Look:
    """What the question sees: squared attention ``mass`` [slot], ``logits`` [row, vocab] of its rows
    (of the last one, where nobody compares them) and the draft's, and the ``draft`` [token] of the
    reply's first tokens."""

    mass: Floats
    logits: Tensor
    draft: Ints


@dataclass(slots=True)
class Passes:
    """A placed context: ``tokens`` and ``positions`` [slot], ``unready`` slots that have no row yet.

    ``repaired`` [slot] marks rows that an earlier weave recomputed behind what still stands there.
    With ``again`` all unready rows have to be computed by the last pass, whoever computed them
    before.
    """

    backend: Backend
    rows: Rows
    tokens: Ints
    positions: Ints
    unready: Ints
    placed: Sequence[Placement]
    dependence: Dependence
    repaired: NDArray[np.bool_]
    again: bool = False
    lossy: bool = False  # rows of some part went through something lossy
    keeper: Keeper | None = None  # watches the last pass
    compares: bool = False  # a look has to give the logits of all its rows
    looked: Look | None = None
    ahead: Ints = field(default_factory=lambda: NO_SLOTS)  # placed rows that a look recomputes too
    _replaced: list[tuple[Ints, list[Tensor]]] = field(default_factory=list)  # slots, old values

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def question(self) -> Ints:
        """The unready rows that stand last."""
        return self.unready[-QUESTION:]

    @property
    def early(self) -> Ints:
        """Unready rows that a look has computed already, over rows that were not repaired."""
        return NO_SLOTS if self.again or self.looked is None else self.unready[:-QUESTION]

    @property
    def left(self) -> Ints:
        """Unready rows that the last pass has to compute in any case."""
        return self.unready if self.again or self.looked is None else self.question

    def slots(self, spans: Sequence[Placement]) -> Ints:
        """Return the slots of ``spans`` that have rows, increasing; not those freed everywhere."""
        found = [np.arange(p.slot, p.slot + p.ready) for p in spans]
        return np.setdiff1d(np.concatenate(found), self.rows.gone()) if found else NO_SLOTS

    def candidates(self, spans: Sequence[Placement]) -> Ints:
        """Return those of them that a repair may recompute."""
        slots = self.slots(spans)
        return slots[~self.repaired[slots]]

    def work(self, slots: Ints, **options: object) -> Work:
        """Return what recomputes ``slots`` of this context."""
        return Work(self.rows, self.tokens[slots], slots, self.positions[slots], **options)  # type: ignore[arg-type]

    @property
    def _last(self) -> int | None:
        """The last layer that attends, of several: its keys and values are the last that count. None
        where there is but one, whose attention is all there is to see."""
        attends = [i for i, info in enumerate(self.backend.layers) if info.attends]
        return attends[-1] if len(attends) > 1 else None

    @property
    def replays(self) -> bool:
        """Whether a pass over scattered rows goes over all those between them."""
        return replays(self.backend)

    # ---- what strategies ask for

    def attention(self) -> Steps[Floats]:
        """Return the attention mass [slot] that the question pays, over heads and all layers but
        the last. The unready rows are computed over the unrepaired context."""
        seen = self._watch(self.unready, 1.0, 0)
        yield self.work(self.unready, observer=seen, last=self._last)
        return _down(seen.total)

    def look(self, n_draft: int) -> Steps[Look]:
        """Return what the question sees, over the rows as they were placed but those ``ahead``, and
        what the first ``n_draft`` tokens of a reply drafted behind it see; the second call returns
        the same. Nothing is drafted of which the model is not `SURE`, unless looks are compared.

        The first layer does not count: its keys and values are right wherever a row stands. A
        drafted token counts as much as the model is sure of the draft up to it: behind a reply
        whose end nothing marks it looks anywhere. A draft ends before a token that ends the reply.
        """
        if self.looked is not None:
            return self.looked
        n, base = self.n, self.backend
        first = min(1, len(base.layers) - 1)
        todo = union(self.ahead, self.unready)
        seen = [self._watch(todo, ASKS, first, n_draft, squared=True)]
        wanted = np.flatnonzero(
            np.isin(todo, self.question if self.compares else self.unready[-1:])
        )
        logits = [(yield self.work(todo, want=wanted, observer=seen[0]))]
        drafted: list[Tensor] = []
        sure: list[Tensor] = []
        ends = len(self.unready) and int(self.unready[-1]) == n - 1
        room = base.limit - 1 - int(self.positions[-1])
        n_draft = min(n_draft, room) if ends else 0
        if n_draft and not self.compares:  # a wait, for what would count next to nothing
            n_draft *= float(logits[0][-1].float().softmax(-1).max()) >= SURE
        for i in range(n_draft):
            drafted.append(logits[-1][-1:].argmax(-1))
            sure.append(logits[-1][-1].float().softmax(-1).max())
            seen.append(Mass(n + n_draft, np.ones(1), base.device, first, squared=True))
            at = np.array([i + 1])
            draft = Work(
                self.rows, drafted[-1], n - 1 + at, self.positions[-1] + at,
                want=np.zeros(1, np.int64), observer=seen[-1],
            )  # fmt: skip
            logits.append((yield draft))
        self.rows.truncate(n)
        masses = torch.stack([each.total[:n] for each in seen])
        ids = torch.stack(drafted) if drafted else masses.new_zeros(0, 1)
        if sure:
            masses[1:] *= torch.stack(sure).cumprod(0)[:, None]
        come = _down(torch.cat([masses.flatten(), ids.flatten().to(masses.dtype)]))
        tokens = come[masses.numel() :].astype(np.int64)
        kept = next((i for i, t in enumerate(tokens.tolist()) if t in base.ends), len(tokens))
        mass = come[: masses.numel()].reshape(len(seen), n)[: 1 + kept].sum(0)
        self.looked = Look(mass, torch.cat(logits[: 1 + kept]), tokens[:kept])
        return self.looked

    def reads(self, slots: Ints, weights: Floats) -> Steps[Floats]:
        """Return the squared attention [slot] that ``slots`` pay when they are recomputed in place,
        each times its weight, the first and the last layer not counted."""
        self.rows.settle()
        self._replaced.append((slots, self._values(slots)))
        first = min(1, len(self.backend.layers) - 1)
        seen = Mass(self.n, weights, self.backend.device, first, squared=True)
        yield self.work(slots, observer=seen, last=self._last)
        return _down(seen.total)

    def deviation(self, candidates: Ints, layer: int, what: str) -> Steps[Floats]:
        """Return the squared distance of placed rows of one layer from recomputed ones.

        Layers up to ``layer`` are computed for all rows on a copy.
        """
        layer = min(layer, len(self.backend.layers) - 1)
        scratch = self.rows.clone(layers=layer + 1)
        todo = union(candidates, self.unready)
        yield Work(scratch, self.tokens[todo], todo, self.positions[todo], last=layer)
        pairs = zip(
            "kv", scratch.read(layer, candidates), self.rows.read(layer, candidates), strict=True
        )
        return _down(sum(
            ((new - old).float().square().sum((1, 2)) for name, new, old in pairs if name in what),
            torch.zeros(len(candidates), device=self.backend.device),
        ))  # fmt: skip

    def recompute(self, chosen: Ints) -> Steps[Tensor]:
        """Recompute ``chosen`` and the unready rows that are left in place; return the logits of the
        question and of the reply that was drafted behind it."""
        draft = NO_SLOTS if self.looked is None else self.looked.draft
        behind = np.arange(self.n, self.n + len(draft))
        slots = np.concatenate([union(chosen, self.left), behind])
        n = len(slots) - len(draft)
        logits = yield Work(
            self.rows,
            np.concatenate([self.tokens, draft])[slots],
            slots,
            np.concatenate([self.positions, self.positions[-1:] + 1 + np.arange(len(draft))])[
                slots
            ],
            want=np.flatnonzero(np.isin(slots, np.concatenate([self.question, behind]))),
            observer=None if self.keeper is None else self.keeper.observing(n),
        )
        self.rows.truncate(self.n)
        return logits

    def placed_values(self, slots: Ints) -> list[Tensor]:
        """Return the values [row, head, dim] of ``slots`` in each layer as they were placed."""
        self.rows.settle()
        found = self._values(slots)
        for part, old in reversed(self._replaced):
            _, here, there = np.intersect1d(slots, part, return_indices=True)
            to, from_ = up(here, self.backend.device), up(there, self.backend.device)
            for layer, values in enumerate(old):
                found[layer][to] = values[from_]
        return found

    def _values(self, slots: Ints) -> list[Tensor]:
        return [self.rows.read(layer, slots)[1] for layer in range(len(self.backend.layers))]

    def _watch(
        self, slots: Ints, each: float, first_layer: int, room: int = 0, squared: bool = False
    ) -> Mass:
        """Return a mass of which the question's rows among ``slots`` count ``each``, the last 1."""
        weights = np.where(np.isin(slots, self.question), each, 0.0)
        weights[np.isin(slots, self.question[-1:])] = 1.0
        return Mass(self.n + room, weights, self.backend.device, first_layer, squared)


def replays(backend: Backend) -> bool:
    """Tell whether a pass over scattered rows goes over all those between them: a layer keeps a state."""
    mixers = [info.mixer for info in backend.layers]
    return any(mixer is not None and mixer.sums for mixer in mixers)


def union(a: Ints, b: Ints) -> Ints:
    """Return the slots that are in either, increasing."""
    return np.union1d(a, b).astype(np.int64)


def _down(values: Tensor) -> Floats:
    """Return what the device has, on the host: a sync."""
    return values.double().cpu().numpy()

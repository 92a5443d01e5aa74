"""The contract of a repair strategy: look at a placed context, choose rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvweave.weave.parts import Placement


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may look at. Slots and rows are indices into the context's rows.

    ``deviation(layer, what)`` returns, per candidate row, how far the placed "k", "v" or "kv" rows
    of ``layer`` are from rows recomputed in this context (squared L2, float32). ``attention()``
    returns the attention mass the rows not yet computed (the question) pay to each candidate.
    Both cost a pass. ``dependence()`` returns the attention mass each candidate paid to other chunks
    when it was last computed among them (mean over heads and layers), 0 where nothing is recorded.
    ``needs()`` is ``attention()`` without the first layer, whose rows depend on nothing but their
    token, and with a drafted reply; ``reads(slots, weights)`` recomputes rows [slot] in this context and returns what they
    attend to in the same way, each counting its weight.
    """

    placed: Sequence[Placement]  # all parts, front to back
    spans: Sequence[Placement]  # those of them that are placed and not exact
    candidates: Tensor  # [n] int64, their slots, increasing
    budget: int  # rows to choose
    deviation: Callable[[int, str], Tensor]
    attention: Callable[[], Tensor]
    dependence: Callable[[], Tensor]
    needs: Callable[[], Tensor]
    reads: Callable[[Tensor, Tensor], Tensor]
    generator: torch.Generator


class Strategy(Protocol):
    """Chooses rows; does not change anything.

    Optional attributes: ``records`` True has a context record what its rows read of other chunks;
    ``rank`` > 0 has it store and use patches of that rank; ``gated`` True has the gate bound the
    drift, and lets rows be repaired that an earlier weave left approximate; ``lookahead`` is how
    many tokens of the reply are drafted for ``needs()``.
    """

    name: str

    def choose(self, view: View) -> Tensor:
        """Return slots to recompute, a subset of ``view.candidates``, in increasing order."""
        ...


def rank_of(strategy: Strategy) -> int:
    """Return the rank of the patches a strategy stores and uses; 0 for none."""
    return int(getattr(strategy, "rank", 0))


def lookahead_of(strategy: Strategy) -> int:
    """Return how many tokens of the reply a strategy drafts."""
    return int(getattr(strategy, "lookahead", 0))


def best(view: View, scores: Tensor) -> Tensor:
    """Return the slots of the ``budget`` highest ``scores`` [candidate], increasing."""
    top = torch.topk(scores, min(view.budget, scores.numel())).indices
    return view.candidates[top.sort().values]

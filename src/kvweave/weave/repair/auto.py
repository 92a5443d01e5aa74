"""The rows that matter, by what is known: the question, else what chunks read of one another."""

from __future__ import annotations

from torch import Tensor

from kvweave.weave.repair.base import View, best
from kvweave.weave.repair.first_k import FirstK
from kvweave.weave.repair.rollout import LOOKAHEAD, Rollout


class Auto:
    """Rows that the question and a drafted reply need, and those they need (`rollout`); without a
    question those that read most of other chunks when they were made; where that was not recorded,
    the first rows of every chunk.

    The gate (`kvweave.weave.gate`) measures what its repair changed, bounds the drift, and repairs
    more where a bound is asked for.
    """

    name = "auto"
    gated = True

    def __init__(self, lookahead: int = LOOKAHEAD) -> None:
        self._needed = Rollout(lookahead=lookahead)
        self.lookahead = lookahead

    def choose(self, view: View) -> Tensor:
        """Return ``budget`` rows."""
        if bool(view.needs().any()):
            return self._needed.choose(view)
        read = view.dependence()
        return best(view, read) if bool(read.any()) else FirstK().choose(view)

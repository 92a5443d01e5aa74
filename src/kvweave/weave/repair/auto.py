"""The rows that matter, by what is known: the question, else what chunks read of one another."""

from __future__ import annotations

from torch import Tensor

from kvweave.weave.repair.base import View, best
from kvweave.weave.repair.first_k import FirstK


class Auto:
    """Rows the question attends to; without a question those that read most of other chunks when
    they were made; where that was not recorded, the first rows of every chunk.

    The gate (`kvweave.weave.gate`) measures what its repair changed, bounds the drift, and repairs
    more where a bound is asked for.
    """

    name = "auto"
    gated = True

    def choose(self, view: View) -> Tensor:
        """Return ``budget`` rows."""
        for scores in (view.attention, view.dependence):
            found = scores()
            if bool(found.any()):
                return best(view, found)
        return FirstK().choose(view)

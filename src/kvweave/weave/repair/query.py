"""Rows the question looks at."""

from __future__ import annotations

from kvweave.run.base import Ints, Steps
from kvweave.weave.repair.base import Strategy, View, best
from kvweave.weave.repair.first_k import FirstK


class Query(Strategy):
    """Rows the question attends to, over all layers and heads, at their woven positions
    (A3, arXiv 2511.17560; ProphetKV, arXiv 2602.02579). Costs one pass of the question; without a
    question it falls back to the first rows of every chunk."""

    name = "query"
    looks = True

    def choose(self, view: View) -> Steps[Ints]:
        """Return the ``budget`` rows that get most attention."""
        mass = yield from view.attention()
        return best(view, mass) if mass.any() else FirstK().choose(view)

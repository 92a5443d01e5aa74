"""Rows that depended on other chunks."""

from __future__ import annotations

import numpy as np

from kvweave.run.base import Ints
from kvweave.weave.repair.base import Strategy, View, best


class Deps(Strategy):
    """Rows that attended most to other chunks when they were last computed among them (the
    inter-chunk attention of Cache-Craft, arXiv 2502.15734).

    Costs nothing when it chooses, but contexts with this strategy record what their rows read (see
    `kvweave.weave.deps`). Rows nothing is recorded of come last, chunk starts first.
    """

    name = "deps"
    records = True

    def choose(self, view: View) -> Ints:
        """Return the ``budget`` rows that read most of others."""
        mass = view.dependence()
        starts = np.array([p.slot for p in view.spans])
        offsets = view.candidates - starts[np.searchsorted(starts, view.candidates, "right") - 1]
        return best(view, np.where(mass > 0, mass, -offsets))

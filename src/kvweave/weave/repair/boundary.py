"""Rows around the seams."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvweave.run.base import Ints
from kvweave.weave.parts import is_seam
from kvweave.weave.repair.base import Strategy, View, best


class Boundary(Strategy):
    """Rows nearest to a seam: where two parts meet that were not computed one behind the other,
    chunk and chunk or chunk and the text around a template's hole (the deviation near boundaries of
    SemPIC, arXiv 2607.28069; the carve-out of Irminsul, arXiv 2605.05696).

    All seams get equally many rows, on both sides where both are placed; a chunk shorter than its
    share leaves the rest to the others.
    """

    name = "boundary"

    def choose(self, view: View) -> Ints:
        """Return the ``budget`` rows nearest to a seam."""
        n = view.passes.n
        seams = [b.slot for a, b in pairwise(view.placed) if is_seam(a, b)]
        distance = np.full(n, n)
        for p in view.spans:
            rows = np.arange(p.part.n)
            mine = distance[slice(*p.slots)]
            for at, away in zip(p.slots, (rows, rows[::-1]), strict=True):
                if at in seams:
                    np.minimum(mine, away, out=mine)
        return best(view, -distance[view.candidates].astype(np.float64))

"""Rows around the seams."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvweave.weave.parts import is_seam
from kvweave.weave.repair.base import View


class Boundary:
    """Rows nearest to a seam: where two parts meet that were not computed one behind the other,
    chunk and chunk or chunk and the text around a template's hole (the deviation near boundaries of
    SemPIC, arXiv 2607.28069; the carve-out of Irminsul, arXiv 2605.05696).

    All seams get equally many rows, on both sides where both are placed; a chunk shorter than its
    share leaves the rest to the others.
    """

    name = "boundary"

    def choose(self, view: View) -> Tensor:
        """Return the ``budget`` rows nearest to a seam."""
        n = sum(p.part.n for p in view.placed)
        seams = [b.slot for a, b in pairwise(view.placed) if is_seam(a, b)]
        distance = torch.full((n,), n)
        for p in view.spans:
            rows = torch.arange(p.part.n)
            for at, away in ((p.slot, rows), (p.slot + p.part.n, rows.flip(0))):
                if at in seams:
                    mine = distance[p.slot : p.slot + p.part.n]
                    torch.minimum(mine, away, out=mine)
        nearest = torch.argsort(distance[view.candidates], stable=True)  # equal ones: the earlier
        return view.candidates[nearest[: view.budget].sort().values]

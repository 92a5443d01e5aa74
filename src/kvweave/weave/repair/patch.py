"""Whole chunks once, then what they differed by."""

from __future__ import annotations

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints
from kvweave.weave.repair.base import Strategy, View


class PatchRepair(Strategy):
    """A stored difference between in-context and canonical KV, of ``rank`` vectors a layer (Kamera,
    arXiv 2606.23581; deltas per context: KVCOMM, arXiv 2510.12872).

    A chunk that meets these neighbours for the first time is recomputed as a whole, front to back
    while the budget lasts; the difference is stored. When they come back it is added to the
    canonical rows, and no row is recomputed.
    """

    name = "patch"

    def __init__(self, rank: int = 4) -> None:
        if rank < 1:
            raise InvalidArgument("rank", f"{rank} is below 1")
        self.rank = rank

    def choose(self, view: View) -> Ints:
        """Return all rows of the first chunks without a patch, as far as the budget goes."""
        chosen, left = [view.candidates[:0]], view.budget
        for p in view.spans:
            if p.patched:
                continue
            if p.ready > left:  # what stands behind it would not be computed after its right rows
                break
            chosen.append(np.arange(p.slot, p.slot + p.ready))
            left -= p.ready
        return np.concatenate(chosen)

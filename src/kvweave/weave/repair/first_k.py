"""Chunk starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints
from kvweave.weave.repair.base import Strategy, View


class FirstK(Strategy):
    """The first rows of every chunk (EPIC / LegoLink, arXiv 2410.15332, section 4).

    They act as attention sinks when a chunk is computed alone. With ``k`` None the budget is
    shared evenly among the chunks.
    """

    name = "first_k"

    def __init__(self, k: int | None = None) -> None:
        if k is not None and k < 1:
            raise InvalidArgument("k", f"{k} is below 1")
        self.k = k

    def choose(self, view: View) -> Ints:
        """Return the first ``k`` slots of each span."""
        k = self.k if self.k is not None else view.budget // max(1, len(view.spans))
        slots = [np.arange(p.slot, p.slot + min(k, p.ready)) for p in view.spans]
        return np.concatenate([view.candidates[:0], *slots])


def firsts(view: View, n: int) -> NDArray[np.bool_]:
    """Return which ``n`` candidates stand nearest to the start of their chunk, at most: the first row
    of each chunk, front to back, then the second ones; none that was computed among other chunks."""
    depth = view.depth()
    order = np.argsort(depth, kind="stable")[:n]
    chosen = np.zeros(len(depth), bool)
    chosen[order] = depth[order] < np.inf
    return chosen

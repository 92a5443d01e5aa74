"""The learned ranking of pages (CB3), asked of a trace: `kvweave.keep.tokens.signals` has the network."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.keep.tokens.signals import PageSignals, Weights, apply, shipped
from kvweave.probe.ranking import PageRanking, Scores
from kvweave.probe.trace import Bools, PageMass


class Milestone(PageRanking):
    """Pages by how likely they are read within the next steps, as learned from other traces."""

    def __init__(self, n_heads: int, n_pages: int, weights: Weights | None = None) -> None:
        super().__init__(n_heads, n_pages)
        self.weights = shipped() if weights is None else weights
        self.signals = PageSignals()

    def scores(self) -> Scores:
        """Return logits; pages that are not there yet come last."""
        n = self.signals.n
        found = np.full(self.shape, -np.inf)
        if n:
            found[:, :n] = apply(self.weights, self.signals.rows()).numpy()
        return found

    def _see(self, mass: PageMass, access: Bools) -> None:
        self.signals.see(torch.from_numpy(mass).double(), torch.from_numpy(access))

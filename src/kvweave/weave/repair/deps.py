"""Rows that depended on other chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvweave.weave.repair.base import View, best


class Deps:
    """Rows that attended most to other chunks when they were last computed among them (the
    inter-chunk attention of Cache-Craft, arXiv 2502.15734).

    Costs nothing when it chooses, but contexts with this strategy record what their rows read (see
    `kvweave.weave.deps`). Rows nothing is recorded of come last, chunk starts first.
    """

    name = "deps"
    records = True

    def choose(self, view: View) -> Tensor:
        """Return the ``budget`` rows that read most of others."""
        mass = view.dependence()
        starts = torch.tensor([p.slot for p in view.spans])
        part = torch.searchsorted(starts, view.candidates, right=True) - 1
        offsets = view.candidates - starts[part]
        return best(view, torch.where(mass > 0, mass, -offsets.to(mass.dtype)))

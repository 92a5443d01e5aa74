"""The ends of the scale, and chance: no row, every row, any row."""

from __future__ import annotations

import torch
from torch import Tensor

from kvweave.weave.repair.base import View, best


class NoRepair:
    """Reuse the rows as they are."""

    name = "none"

    def choose(self, view: View) -> Tensor:
        """Return no slots."""
        return view.candidates[:0]


class Full:
    """Recompute every row: equals a full prefill. With ``records`` it also records what the rows
    read of other chunks, for `deps`."""

    name = "full"

    def __init__(self, records: bool = False) -> None:
        self.records = records

    def choose(self, view: View) -> Tensor:
        """Return all candidates."""
        return view.candidates


class Random:
    """Uniformly drawn rows: the baseline."""

    name = "random"

    def choose(self, view: View) -> Tensor:
        """Return ``budget`` rows drawn without replacement."""
        scores = torch.rand(view.candidates.numel(), generator=view.generator)
        return best(view, scores.to(view.candidates.device))

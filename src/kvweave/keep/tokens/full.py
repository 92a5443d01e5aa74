"""Every row is worth the same: what is kept are the newest, and all where the budget allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, TokenPolicy


@dataclass(frozen=True, slots=True)
class AllRows(TokenPolicy):
    """Keep all rows: the measure of what the others lose."""

    name: ClassVar[str] = "full"

    def scores(self, view: LayerView) -> Tensor:
        """The same for every row."""
        return torch.zeros(view.shape, device=view.slots.device)

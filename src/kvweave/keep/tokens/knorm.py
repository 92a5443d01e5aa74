"""Key norms (arXiv 2406.11430, section 3): rows with short keys get much attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy


@dataclass(frozen=True, slots=True)
class KNorm(TokenPolicy):
    """Keep the rows with the shortest keys."""

    name: ClassVar[str] = "knorm"
    needs: ClassVar[Need] = Need.KEYS

    def scores(self, view: LayerView) -> Tensor:
        """Minus the length of the key."""
        return view.wide(view.keys).square().sum(-1).sqrt().neg()

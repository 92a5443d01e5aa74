"""TTKV (arXiv 2604.19769): tiers by recency, the newest rows as they are and the others in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.keep.tokens.base import LayerView, TokenPolicy


@dataclass(frozen=True, slots=True)
class TTKV(TokenPolicy):
    """Keep the sinks and the newest rows as they are, and all others as int8, or in the forms that
    are given: ``ttkv:256,int8=1024,k4v2=rest``.

    The paper's slow tier is in the host's memory and is streamed in blocks; here it stays where
    attention is computed, since a row is read for every token.
    """

    name: ClassVar[str] = "ttkv"
    more: ClassVar[Mapping[str, str]] = {"int8": "rest"}

    def scores(self, view: LayerView) -> Tensor:
        """The later a row stands, the more."""
        return view.positions.double()

"""StreamingLLM (arXiv 2309.17453, section 3): the first rows and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.keep.tokens.base import LayerView, TokenPolicy


@dataclass(frozen=True, slots=True)
class Streaming(TokenPolicy):
    """Keep the sinks in front and then the newest rows, which close up: their positions are those
    within what is kept (section 3.2)."""

    name: ClassVar[str] = "streaming"
    moves: ClassVar[bool] = True

    def scores(self, view: LayerView) -> Tensor:
        """The later a row stands, the more."""
        return view.positions.double()

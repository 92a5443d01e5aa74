"""H2O (arXiv 2306.14048, section 4): rows that got much attention up to now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.sums import AttentionSums
from kvweave.run.base import LayerInfo


@dataclass(frozen=True, slots=True)
class H2O(TokenPolicy):
    """Keep the rows with the most attention, added up over all rows that were computed.

    The sum favours old rows, which more have seen; ``age`` divides it by how many could (NVIDIA's
    kvpress calls that observed attention). The paper keeps half of a budget for the newest rows: that
    is ``window`` here.
    """

    name: ClassVar[str] = "h2o"
    needs: ClassVar[Need] = Need.ATTENTION

    age: bool = False

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Add up attention."""
        return TokenWatch(AttentionSums(infos, ages=self.age), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Attention summed over rows, or its mean with ``age``; mean over the group."""
        sums = view.tally(AttentionSums)
        total = view.of(sums.total[view.layer].written)
        if self.age:
            total = total / view.of(sums.seen_by[view.layer].written).clamp(min=1)
        return total

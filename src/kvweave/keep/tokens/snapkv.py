"""SnapKV (arXiv 2404.14469, section 4): rows that the latest queries look at, and their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.sums import AttentionSums
from kvweave.run.base import LayerInfo


@dataclass(frozen=True, slots=True)
class SnapKV(TokenPolicy):
    """Keep the rows that got the most attention from the newest ``window`` rows before the choice,
    smoothed over ``pool`` rows. While decoding the same: those since the last choice, ``window`` at
    most."""

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[Need] = Need.ATTENTION
    some: ClassVar[tuple[str, ...]] = ("pool",)

    sinks: int = 0
    window: int = 64
    pool: int = 5

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Add up the attention of the newest rows."""
        return TokenWatch(AttentionSums(infos, self.window), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Mean attention over the window and the group, averaged with neighbours; 0 in the window,
        which stays, and beyond the ends."""
        sums = view.tally(AttentionSums)
        mean = view.of(sums.total[view.layer].written) / max(1, sums.n_rows[view.layer])
        mean = mean.masked_fill(view.newest(self.window), 0)
        pooled = F.avg_pool1d(mean[:, None], self.pool, 1, self.pool // 2)[:, 0]
        return pooled[:, : view.shape[1]]

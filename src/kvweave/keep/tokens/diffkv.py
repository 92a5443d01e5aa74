"""DiffKV (arXiv 2412.03131, sections 3 and 4): each head's rows in more bits, in fewer, or not at all."""

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
class DiffKV(TokenPolicy):
    """Divide rows by the attention they got, its mean over the rows that could see them.

    Of ``n`` rows, those with less than ``prune / n`` go, those with less than ``quant / n`` rest as
    k4v2, the others as k8v4, the newest ``window`` and the sinks as they are. So each head takes what it needs; a
    budget bounds how many rows there are in all. The defaults are those the authors use for Llama 3
    8B; they move one row a step, here rows are divided at each choice.
    """

    name: ClassVar[str] = "diffkv"
    needs: ClassVar[Need] = Need.ATTENTION
    splits: ClassVar[tuple[str, ...]] = ("k8v4", "k4v2")

    window: int = 64
    prune: float = 0.02
    quant: float = 1.0

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Add up attention."""
        return TokenWatch(AttentionSums(infos, ages=True, loudest=True), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Attention of the loudest head of the group, its mean over the rows that could see it."""
        sums = view.tally(AttentionSums)
        total = view.of(sums.total[view.layer].written)
        return total / view.of(sums.seen_by[view.layer].written).clamp(min=1)

    def levels(self, view: LayerView, scores: Tensor, n: int) -> Tensor:
        """2 below ``quant / n``, 3 below ``prune / n``, else 1. Rows that nobody could see yet, as
        those of reused chunks, rest as k8v4."""
        seen = view.of(view.tally(AttentionSums).seen_by[view.layer].written) > 0
        low, gone = (scores < self.quant / n) & seen, (scores < self.prune / n) & seen
        return 1 + low.long() + gone.long()

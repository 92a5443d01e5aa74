"""TOVA (arXiv 2401.06104, section 4): rows that the newest one looks at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.watch import BySlot, Tally
from kvweave.run.base import Ints, LayerInfo


class LastRow(Tally):
    """Attention that the last row paid: ``paid[layer]`` is [1, slot], the mean over all heads."""

    sees = True
    recent = 1

    def __init__(self, infos: Sequence[LayerInfo]) -> None:
        self.paid = [BySlot() for _ in infos]

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Take the last row."""
        return begin, weights[:, :, -1].mean((0, 1))[None]

    def add(self, layer: int, found: object) -> None:
        """Put it in the place of the one before."""
        assert isinstance(found, tuple)
        begin, paid = found
        self.paid[layer].clear()
        self.paid[layer].upto(begin + paid.shape[-1], paid)[:, begin:] = paid

    def compact(self, kept: Ints) -> None:
        """Renumber the slots."""
        for each in self.paid:
            each.compact(kept)

    def held(self) -> Iterable[Tensor | None]:
        """What the last row paid."""
        return (each.room for each in self.paid)

    def bytes_for(self, n: int, n_rows: int) -> int:
        """A number a slot."""
        return len(self.paid) * BySlot.bytes_for(n)


@dataclass(frozen=True, slots=True)
class TOVA(TokenPolicy):
    """Keep the rows that the newest row attends to, the same ones in all heads of a layer."""

    name: ClassVar[str] = "tova"
    needs: ClassVar[Need] = Need.ATTENTION

    sinks: int = 0
    window: int = 1

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Remember the last row's attention."""
        return TokenWatch(LastRow(infos), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Attention of the last row, mean over all heads."""
        return view.of(view.tally(LastRow).paid[view.layer].written)

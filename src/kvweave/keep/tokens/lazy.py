"""LazyEviction (arXiv 2506.15969, section 4): a row may come back after it was not looked at for long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.watch import BySlot, Tally, heads_of
from kvweave.run.base import Ints, LayerInfo

NEVER = 1e-5  # steps; in the place of the largest gap of a row that was looked at once


class Recurrence(Tally):
    """When slots were looked at: by some head of the group, with a weight of ``alpha`` at least.

    Each row that is shown is a step, numbered from 1 in ``step[layer]``. ``last[layer]`` is the
    latest step that looked at a slot, one before its own to begin with, and ``gap[layer]`` the most
    steps from one look to the next; both [kv_head, slot].
    """

    sees = packs = True

    def __init__(self, infos: Sequence[LayerInfo], alpha: float) -> None:
        self.alpha = alpha
        self.step = [0] * len(infos)
        self.last = [BySlot() for _ in infos]
        self.gap = [BySlot() for _ in infos]
        self._heads = heads_of(infos)

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Find the first and the last look of these rows at each slot, counted from 1, 0: none; and
        the most rows between two."""
        n = weights.shape[2]
        looks = weights.amax(1) >= self.alpha  # [kv_head, row, key]
        if n == 1:  # decoding: a cummax of one row takes as long as all the rest
            return begin, looks[:, 0].to(weights.dtype)
        number = torch.arange(1, n + 1, dtype=weights.dtype, device=weights.device)[:, None]
        latest = torch.where(looks, number, 0).cummax(1).values  # up to and with each row
        first = torch.where(looks, number, n + 1).amin(1)
        before = latest[:, :-1]
        between = torch.where(looks[:, 1:] & (before > 0), number[1:] - before, 0)
        gap = between.amax(1) if n > 1 else torch.zeros_like(first)
        return begin, n, first.masked_fill(first > n, 0), latest[:, -1], gap

    def of_kept(self, layer: int, stop: int, weights: Tensor, slots: Tensor) -> object:
        """The same; of one row looks alone are put where they belong."""
        n = weights.shape[2]
        if n > 1 or self.alpha <= 0:  # padding has no weight
            every = weights.new_zeros(*weights.shape[:3], stop)
            every.scatter_add_(3, slots[:, None, None].expand_as(weights), weights)
            return self.of_attention(layer, 0, every)
        looks = (weights[:, :, 0].amax(1) >= self.alpha).to(weights.dtype)
        return 0, looks.new_zeros(len(looks), stop).scatter_add_(1, slots, looks)

    def add(self, layer: int, found: object) -> None:
        """Go on from the steps before."""
        assert isinstance(found, tuple)
        if len(found) == 2:
            self._add_one(layer, *found)
            return
        begin, n, first, latest, gap = found
        stop, step = begin + first.shape[-1], self.step[layer]
        last, most = self.last[layer].upto(stop, first), self.gap[layer].upto(stop, first)
        last[:, stop - n :] = torch.arange(step, step + n, dtype=first.dtype, device=first.device)
        last, most = last[:, begin:], most[:, begin:]
        looked = first > 0
        since = torch.where(looked, first + step - last, 0)
        torch.maximum(most, torch.maximum(since, gap), out=most)
        last.copy_(torch.where(looked, latest + step, last))
        self.step[layer] += n

    def _add_one(self, layer: int, begin: int, looked: Tensor) -> None:
        """The same of one row: ``looked`` [kv_head, slot], from ``begin`` on, is 1 where it looked."""
        stop, step = begin + looked.shape[-1], self.step[layer]
        last, most = self.last[layer].upto(stop, looked), self.gap[layer].upto(stop, looked)
        last[:, stop - 1] = step
        last, most = last[:, begin:], most[:, begin:]
        since = torch.rsub(last, step + 1).mul_(looked)
        torch.maximum(most, since, out=most)
        last += since
        self.step[layer] += 1

    def compact(self, kept: Ints) -> None:
        """Renumber the slots."""
        for each in (*self.last, *self.gap):
            each.compact(kept)

    def held(self) -> Iterable[Tensor | None]:
        """Steps and gaps."""
        return (each.room for each in (*self.last, *self.gap))

    def bytes_for(self, n: int, n_rows: int) -> int:
        """Both by slot."""
        return 2 * self._heads * BySlot.bytes_for(n)


@dataclass(frozen=True, slots=True)
class Lazy(TokenPolicy):
    """Let a row go only when it was not looked at for longer than it ever was before.

    ``stamps`` goes by the latest look alone, as RaaS does (arXiv 2502.11147), where the prompt has
    to be pinned besides.
    """

    name: ClassVar[str] = "lazy"
    needs: ClassVar[Need] = Need.ATTENTION

    sinks: int = 0
    window: int = 128
    alpha: float = 1e-4
    stamps: bool = False

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Remember when rows were looked at."""
        return TokenWatch(Recurrence(infos, self.alpha), infos)

    def scores(self, view: LayerView) -> Tensor:
        """2 s(-1 - since / gap) + 2 s(1 - gap), s the logistic function: how soon a look is due,
        and how often it was; the second is 0 for rows that were looked at once. Or the stamps."""
        looks = view.tally(Recurrence)
        last = view.of(looks.last[view.layer].written)
        if self.stamps:
            return last
        gap = view.of(looks.gap[view.layer].written)
        since = looks.step[view.layer] - last
        often = torch.where(gap > 0, (1 - gap).sigmoid(), 0)
        return 2 * (-1 - since / (gap + NEVER)).sigmoid() + 2 * often

"""Sums of the attention that rows get, for the policies that go by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from kvweave.keep.tokens.watch import BySlot, Tally, heads_of
from kvweave.run.base import Ints, LayerInfo


class AttentionSums(Tally):
    """Attention that slots got, added over rows, its mean over the heads of a group, or with
    ``loudest`` that of the one that attends most.

    ``total[layer]`` is [kv_head, slot]. ``seen_by[layer]`` [1, slot] counts the rows that could see
    a slot, with ``ages``, and ``n_rows[layer]`` all that were shown. With ``recent`` they begin anew
    at a choice.
    """

    sees = True

    def __init__(
        self,
        infos: Sequence[LayerInfo],
        recent: int | None = None,
        ages: bool = False,
        loudest: bool = False,
    ) -> None:
        self.recent, self.ages, self.loudest = recent, ages, loudest
        self.total = [BySlot() for _ in infos]
        self.seen_by = [BySlot() for _ in infos]
        self.n_rows = [0] * len(infos)
        self._heads = heads_of(infos) + ages * len(infos)

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Add up the rows. A row could see what it gave any weight: whatever masks there are."""
        total = weights.amax(1).sum(1) if self.loudest else weights.sum(2).mean(1)
        seen_by = None
        if self.ages:
            seen_by = (weights.amax((0, 1)) > 0).sum(0, keepdim=True).to(total.dtype)
        return begin, weights.shape[2], total, seen_by

    def add(self, layer: int, found: object) -> None:
        """Add the sums of a pass."""
        assert isinstance(found, tuple)
        begin, n, total, seen_by = found
        stop = begin + total.shape[-1]
        self.total[layer].upto(stop, total)[:, begin:].add_(total)
        if seen_by is not None:
            self.seen_by[layer].upto(stop, seen_by)[:, begin:].add_(seen_by)
        self.n_rows[layer] += n

    def chosen(self) -> None:
        """Begin anew where only recent rows count."""
        if self.recent is not None:
            for each in (*self.total, *self.seen_by):
                each.clear()
            self.n_rows = [0] * len(self.n_rows)

    def compact(self, kept: Ints) -> None:
        """Renumber the slots."""
        for each in (*self.total, *self.seen_by):
            each.compact(kept)

    def held(self) -> Iterable[Tensor | None]:
        """The sums."""
        return (each.room for each in (*self.total, *self.seen_by))

    def bytes_for(self, n: int, n_rows: int) -> int:
        """Both by slot."""
        return self._heads * BySlot.bytes_for(n)

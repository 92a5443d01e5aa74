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

    sees = packs = True

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
        total, seen_by = self._summed(weights), None
        if self.ages:
            seen_by = (weights.amax((0, 1)) > 0).sum(0, keepdim=True).to(total.dtype)
        return begin, begin + total.shape[-1], weights.shape[2], total, None, seen_by

    def of_kept(self, layer: int, stop: int, weights: Tensor, slots: Tensor) -> object:
        """The same, and where its sums are to be added."""
        n, seen_by, most = weights.shape[2], None, None
        if self.ages:
            most = weights.amax(1)
            sees = most.sign().transpose(0, 1).reshape(n, -1)  # [row, kept of any head]
            every = sees.new_zeros(n, stop)
            every.scatter_add_(1, slots.reshape(1, -1).expand(n, -1), sees).sign_()
            seen_by = every if n == 1 else every.sum(0, keepdim=True)
        total = most.sum(1) if self.loudest and most is not None else self._summed(weights)
        return 0, stop, n, total, slots, seen_by

    def _summed(self, weights: Tensor) -> Tensor:
        """Return weights [kv_head, group, row, key] added up over rows, [kv_head, key]."""
        if weights.shape[2] == 1:
            one = weights[:, :, 0]
            return one.amax(1) if self.loudest else one.mean(1)
        return weights.amax(1).sum(1) if self.loudest else weights.sum(2).mean(1)

    def add(self, layer: int, found: object) -> None:
        """Add the sums of a pass."""
        assert isinstance(found, tuple)
        begin, stop, n, total, slots, seen_by = found
        mine = self.total[layer].upto(stop, total)
        if slots is None:
            mine[:, begin:].add_(total)
        else:
            mine.scatter_add_(1, slots, total)
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

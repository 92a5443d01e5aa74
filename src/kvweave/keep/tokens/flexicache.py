"""FlexiCache (arXiv 2511.00868): heads that look at the same pages again and again keep those only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.queries import Latest
from kvweave.run.base import LayerInfo


@dataclass(frozen=True, slots=True)
class FlexiCache(TokenPolicy):
    """Keep of each stable head the pages that the newest ``recent`` queries may look at most; the
    others rest below memory, and pages are ranked anew at each choice. Unstable heads keep all, as far as
    the others of their layer can spare it: these keep half of what the budget says. With ``beyond`` they do
    so whatever the budget, as the authors have it.

    A page of ``page`` rows is worth the most that a query can give any key between its least and
    its largest in each dim (Quest, arXiv 2406.10774, section 3.2), the mean over queries. A head is stable
    where the earlier and the later half of the queries have that much ``overlap`` in the pages of
    the budget; the authors find the stable heads of a model beforehand.
    """

    name: ClassVar[str] = "flexicache"
    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES
    more: ClassVar[Mapping[str, str]] = {"below": "rest"}

    page: int = 16
    recent: int = 32
    overlap: float = 0.7
    top: float = 0.3  # of the pages, between which overlap is counted
    beyond: bool = False

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Keep the newest queries."""
        return TokenWatch(Latest(infos, self.recent), infos)

    @property
    def exceeds(self) -> bool:
        """With ``beyond``."""
        return self.beyond

    def scores(self, view: LayerView) -> Tensor:
        """Each row the worth of its page."""
        return self.judged(view)[0]

    def judged(self, view: LayerView) -> tuple[Tensor, Tensor | None]:
        """The same, and heads in which the earlier and the later queries do not have the same pages in
        front: pages are found once."""
        numbers, by_query = self._pages(view)
        if by_query is None:
            return torch.zeros(view.shape, device=view.slots.device), None
        if view.shared:  # heads that have the same rows have the same pages
            numbers, by_query = numbers[:1], by_query.mean(0, keepdim=True)
        return by_query.mean(1).gather(1, numbers), ~self._stable(by_query)

    def _pages(self, view: LayerView) -> tuple[Tensor, Tensor | None]:
        """Return [kv_head, row] the number of each row's page, and [kv_head, query, page] what these
        are worth to each query; None before the first."""
        queries = view.tally(Latest).queries[view.layer]
        numbers = (view.positions // max(1, self.page)).masked_fill(~view.there, 0)
        if queries is None or not len(queries):
            return numbers, None
        _, numbers = torch.unique(numbers, return_inverse=True)
        assert view.keys is not None
        low, high, empty = _ends(view.keys, numbers, view.there)
        by_query = self._reach(view, queries.to(low.dtype), low, high)
        return numbers, by_query.masked_fill(empty[:, None], -torch.inf)

    def _reach(self, view: LayerView, queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return [kv_head, query, page] the most that any key of a page can get, the mean over the group."""
        last = view.positions.masked_fill(~view.there, 0).max()
        positions = (last - torch.arange(len(queries) - 1, -1, -1, device=last.device)).clamp(min=0)
        rotation = view.info.rotation
        turned = rotation.apply(queries, rotation.angles(positions))
        grouped = turned.view(len(queries), len(low), -1, turned.shape[-1]).permute(1, 2, 0, 3)
        up, down = grouped.clamp(min=0), grouped.clamp(max=0)
        reach = up @ high[:, None].transpose(2, 3) + down @ low[:, None].transpose(2, 3)
        return reach.mean(1)

    def _stable(self, by_query: Tensor) -> Tensor:
        """Tell [kv_head] where both halves of the queries have the same pages in front."""
        heads, n, n_pages = by_query.shape
        top = max(1, int(self.top * n_pages))
        if n < 2 or top >= n_pages:
            return by_query.new_ones(heads, dtype=torch.bool)
        halves = by_query[:, : n // 2].mean(1), by_query[:, n // 2 :].mean(1)
        in_front = [torch.zeros_like(h).scatter_(1, h.topk(top, 1).indices, 1.0) for h in halves]
        return (in_front[0] * in_front[1]).sum(1) >= self.overlap * top


def _ends(keys: Tensor, numbers: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the least and the largest of ``keys`` [head, row, dim] of each page [head, page, dim], in float32
    at least, and [head, page] which are empty. ``numbers`` [head, row]: the page of a row, not falling."""
    heads, n = numbers.shape
    every = torch.arange(n, device=numbers.device)
    begins = torch.ones_like(there)
    begins[:, 1:] = numbers[:, 1:] > numbers[:, :-1]
    begins |= ~there  # padding is behind a head's rows, and of any page
    nth = every - torch.where(begins, every, 0).cummax(1).values  # of its page
    n_pages, size = int(numbers.max()) + 1, int(nth.max()) + 1
    # where each page's rows are: a place that has none shows another row of the page
    at = torch.where(there, numbers * size + nth, n_pages * size)
    rows = numbers.new_full((heads, n_pages * size + 1), -1).scatter_(1, at, every.expand(heads, n))
    rows = rows[:, :-1].view(heads, n_pages, size)
    some = rows.amax(2, keepdim=True)
    empty = some[..., 0] < 0
    rows = torch.where(rows < 0, some.clamp(min=0), rows).view(heads, -1)
    ends = []
    for own, where in zip(keys, rows, strict=True):
        page = own.index_select(0, where).view(n_pages, size, -1)
        ends.append((page.amin(1), page.amax(1)))
    low, high = (torch.stack(each) for each in zip(*ends, strict=True))
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    low, high = (end.to(wide).masked_fill(empty[..., None], 0) for end in (low, high))
    return low, high, empty

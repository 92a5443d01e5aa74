"""Expected attention (arXiv 2510.00636, section 3): what queries to come are likely to look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.watch import WIDTH, Tally, key_shape
from kvweave.run.base import LayerInfo


class Moments(Tally):
    """Mean [head, dim] and covariance [head, dim, dim] of unrotated queries, of each layer.

    Those of the first ``skipped`` slots are unlike all others and do not count. Pieces are joined
    as by Chan, Golub and LeVeque (1983), so that no two large sums are subtracted.
    """

    asks = True

    def __init__(self, infos: Sequence[LayerInfo], skipped: int, spread: bool) -> None:
        self.skipped, self.spread = skipped, spread
        self.n = [0] * len(infos)
        dims = ((info.n_queries, key_shape(info)[1]) for info in infos)
        self._room = sum(heads * dim * (1 + dim * spread) for heads, dim in dims)
        self.mean: list[Tensor | None] = [None] * len(infos)
        self._about: list[Tensor | None] = [None] * len(infos)  # squares about the mean, added

    def of_queries(self, layer: int, slot: int, queries: Tensor) -> object:
        """Find how many count, their mean, and their squares about it; None: of one there are none."""
        queries = queries[max(0, self.skipped - slot) :]
        if not len(queries):
            return None
        queries = queries if queries.dtype == torch.float64 else queries.float()
        mean = queries.mean(0)
        if not self.spread or len(queries) == 1:
            return len(queries), mean, None
        about = (queries - mean).transpose(0, 1)  # [head, row, dim]
        return len(queries), mean, about.transpose(1, 2) @ about

    def add(self, layer: int, found: object) -> None:
        """Join two means and the squares about them."""
        assert isinstance(found, tuple)
        n, mean, about = found
        before, old, squares = self.n[layer], self.mean[layer], self._about[layer]
        self.n[layer] += n
        if self.spread and squares is None:
            squares = self._about[layer] = mean.new_zeros(*mean.shape, mean.shape[-1])
        if squares is not None and about is not None:
            squares.add_(about)
        if old is None:
            self.mean[layer] = mean
            return
        apart = mean - old
        self.mean[layer] = old + apart * (n / (before + n))
        if squares is not None:
            between = apart[:, :, None] * apart[:, None]
            squares.add_(between.mul_(before * n / (before + n)))

    def held(self) -> Iterable[Tensor | None]:
        """Means and squares."""
        return (*self.mean, *self._about)

    def bytes_for(self, n: int, n_rows: int) -> int:
        """The same whatever the rows."""
        return WIDTH * self._room

    def covariance(self, layer: int) -> Tensor | None:
        """Return [head, dim, dim], divided by the number of queries."""
        about = self._about[layer]
        return None if about is None else about / self.n[layer]


@dataclass(frozen=True, slots=True)
class ExpectedAttention(TokenPolicy):
    """Keep the rows that a normal distribution of queries, as they were up to now, would attend to
    at the next ``ahead`` positions; ``covariance`` takes their spread into account, ``values`` the
    length of what they would read.

    Queries are scaled by the root of their dims, whatever the model does.
    """

    name: ClassVar[str] = "expected_attention"
    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES

    window: int = 0
    ahead: int = 512
    covariance: bool = True
    values: bool = True

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Add up queries."""
        return TokenWatch(Moments(infos, self.sinks, self.covariance), infos)

    def scores(self, view: LayerView) -> Tensor:
        """softmax(k m + k C k / 2), m and C of queries turned to what is ahead and over the root of
        dim and dim; mean over the group, times the length of the value. 0 for the sinks."""
        queries = view.tally(Moments)
        mean, spread = queries.mean[view.layer], queries.covariance(view.layer)
        keys = view.wide(view.keys)
        heads, n, dim = keys.shape
        if mean is None:
            return keys.new_zeros(heads, n)
        turned = self._turned(view, mean).view(heads, -1, dim)
        scores = turned @ keys.transpose(1, 2) / math.sqrt(dim)  # [kv_head, group, row]
        if spread is not None:
            for _ in range(2):  # R C R^T: one side, then the other
                spread = self._turned(view, spread).transpose(1, 2)
            seen = keys[:, None] @ spread.view(heads, -1, dim, dim)
            scores = scores + (seen * keys[:, None]).sum(-1) / (2 * dim)
        out = ~view.there | view.front(self.sinks)
        scores = scores.masked_fill(out[:, None], float("-inf")).softmax(-1).mean(1).nan_to_num(0)
        return scores * view.wide(view.values).norm(dim=-1) if self.values else scores

    def _turned(self, view: LayerView, rows: Tensor) -> Tensor:
        """Return ``rows`` [head, dim] or [head, any, dim] turned to what is ahead, on average."""
        mean = view.ahead(torch.arange(1, self.ahead + 1, device=rows.device))
        folded = rows.reshape(1, -1, rows.shape[-1])
        return view.info.rotation.apply(folded, mean).view(rows.shape)

"""TriAttention (arXiv 2604.04921, section 4): what queries to come look at, by frequencies.

Queries before rotation lie about a centre in each pair of dims that turns together. Where they do,
the score is a sum of cosines of the distance; where they do not, only lengths count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.watch import WIDTH, Tally, key_shape
from kvweave.run.base import LayerInfo
from kvweave.run.rotary import Rotation


class Centres(Tally):
    """Sums of unrotated queries [head, dim] and of the lengths of their pairs [head, pair], of each
    layer: E[q], E|q| and so R = |E[q]| / E|q|, from the rows computed up to now."""

    asks = True

    def __init__(self, infos: Sequence[LayerInfo]) -> None:
        self._rotations = [info.rotation for info in infos]
        # pairs, and dims that do not turn: no more than the dims
        self._room = sum(2 * info.n_queries * key_shape(info)[1] for info in infos)
        self._sums: list[tuple[int, Tensor, Tensor] | None] = [None] * len(infos)

    def of_queries(self, layer: int, slot: int, queries: Tensor) -> object:
        """Add up the rows."""
        queries = queries if queries.dtype == torch.float64 else queries.float()
        return len(queries), queries.sum(0), lengths(queries, self._rotations[layer]).sum(0)

    def add(self, layer: int, found: object) -> None:
        """Add the sums of a pass."""
        assert isinstance(found, tuple)
        n, whole, pairs = found
        old = self._sums[layer]
        if old is not None:
            n, whole, pairs = n + old[0], whole + old[1], pairs + old[2]
        self._sums[layer] = n, whole, pairs

    def held(self) -> Iterable[Tensor | None]:
        """Both sums."""
        return (each for sums in self._sums if sums is not None for each in sums[1:])

    def bytes_for(self, n: int, n_rows: int) -> int:
        """The same whatever the rows."""
        return WIDTH * self._room

    def means(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return E[q] [head, dim] and E|q| [head, pair]; None before the first row."""
        sums = self._sums[layer]
        return None if sums is None else (sums[1] / sums[0], sums[2] / sums[0])


@dataclass(frozen=True, slots=True)
class TriAttention(TokenPolicy):
    """Keep the rows that the mean query would look at 1, 2, 4 .. ``ahead`` positions from here, and
    those with long keys where queries vary: over dims, E[q] k cos(..) + (1 - R) E|q| |k|.

    A key unrotated and turned by a distance is a rotated key against a query turned to a place, so
    the rows are scored as attention reads them. ``normal`` takes scores relative to the mean and
    deviation of each head before the largest of the group counts.
    """

    name: ClassVar[str] = "triattention"
    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES

    ahead: int = 65536
    normal: bool = True

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Add up queries."""
        return TokenWatch(Centres(infos), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Both sums for each head, the largest of the group."""
        means, keys = view.tally(Centres).means(view.layer), view.wide(view.keys)
        heads, n, dim = keys.shape
        if means is None:
            return keys.new_zeros(heads, n)
        mean, length = means
        rotation = view.info.rotation
        far = self.ahead.bit_length()
        # the reference counts offsets from the row to come, which stands 1 behind the last
        steps = 1 + 2 ** torch.arange(far, device=keys.device)
        turned = rotation.apply(mean[None], view.ahead(steps)).view(heads, -1, dim)
        varies = (length - lengths(mean, rotation)).view(heads, turned.shape[1], -1)
        scores = turned @ keys.transpose(1, 2) + varies @ lengths(keys, rotation).transpose(1, 2)
        if self.normal:
            scores = _normal(scores, view.there[:, None])
        return scores.amax(1)


def _normal(scores: Tensor, there: Tensor) -> Tensor:
    """Subtract the mean over rows and divide by the deviation."""
    n = there.sum(-1, keepdim=True).clamp(min=1)
    scores = scores - scores.masked_fill(~there, 0).sum(-1, keepdim=True) / n
    variance = scores.masked_fill(~there, 0).square().sum(-1, keepdim=True) / n
    return scores / variance.sqrt().clamp(min=1e-6)


def lengths(x: Tensor, rotation: Rotation) -> Tensor:
    """Return the lengths [.., pair] of the pairs of dims of ``x`` [.., dim] that turn together, then
    of the dims that do not turn."""
    turning, still = x[..., : rotation.width], x[..., rotation.width :]
    one, other = turning.chunk(2, -1)
    if rotation.interleaved:
        one, other = turning[..., ::2], turning[..., 1::2]
    return torch.cat([torch.hypot(one, other), still.abs()], -1)

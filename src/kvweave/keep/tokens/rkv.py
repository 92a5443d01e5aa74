"""R-KV (arXiv 2505.24133, section 3): rows that matter to the latest queries and say what no other
row says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.keep.tokens.alike import GONE, NONE, ROW_BYTES, Likeness, marked, newest_like, others
from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.queries import Latest
from kvweave.run.base import LayerInfo


@dataclass(frozen=True, slots=True)
class RKV(TokenPolicy):
    """Keep rows by ``mix`` times what the newest ``window`` queries attend to, the most among
    ``pool`` neighbours, less 1 - ``mix`` times how much a row is like the others.

    Of rows whose keys have a cosine above ``alike`` the newest counts as none of them. The queries
    are taken for those of the newest rows that are there.
    """

    name: ClassVar[str] = "rkv"
    needs: ClassVar[Need] = Need.KEYS | Need.QUERIES
    some: ClassVar[tuple[str, ...]] = ("pool",)

    sinks: int = 0
    window: int = 8
    mix: float = 0.07
    pool: int = 7
    alike: float = 0.5

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Remember the latest queries."""
        return TokenWatch(Latest(infos, self.window, ROW_BYTES), infos)

    def scores(self, view: LayerView) -> Tensor:
        """Importance less redundancy, both of which sum to about 1 over rows."""
        keys = view.wide(view.keys)
        return self.mix * self._importance(view, keys) - (1 - self.mix) * self._redundancy(
            view, keys
        )

    def _redundancy(self, view: LayerView, keys: Tensor) -> Tensor:
        """Return [kv_head, row]: softmax over rows of the mean cosine of others with each one."""
        latest, there = view.tally(Latest), view.there
        known = latest.known[view.layer]
        assert view.keys is not None
        marks = marked(view.keys)
        found = None if known is None else known.found(view.slots, there, marks)
        units = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        newest = newest_like(units, there, self.alike, found)
        slots = view.slots.gather(1, newest.clamp(min=0)).masked_fill(newest < 0, NONE)
        here = view.slots.masked_fill(~there, GONE)
        latest.known[view.layer] = Likeness(here.int(), marks, slots.int())
        mean = others(units, there, newest).masked_fill(~there, float("-inf"))
        return mean.softmax(-1).nan_to_num(0)

    def _importance(self, view: LayerView, keys: Tensor) -> Tensor:
        """Return [kv_head, row]: softmax over the rows before the window, of the largest score of
        the group; mean over queries, largest of neighbours."""
        heads, n, dim = keys.shape
        queries = view.tally(Latest).queries[view.layer]
        if queries is None or not len(queries) or n == 0:
            return keys.new_zeros(heads, n)
        m = min(len(queries), n)
        where = view.positions[0].masked_fill(~view.there[0], -1).topk(m).values.flip(0)
        rotation = view.info.rotation
        turned = rotation.apply(queries[len(queries) - m :].to(keys.dtype), rotation.angles(where))
        each = turned.view(m, heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (each @ keys.transpose(1, 2)).view(heads, -1, m, n).amax(1) / math.sqrt(dim)
        out = ~view.there | view.newest(self.window)
        weights = scores.masked_fill(out[:, None], float("-inf")).softmax(-1).mean(1).nan_to_num(0)
        return F.max_pool1d(weights[:, None], self.pool, 1, self.pool // 2)[:, 0, :n]

"""Attention of packed segments over the rows of their contexts, masked by position.

One model pass carries one packed sequence [1, total]: a segment per context, each with its own
rows. The mask is exact: a query sees ``key_position <= query_position`` (within the window of a
sliding layer), wherever the rows come from. A causal mask aligned to the bottom right, which fits
only a contiguous suffix, would let a repaired row see its own future.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.run.rotary import Angles, Rotation
from kvweave.run.rows import KVRows
from kvweave.store.kv import KV


class StopPass(Exception):
    """Ends a pass early; the layers after the one asked for are not needed."""


@dataclass(slots=True)
class Segment:
    """The tokens of one context in this pass, sorted by position."""

    rows: KVRows
    tokens: Tensor  # [token] int64
    slots: Tensor  # [token] int64 on CPU, strictly increasing
    positions: Tensor  # [token] int64
    raw: KV | None = None  # unrotated keys and values of these tokens are written here if given
    raw_at: int = 0  # first row of `raw` to write
    mass: Tensor | None = None  # [n_keys] float32: attention each key got, summed over all else
    start: int = 0  # offset in the packed sequence, set by Pass
    first: int = 0
    stop: int = 0  # one past the last slot; keys [0, stop) are visible
    contiguous: bool = False
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    biases: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first, self.stop = int(self.slots[0]), int(self.slots[-1]) + 1
        self.contiguous = self.stop - self.first == self.n
        self.rows.positions[self.slots] = self.positions
        self.rows.n = max(self.rows.n, self.stop)

    @property
    def n(self) -> int:
        return self.tokens.shape[0]

    def window(self, size: int | None) -> tuple[int, Tensor | None]:
        """Return the first visible slot and the mask [token, key], None when all is seen."""
        begin = 0
        if size is not None:
            oldest = int(self.positions[0]) - size
            used = self.rows.positions[: self.stop]
            begin = int(torch.searchsorted(used, oldest, right=True))
        if size not in self.masks:
            self.masks[size] = self._mask(begin, size)
        return begin, self.masks[size]

    def bias(self, size: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as 0 and -inf [group * token, key], made once for all layers."""
        _, mask = self.window(size)
        if mask is None:
            return None
        if (size, group) not in self.biases:
            unseen = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            unseen.masked_fill_(~mask, float("-inf"))
            self.biases[size, group] = unseen.repeat(group, 1)
        return self.biases[size, group]

    def _mask(self, begin: int, size: int | None) -> Tensor | None:
        if self.n == 1:
            return None
        keys = self.rows.positions[begin : self.stop]
        distance = self.positions[:, None] - keys[None]
        seen = distance >= 0
        return seen if size is None else seen & (distance < size)


@dataclass(slots=True)
class Pass:
    """What one model call does: segments, packed positions, and where to stop."""

    segments: list[Segment]
    rotations: list[Rotation]
    stop_after: int | None = None  # last layer whose keys and values are wanted
    _angles: dict[int, Angles] = field(default_factory=dict)
    _positions: Tensor | None = None

    def __post_init__(self) -> None:
        start = 0
        for segment in self.segments:
            segment.start = start
            start += segment.n
        self._positions = torch.cat([s.positions for s in self.segments])

    def angles(self, layer: int) -> Angles:
        """Return cos and sin [total, width / 2] of the packed tokens for one layer."""
        rotation = self.rotations[layer]
        if id(rotation) not in self._angles:
            assert self._positions is not None
            self._angles[id(rotation)] = rotation.angles(self._positions)
        return self._angles[id(rotation)]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store this layer's rows; ``keys`` and ``values`` are [token, head, dim], unrotated."""
        rotated = self.rotations[layer].apply(keys, self.angles(layer))
        for s in self.segments:
            span = slice(s.start, s.start + s.n)
            if s.contiguous:
                s.rows.k[layer][s.first : s.stop] = rotated[span]
                s.rows.v[layer][s.first : s.stop] = values[span]
            else:
                slots = s.slots.to(keys.device)
                s.rows.k[layer].index_copy_(0, slots, rotated[span])
                s.rows.v[layer].index_copy_(0, slots, values[span])
            if s.raw is not None:
                s.raw.k[layer][s.raw_at : s.raw_at + s.n] = keys[span]
                s.raw.v[layer][s.raw_at : s.raw_at + s.n] = values[span]
        if self.stop_after == layer:
            raise StopPass


current: ContextVar[Pass] = ContextVar("kvweave_pass")


def attend(
    layer: int, query: Tensor, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Return attention output [1, total, head, dim] for unrotated ``query`` [1, head, total, dim]."""
    run = current.get()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    turned = run.rotations[layer].apply(query[0].transpose(0, 1), run.angles(layer))
    outs = [
        _segment(s, layer, turned[s.start : s.start + s.n], scale, window, softcap)
        for s in run.segments
    ]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]


def _segment(
    s: Segment, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of one segment: ``query`` [token, head, dim] -> [token, head, v_dim]."""
    begin, mask = s.window(window)
    keys = s.rows.k[layer][begin : s.stop].transpose(0, 1)  # [kv_head, key, dim]
    values = s.rows.v[layer][begin : s.stop].transpose(0, 1)
    n, heads, _ = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    # the query heads that share a kv head are folded into the token axis: no copy of the keys
    folded = query.view(n, kv_heads, group, -1).permute(1, 2, 0, 3).reshape(kv_heads, group * n, -1)
    if softcap is None and s.mass is None:
        bias = s.bias(window, group, query.dtype)
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=bias, scale=scale
        )[0]
    else:
        if mask is not None and group > 1:
            mask = mask.repeat(group, 1)
        out = _eager(s, folded, keys, values, mask, scale, softcap)
    return out.view(kv_heads, group, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)


def _eager(
    s: Segment,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    scores = query @ keys.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    weights = scores.softmax(-1, dtype=wide)
    if s.mass is not None:
        s.mass[s.stop - keys.shape[1] : s.stop] += weights.sum((0, 1)).to(torch.float32)
    return weights.to(values.dtype) @ values

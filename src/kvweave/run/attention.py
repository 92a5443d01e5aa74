"""Attention of packed segments over the rows of their contexts, masked by position.

One model pass carries one packed sequence [1, total]: a segment per context, each with its own
rows. The mask is exact: a query sees ``key_position <= query_position`` (within the window of a
sliding layer), wherever the rows come from. A causal mask aligned to the bottom right, which fits
only a contiguous suffix, would let a repaired row see its own future.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.run.rotary import Angles, Rotation
from kvweave.run.rows import KVRows
from kvweave.store.kv import KV

BLOCK = 512  # rows of one model pass outside the loop; bounds the mask to BLOCK x context
PIECE, PIECES = 64, 8  # tokens of the smallest piece of attention, and how many pieces at most


class StopPass(Exception):
    """Ends a pass early; the layers after the one asked for are not needed."""


@dataclass(slots=True)
class Reads:
    """Attention that computed rows pay to each part of their context, mean over heads and layers."""

    owner: Tensor  # [slot] int64: the part a slot belongs to
    mass: Tensor  # [row, part] float32; rows count as those of `raw`


@dataclass(slots=True)
class Segment:
    """The tokens of one context in this pass, sorted by position."""

    rows: KVRows
    tokens: Tensor  # [token] int64
    slots: Tensor  # [token] int64 on CPU, strictly increasing
    positions: Tensor  # [token] int64
    raw: KV | None = None  # unrotated keys and values of these tokens are written here if given
    raw_at: int = 0  # first row of `raw` and `reads` to write
    mass: Tensor | None = None  # [n_keys] float32: attention each key got, summed over all else
    mass_from: int = 0  # first layer that counts in it
    mass_of: Tensor | None = None  # [token] what each token's attention counts; None: 1
    reads: Reads | None = None
    start: int = 0  # offset in the packed sequence, set by Pass
    first: int = 0
    stop: int = 0  # one past the last slot; keys [0, stop) are visible
    contiguous: bool = False
    pieces: list[tuple[int, int]] = field(default_factory=list)
    counted: int = 0  # first token that counts in `mass`
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first, self.stop = int(self.slots[0]), int(self.slots[-1]) + 1
        self.contiguous = self.stop - self.first == self.n
        self.rows.positions[self.slots] = self.positions
        self.rows.n = max(self.rows.n, self.stop)
        # rows far apart see very different numbers of keys: cut them, so that the early ones do
        # not pay for keys they may not see
        spread = self.stop - self.first > self.stop // 4
        size = max(PIECE, self.n // PIECES) if spread else self.n
        self.counted = self._first_counted()
        self.pieces = list(pairwise(sorted({*range(0, self.n, size), self.counted, self.n})))

    def _first_counted(self) -> int:
        """Return the first token whose attention counts in `mass`; those before it are spared the
        slower way that tells it."""
        if self.mass is None:
            return self.n
        counted = None if self.mass_of is None else self.mass_of.nonzero()
        return 0 if counted is None else int(counted[0]) if counted.numel() else self.n

    def counts(self, piece: tuple[int, int], layer: int) -> bool:
        """Whether the attention of a piece counts in `mass`."""
        return self.mass is not None and layer >= self.mass_from and piece[0] >= self.counted

    @property
    def n(self) -> int:
        return self.tokens.shape[0]

    def keys(self, piece: tuple[int, int], window: int | None) -> slice:
        """Return the slots of which tokens ``piece`` may see some."""
        begin, stop = 0, int(self.slots[piece[1] - 1]) + 1
        if window is not None:
            oldest = int(self.positions[piece[0]]) - window
            begin = int(torch.searchsorted(self.rows.positions[:stop], oldest, right=True))
        return slice(begin, stop)

    def mask(self, piece: tuple[int, int], window: int | None) -> Tensor | None:
        """Return which keys each token sees [token, key], None when it is all of them."""
        if piece[1] - piece[0] == 1:
            return None
        found = self.masks.get((window, piece[0]))
        if found is None:
            keys = self.rows.positions[self.keys(piece, window)]
            distance = self.positions[slice(*piece), None] - keys[None]
            found = distance >= 0
            if window is not None:
                found &= distance < window
            self.masks[window, piece[0]] = found
        return found

    def bias(
        self, piece: tuple[int, int], window: int | None, group: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the mask as 0 and -inf [group * token, key], made once for all layers."""
        mask = self.mask(piece, window)
        if mask is None:
            return None
        if (window, piece[0], group) not in self.biases:
            unseen = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            unseen.masked_fill_(~mask, float("-inf"))
            self.biases[window, piece[0], group] = unseen.repeat(group, 1)
        return self.biases[window, piece[0], group]


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
            s.rows.settle(layer)
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
        _piece(
            s, piece, layer, turned[s.start + piece[0] : s.start + piece[1]], scale, window, softcap
        )
        for s in run.segments
        for piece in s.pieces
    ]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]


def _piece(
    s: Segment,
    piece: tuple[int, int],
    layer: int,
    query: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of some tokens of a segment: ``query`` [token, head, dim] -> [.., .., v_dim]."""
    seen = s.keys(piece, window)
    keys = s.rows.k[layer][seen].transpose(0, 1)  # [kv_head, key, dim]
    values = s.rows.v[layer][seen].transpose(0, 1)
    n, heads, _ = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    # the query heads that share a kv head are folded into the token axis: no copy of the keys
    folded = query.view(n, kv_heads, group, -1).permute(1, 2, 0, 3).reshape(kv_heads, group * n, -1)
    bias = s.bias(piece, window, group, query.dtype)
    counts = s.counts(piece, layer)
    if softcap is None and not counts and s.reads is None:
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=bias, scale=scale
        )[0]
    else:
        weights = _weights(folded, keys, bias, scale, softcap)
        if counts:
            assert s.mass is not None
            mine = weights.new_ones(n) if s.mass_of is None else s.mass_of[slice(*piece)]
            every = mine.to(weights).repeat(heads)  # [kv_head, group, token]
            s.mass[seen] += (every @ weights.view(heads * n, -1)).to(torch.float32)
        if s.reads is not None:
            paid = weights.view(heads, n, -1).mean(0) / len(s.rows.k)  # [token, key]
            mine = s.reads.mass[s.raw_at + piece[0] : s.raw_at + piece[1]]
            mine.index_add_(1, s.reads.owner[seen], paid.to(torch.float32))
        out = weights.to(values.dtype) @ values
    return out.view(kv_heads, group, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)


def _weights(
    query: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Return attention weights [kv_head, group * token, key], in float32 at least."""
    if softcap is not None:
        scores = torch.tanh(query @ keys.transpose(1, 2) * (scale / softcap)) * softcap
        scores = scores if bias is None else scores + bias
    elif bias is not None:
        scores = torch.baddbmm(
            bias.expand(keys.shape[0], -1, -1), query, keys.transpose(1, 2), alpha=scale
        )
    else:
        scores = (query * scale) @ keys.transpose(1, 2)
    half = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.softmax(-1, dtype=torch.float32 if half else scores.dtype)

"""CacheGen (2310.07240): fewer bins in later layers, entropy coded; what others are compared with.

``cachegen:absmax`` is as its code was shipped: one scale for a token, from the largest value of all
its channels. ``cachegen`` has a scale per channel instead, over the tokens of the block.
``cachegen:anchor`` codes differences (section 5.2): of ten tokens the first in 8 bits, the others
as what they differ from it. A number sets the bins of the first third of the key layers (section
5.3: they matter most) and of the first two value layers; the others have half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.store.codec import grid
from kvweave.store.codec.base import Place, bytes_of

BINS = 32
GROUP = 10  # tokens that share an anchor
ANCHOR_LEVELS = 255


@dataclass(frozen=True, slots=True)
class CacheGen:
    """``levels`` symbols, an odd number, 0 in the middle."""

    levels: int
    absmax: bool = False
    anchor: bool = False

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return scales and symbols. Raises CorruptChunk for values that are not finite."""
        x = grid.plain(block)
        pieces = []
        if self.anchor:
            anchors = x[::GROUP]
            scale = self._scale(anchors, ANCHOR_LEVELS)
            q = grid.symbols(anchors, scale, None, ANCHOR_LEVELS)
            squeezed = grid.squeeze(q)
            pieces = [bytes_of(torch.tensor([len(squeezed)])), bytes_of(scale), squeezed]
            x = x - self._spread(q, scale, len(x))
        scale = self._scale(x, self.levels)
        q = grid.symbols(x, scale, None, self.levels)
        return [*pieces, bytes_of(scale), grid.squeeze(grid.pack(q, self._bits))]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out``."""
        n, heads, dim = out.shape
        fields = grid.Fields(data)
        base = None
        if self.anchor:
            size = max(0, int(fields.take((1,), torch.int64)))
            n_anchors = -(-n // GROUP)
            scale = fields.take(self._shape(n_anchors, heads, dim), torch.bfloat16)
            frame = bytes_of(fields.take((size,), torch.uint8))
            q = grid.unsqueeze(frame, n_anchors * heads * dim).view(n_anchors, heads, dim)
            base = self._spread(q, scale, n)
        scale = fields.take(self._shape(n, heads, dim), torch.bfloat16)
        q = fields.symbols((n, heads, dim), self._bits, True)
        if base is None:
            grid.values(q, scale, None, self.levels, out)
        else:
            differences = torch.empty(out.shape)
            grid.values(q, scale, None, self.levels, differences)
            out.copy_(differences.add_(base))

    @property
    def _bits(self) -> int:
        return 4 if self.levels < 16 else 8

    def _shape(self, n: int, heads: int, dim: int) -> tuple[int, int, int]:
        return (n, 1, 1) if self.absmax else (1, heads, dim)

    def _scale(self, x: Tensor, levels: int) -> Tensor:
        over = (1, 2) if self.absmax else (0,)
        return grid.rounded_up(x.abs().amax(over, keepdim=True) * (2 / (levels - 1)))

    def _spread(self, q: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the anchor of each of ``n`` tokens; of an anchor itself too: it differs by 0."""
        anchors = torch.empty(q.shape)
        grid.values(q, scale, None, ANCHOR_LEVELS, anchors)
        return anchors.repeat_interleave(GROUP, 0)[:n]


def cachegen(place: Place, options: Sequence[str]) -> CacheGen:
    """Make the codec. Raises InvalidArgument."""
    bins, known = BINS, {"absmax": False, "anchor": False}
    for option in options:
        if option.isdecimal() and 4 <= int(option) <= 256:
            bins = int(option)
        elif option in known:
            known[option] = True
        else:
            hint = "absmax, anchor, and 4 to 256 bins: cachegen:absmax:64"
            raise InvalidArgument("codec", f"no such option {option!r}", hint)
    early = -(-place.n_layers // 3) if place.part == "k" else 2
    bins = bins if place.layer < early else bins // 2
    return CacheGen(bins - 1 + bins % 2, **known)

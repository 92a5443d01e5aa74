"""Integers of 8, 5 or 4 bits on a grid per channel of the keys, per token of the values.

Keys have channels that are large in every token, values do not (KIVI, 2402.02750, section 3): so
keys get a scale for each channel, over the tokens of the block, and values one for each token, over
its channels. Option ``channel`` or ``token`` sets it for both.

With zstd the symbols are entropy coded. Then resolving a quiet channel as finely as a loud one costs
bits that help little, and a quiet channel's scale lies between what its own reach needs and what one
of the loudest does that are no outliers (their geometric mean, the latter counting twice): nothing
is cut off, and quiet channels take fewer bits. Values then have grids around zero, which is their
likeliest symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvweave.errors import check_options
from kvweave.store.codec import grid
from kvweave.store.codec.base import Make, Place, bytes_of

Axis = Literal["channel", "token"]
QUIETER = 7  # eighths of a head's channels; the rest may be outliers


@dataclass(frozen=True, slots=True)
class Integer:
    """Symbols of ``bits`` bits; a grid for each channel or for each token."""

    bits: int
    axis: Axis
    entropy: bool = False

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return scales, middles, symbols. Raises CorruptChunk for values that are not finite."""
        x = grid.plain(block)
        over = (0,) if self.axis == "channel" else (1, 2)
        low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
        middle = None if self._centred else (low / 2 + high / 2).to(torch.bfloat16)
        reach = torch.maximum(high, -low) if middle is None else high - middle.float()
        if middle is not None:
            reach = torch.maximum(reach, middle.float() - low)
        if self.entropy and self.axis == "channel":
            large = reach.kthvalue(-(-QUIETER * x.shape[2] // 8), 2, keepdim=True).values
            reach = (reach ** (1 / 3) * large ** (2 / 3)).maximum(reach)
        scale = grid.rounded_up(reach * (2 / (self._levels - 1)))
        q = grid.symbols(x, scale, middle, self._levels)
        # nibbles cost zstd nothing, 5 bits across byte borders hide the symbols from it
        stored = grid.pack(q, self._stored_bits)
        last = grid.squeeze(stored) if self.entropy else bytes_of(stored)
        return [bytes_of(scale), *([] if middle is None else [bytes_of(middle)]), last]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out`` with grid points."""
        n, heads, dim = out.shape
        shape = (1, heads, dim) if self.axis == "channel" else (n, 1, 1)
        fields = grid.Fields(data)
        scale = fields.take(shape, torch.bfloat16)
        middle = None if self._centred else fields.take(shape, torch.bfloat16)
        q = fields.symbols((n, heads, dim), self._stored_bits, self.entropy)
        grid.values(q, scale, middle, self._levels, out)

    @property
    def _centred(self) -> bool:
        return self.entropy and self.axis == "token"

    @property
    def _levels(self) -> int:
        return (1 << self.bits) - self._centred

    @property
    def _stored_bits(self) -> int:
        return 8 if self.entropy and self.bits == 5 else self.bits


def integer(bits: int, entropy: bool) -> Make:
    """Return what makes the codec of so many bits: 8, 5 or 4."""

    def make(place: Place, options: Sequence[str]) -> Integer:
        check_options(options, ("channel", "token"))
        axis: Axis = "channel" if place.part == "k" else "token"
        for option in options:
            axis = "channel" if option == "channel" else "token"
        return Integer(bits, axis, entropy)

    return make

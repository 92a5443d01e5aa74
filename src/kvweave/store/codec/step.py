"""One step for a whole head, entropy coded: the fewest bits for a mean squared error.

At equal steps an entropy coder spends on each channel what its spread needs, which is what rate
distortion theory asks for of independent Gaussians (Cover and Thomas, 10.3.3); a scale per channel
or token spends more on quiet ones than they are worth. Keys lose their mean over the block first,
channel by channel: it is large and would cost bits in every token.

The step is a part of the spread (root mean square) of a head's median channel. A channel that
reaches beyond the symbols has it doubled as often as needed: it is loud, nothing is cut off, and the
others do not suffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.store.codec import grid
from kvweave.store.codec.base import Place, bytes_of

STEP = 0.4  # of the keys' spread; KL 0.01 on the bundled model (bench/codecs.py)
VALUES = 2.0  # a value's step over a key's: errors of values average out over the keys attended to
LEVELS = 255
REACH = (LEVELS - 1) // 2  # steps


@dataclass(frozen=True, slots=True)
class Step:
    """Symbols of size ``step`` times the spread of a head's channels, 0 in the middle."""

    step: float
    is_key: bool

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return means, steps, doublings, symbols. Raises CorruptChunk as `grid.plain`."""
        x = grid.plain(block)
        if not x.numel():
            return []
        pieces = []
        if self.is_key:
            mean = x.mean(0, keepdim=True).to(torch.bfloat16)
            x = x - mean.float()
            pieces.append(bytes_of(mean))
        spread = x.square().mean(0, keepdim=True).median(2, keepdim=True).values.sqrt()
        scale = grid.rounded_up(spread * self.step)
        over = x.abs().amax(0, keepdim=True) / (scale.float() * REACH)
        doublings = over.clamp_min(1).log2().ceil().to(torch.uint8)
        pieces += [bytes_of(scale), bytes_of(doublings)]
        symbols = grid.symbols(x, _doubled(scale, doublings), None, LEVELS)
        return [*pieces, grid.squeeze(symbols)]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out``."""
        if not out.numel():
            return
        n, heads, dim = out.shape
        fields = grid.Fields(data)
        mean = fields.take((1, heads, dim), torch.bfloat16) if self.is_key else None
        scale = fields.take((1, heads, 1), torch.bfloat16)
        scale = _doubled(scale, fields.take((1, heads, dim), torch.uint8))
        grid.values(fields.symbols((n, heads, dim), 8, True), scale, mean, LEVELS, out)


def _doubled(scale: Tensor, doublings: Tensor) -> Tensor:
    return scale.float() * torch.exp2(doublings.float())


def step(place: Place, options: Sequence[str]) -> Step:
    """Make the codec; its option is the step of keys. Raises InvalidArgument."""
    try:
        (size,) = map(float, options or [str(STEP)])
        if not 1e-3 <= size <= 10:
            raise ValueError
    except ValueError as error:
        raise InvalidArgument(
            "codec", f"a step of {':'.join(options)!r}", "write step:0.4, a number of 0.001 to 10"
        ) from error
    return Step(size if place.part == "k" else size * VALUES, place.part == "k")

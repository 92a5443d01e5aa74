"""One step for a whole head, entropy coded: the fewest bits for a mean squared error.

At equal steps an entropy coder spends on each channel what its spread needs, which is what rate
distortion theory asks for of independent Gaussians (Cover and Thomas, 10.3.3); a scale per channel
or token spends more on quiet ones than they are worth. Keys lose their mean over the block first,
channel by channel: it is large and would cost bits in every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.store.codec import grid
from kvweave.store.codec.base import Place, bytes_of

STEP = 0.3  # of the keys' root mean square; KL 0.01 on the bundled model (bench/codecs.py)
VALUES = 2.0  # a value's step over a key's: errors of values average out over the keys attended to
LEVELS = 255


@dataclass(frozen=True, slots=True)
class Step:
    """Symbols of size ``step`` times a head's root mean square, 0 in the middle."""

    step: float
    means: bool  # whether channels lose their mean

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return steps, means, symbols. Raises CorruptChunk for values that are not finite."""
        x = grid.plain(block)
        if not x.numel():
            return []
        pieces = []
        if self.means:
            mean = x.mean(0, keepdim=True).to(torch.bfloat16)
            x = x - mean.float()
            pieces.append(bytes_of(mean))
        norm = torch.linalg.vector_norm(x, dim=(0, 2), keepdim=True, dtype=torch.float64)
        rms = (norm / (x.shape[0] * x.shape[2]) ** 0.5).float()
        # far outliers make the step coarser rather than being cut off
        reach = x.abs().amax((0, 2), keepdim=True) / ((LEVELS - 1) // 2)
        scale = grid.rounded_up(torch.maximum(rms * self.step, reach))
        pieces.append(bytes_of(scale))
        return [*pieces, grid.squeeze(grid.symbols(x, scale, None, LEVELS))]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out``."""
        if not out.numel():
            return
        n, heads, dim = out.shape
        fields = grid.Fields(data)
        mean = fields.take((1, heads, dim), torch.bfloat16) if self.means else None
        scale = fields.take((1, heads, 1), torch.bfloat16)
        grid.values(fields.symbols((n, heads, dim), 8, True), scale, mean, LEVELS, out)


def step(place: Place, options: Sequence[str]) -> Step:
    """Make the codec; its option is the step of keys. Raises InvalidArgument."""
    try:
        (size,) = map(float, options or [str(STEP)])
        if not 1e-3 <= size <= 10:
            raise ValueError
    except ValueError as error:
        raise InvalidArgument(
            "codec", f"a step of {':'.join(options)!r}", "write step:0.3, a number of 0.001 to 10"
        ) from error
    return Step(size if place.part == "k" else size * VALUES, place.part == "k")

"""One step for a whole head, entropy coded: the fewest bits for a mean squared error.

At equal steps an entropy coder spends on each channel what its spread needs, which is what rate
distortion theory asks for of independent Gaussians (Cover and Thomas, 10.3.3); a scale per channel
or token spends more on quiet ones than they are worth.

The step is a part of the spread (root mean square) of a head's median channel. A channel that
reaches beyond the symbols has it doubled as often as needed: it is loud, nothing is cut off, and the
others do not suffer. Channels lose their mean over the block where that saves more bits than means
take: for most keys, not in short blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.store.codec import grid
from kvweave.store.codec.base import Place, bytes_of

STEP = 0.5  # of the keys' spread; KL 0.01 on the bundled model (bench/kv_codecs.py)
VALUES = 1.4  # a value's step over a key's: errors of values average out over the keys attended to
LEVELS = 255
REACH = (LEVELS - 1) // 2  # steps
FEW = (REACH - 7, REACH + 8)  # symbols of 4 bits
MEANS, DOUBLINGS, NIBBLES = 1, 2, 4  # flags


@dataclass(frozen=True, slots=True)
class Step:
    """Symbols of size ``step`` times the spread of a head's channels, 0 in the middle."""

    step: float

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return flags, steps, what they say of means and doublings, symbols.

        Raises CorruptChunk as `grid.plain`.
        """
        x = grid.plain(block)
        mean = x.mean(0, keepdim=True).to(torch.bfloat16)
        centred = x - mean.float()
        variance = centred.square().mean(0, keepdim=True)
        scale = grid.rounded_up(variance.median(2, keepdim=True).values.sqrt() * self.step)
        noise = scale.float().square()
        saved = torch.log2((variance + mean.float().square() + noise) / (variance + noise))
        flags = MEANS if saved.sum() * len(x) / 2 > 16 * mean.numel() else 0
        x = centred if flags else x
        over = x.abs().amax(0, keepdim=True) / (scale.float() * REACH)
        doublings = over.clamp_min(1).log2().ceil().to(torch.uint8)
        flags |= DOUBLINGS if doublings.any() else 0
        q = grid.symbols(x, scale.float() * torch.exp2(doublings.float()), None, LEVELS)
        if q.min() >= FEW[0] and q.max() <= FEW[1]:
            flags |= NIBBLES
            q = grid.pack(q - FEW[0], 4)  # two symbols coded as one come closer to the entropy
        pieces = [bytes_of(torch.tensor([flags], dtype=torch.uint8)), bytes_of(scale)]
        pieces += [bytes_of(mean)] if flags & MEANS else []
        pieces += [bytes_of(doublings)] if flags & DOUBLINGS else []
        return [*pieces, grid.squeeze(q)]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out``."""
        n, heads, dim = out.shape
        fields = grid.Fields(data)
        flags = int(fields.take((1,), torch.uint8))
        scale = fields.take((1, heads, 1), torch.bfloat16).float()
        mean = fields.take((1, heads, dim), torch.bfloat16) if flags & MEANS else None
        if flags & DOUBLINGS:
            scale = scale * torch.exp2(fields.take((1, heads, dim), torch.uint8).float())
        q = fields.symbols((n, heads, dim), 4 if flags & NIBBLES else 8, True)
        grid.values(q + FEW[0] if flags & NIBBLES else q, scale, mean, LEVELS, out)


def step(place: Place, options: Sequence[str]) -> Step:
    """Make the codec; its option is the step of keys. Raises InvalidArgument."""
    try:
        (size,) = map(float, options or [str(STEP)])
        if not 1e-3 <= size <= 10:
            raise ValueError
    except ValueError as error:
        raise InvalidArgument(
            "codec", f"a step of {':'.join(options)!r}", "write step:0.5, a number of 0.001 to 10"
        ) from error
    return Step(size if place.part == "k" else size * VALUES)

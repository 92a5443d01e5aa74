"""Rows at random, the baseline that every policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, TokenPolicy

# odd multipliers and shifts of splitmix64 (Steele, Lea, Flood 2014, figure 16), as signed integers
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
SHIFTS = (30, FIRST), (27, SECOND), (31, 1)
BITS = 53  # of a float64


@dataclass(frozen=True, slots=True)
class RandomRows(TokenPolicy):
    """Keep rows at random: the same ``seed``, layer, head and slot always draw the same number."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def scores(self, view: LayerView) -> Tensor:
        """Uniform over [0, 1)."""
        head = torch.arange(view.shape[0], device=view.slots.device)[:, None]
        mixed = _mix(view.slots + 1)
        for number in (self.seed, view.layer):
            mixed = _mix(mixed + _wrapped((number + 1) * GOLDEN))
        mixed = _mix(mixed + (head + 1) * GOLDEN)
        return ((mixed >> (64 - BITS)) & ((1 << BITS) - 1)).double() * 2.0**-BITS


def _wrapped(x: int) -> int:
    """Return what is left of ``x`` in 64 bits."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    """Spread every bit of ``x`` int64 over all bits; products wrap."""
    for shift, factor in SHIFTS:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x

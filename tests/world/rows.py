"""The rows of a context: the only thing these tests take from the inside."""

from __future__ import annotations

from typing import Any

import xxhash
from torch import Tensor

from kvweave import Context

Layers = list[tuple[Tensor, Tensor]]  # keys as rotated and values [slot, head, dim] of each layer


def rows_of(context: Context, n_layers: int) -> Layers:
    """Return the rows there are, as attention reads them."""
    inside: Any = context
    if hasattr(context, "session"):
        rows = inside.session.state.rows
        rows.settle()
        read = [rows.read(layer) for layer in range(n_layers)]
    else:
        rows = inside._state.rows
        rows.settle()
        read = list(zip(rows.k, rows.v, strict=True))
    return [(k[: rows.n].cpu(), v[: rows.n].cpu()) for k, v in read]


def checksum(layers: Layers) -> int:
    """Return a number that changes when any bit of the rows does."""
    sum = xxhash.xxh3_64()
    for tensor in (t for pair in layers for t in pair):
        sum.update(tensor.contiguous().numpy())
    return sum.intdigest()

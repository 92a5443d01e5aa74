"""The contract of a codec: one block of one layer's keys or values, as bytes and back.

A block is [token, head, dim], at most `BLOCK` tokens, at least one value, keys unrotated. What a codec needs to decode
is in its bytes, except the shape, which the record knows. Add a codec in its own file, enter it in
``CODECS`` of the package, and give it to ``tests/store/codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.errors import CorruptChunk

BLOCK = 256  # tokens coded together: what is read at least, and what scales stretch over
KeyOrValue = Literal["k", "v"]


class Place(NamedTuple):
    """Which of a model's cached tensors a codec is made for."""

    layer: int
    n_layers: int
    part: KeyOrValue


class Codec(Protocol):
    """Bytes of a block and back; keeps no state between blocks."""

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return the bytes, in pieces; they may be the block's own memory.

        Raises CorruptChunk for values that are NaN or infinite, unless they are kept as they are.
        """
        ...

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out`` [token, head, dim], of any dtype and device.

        Raises CorruptChunk when ``data`` cannot be a block of this shape.
        """
        ...


Make = Callable[[Place, Sequence[str]], Codec]
"""Makes a codec for a place from its options. Raises InvalidArgument for one it does not know."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; of a contiguous one on the CPU its own memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def wrong(why: str) -> CorruptChunk:
    """Return the error for bytes that are no block."""
    return CorruptChunk("a block of KV", why)

"""What the codecs share: values on a grid of symbols, symbols in few bytes.

A grid is a scale and, unless it is centred on zero, a middle: ``x ~ middle + scale * (symbol - half)``
with ``half = (levels - 1) / 2``. Scales and middles are kept in bfloat16, scales rounded up, so that
no value falls off the grid.
"""

from __future__ import annotations

import math

import torch
import zstandard
from torch import Tensor

from kvweave.store.codec.base import bytes_of, wrong

LEVEL = 1  # of zstd: higher ones find matches in symbols that have none, and code worse
TINY = 2.0**-120  # the least scale: its products are still normal numbers
HUGE = 1e17  # the largest value: sums of squares over a block are still finite


def plain(block: Tensor) -> Tensor:
    """Return the values in float32 on the CPU.

    Raises CorruptChunk when one is NaN, infinite or over `HUGE`.
    """
    x = block.detach().to("cpu", torch.float32)
    if x.numel():
        low, high = x.aminmax()
        if not (low >= -HUGE and high <= HUGE):  # NaN is in neither
            raise wrong(f"values that are not finite, or over {HUGE:g}")
    return x


def rounded_up(scale: Tensor) -> Tensor:
    """Return positive bfloat16 scales that are not under ``scale``."""
    return (scale * (1 + 2.0**-8)).clamp_min(TINY).to(torch.bfloat16)


def symbols(x: Tensor, scale: Tensor, middle: Tensor | None, levels: int) -> Tensor:
    """Return the nearest grid points as uint8 0 .. levels - 1."""
    half = (levels - 1) / 2
    x = x / scale.float() if middle is None else (x - middle.float()).div_(scale.float())
    return x.add_(half).round_().clamp_(0, levels - 1).to(torch.uint8)


def values(q: Tensor, scale: Tensor, middle: Tensor | None, levels: int, out: Tensor) -> None:
    """Fill ``out`` with the values of symbols ``q``, which has its shape."""
    scale = scale.float()
    first = scale * (-(levels - 1) / 2)
    first = first if middle is None else first + middle.float()
    if out.dtype == torch.float32 and out.device.type == "cpu":
        torch.mul(q, scale, out=out).add_(first)
    else:
        out.copy_(torch.mul(q, scale).add_(first))


def pack(q: Tensor, bits: int) -> Tensor:
    """Return uint8 symbols of ``bits`` bits, 8 in ``bits`` bytes, the first in the lowest bits."""
    flat = q.reshape(-1)
    if bits == 8:
        return flat
    if flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    if bits == 4:  # two bytes at a time: four times as fast as with strides
        pairs = flat.view(torch.int16)
        return (pairs | (pairs >> 4)).to(torch.uint8)
    flat = flat.view(-1, 8)
    words = torch.zeros(len(flat), dtype=torch.int64)
    for i in range(8):
        words |= flat[:, i].to(torch.int64) << (bits * i)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def packed_size(n: int, bits: int) -> int:
    """Return the bytes of ``n`` packed symbols."""
    return n if bits == 8 else -(-n // 8) * bits


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Return the ``n`` symbols that `pack` made ``data`` of."""
    if bits == 8:
        return data
    if bits == 4:
        pairs = data.to(torch.int16)
        return ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.uint8)[:n]
    words = torch.zeros(len(data) // bits, 8, dtype=torch.uint8)
    words[:, :bits] = data.view(-1, bits)
    whole = words.view(torch.int64)
    mask = (1 << bits) - 1
    return (
        torch.cat([(whole >> (bits * i)) & mask for i in range(8)], 1).to(torch.uint8).view(-1)[:n]
    )


def squeeze(q: Tensor) -> memoryview:
    """Return uint8 symbols entropy coded: one zstd frame, nearly all of it Huffman codes."""
    made = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress(bytes_of(q))
    return memoryview(made)


def unsqueeze(data: memoryview, n: int) -> Tensor:
    """Return the ``n`` symbols of a frame. Raises CorruptChunk."""
    try:
        if zstandard.frame_content_size(data) != n:
            raise wrong("a frame of another length")
        made = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise wrong(f"no zstd frame: {error}") from error
    return as_tensor(bytearray(made), torch.uint8)


def as_tensor(data: memoryview | bytearray, dtype: torch.dtype) -> Tensor:
    """Return the bytes as a tensor of one dimension, without a copy if they can be written."""
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    source = bytearray(data) if isinstance(data, memoryview) and data.readonly else data
    return torch.frombuffer(source, dtype=dtype)


class Fields:
    """Cuts tensors from the front of a block's bytes."""

    def __init__(self, data: memoryview) -> None:
        self.rest = data

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor. Raises CorruptChunk when there is less than that left."""
        n = dtype.itemsize * math.prod(shape)
        if len(self.rest) < n:
            raise wrong(f"{len(self.rest)} bytes left of {n}")
        made, self.rest = as_tensor(self.rest[:n], dtype), self.rest[n:]
        return made.view(shape)

    def symbols(self, shape: tuple[int, ...], bits: int, entropy: bool) -> Tensor:
        """Return all that is left as symbols of ``shape``. Raises CorruptChunk."""
        n = math.prod(shape)
        size = packed_size(n, bits)
        if entropy:
            data = unsqueeze(self.rest, size)
        elif len(self.rest) != size:
            raise wrong(f"{len(self.rest)} bytes of symbols, not {size}")
        else:
            data = as_tensor(self.rest, torch.uint8)
        return unpack(data, n, bits).view(shape)

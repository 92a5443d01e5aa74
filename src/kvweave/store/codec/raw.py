"""The values as they are, bit for bit; with zstd, their bytes sorted by place first."""

from __future__ import annotations

import torch
from torch import Tensor

from kvweave.store.codec.base import bytes_of, wrong
from kvweave.store.codec.grid import Fields, squeeze, unsqueeze


class Raw:
    """Bytes of the tensor; the record reads them without a copy."""

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return the block's own memory, if it is contiguous and on the CPU."""
        return [bytes_of(block)]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Copy the bytes into ``out``, which has the dtype that was encoded."""
        if len(data) != out.numel() * out.element_size():
            raise wrong(f"{len(data)} bytes for {tuple(out.shape)} of {out.dtype}")
        out.copy_(Fields(data).take(tuple(out.shape), out.dtype))


class Packed:
    """All first bytes of the values, then all second ones, ...: exponents compress, the rest not."""

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return one zstd frame."""
        planes = torch.frombuffer(bytes_of(block), dtype=torch.uint8)
        return [squeeze(planes.view(-1, block.element_size()).t().contiguous())]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Fill ``out``, which has the dtype that was encoded."""
        size = out.element_size()
        planes = unsqueeze(data, out.numel() * size).view(size, -1)
        out.copy_(planes.t().flatten().view(out.dtype).view(out.shape))

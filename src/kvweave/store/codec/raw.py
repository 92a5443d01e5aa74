"""The values as they are, bit for bit."""

from __future__ import annotations

from torch import Tensor, frombuffer

from kvweave.store.codec.base import bytes_of, wrong


class Raw:
    """Bytes of the tensor; the record reads them without a copy."""

    def encode(self, block: Tensor) -> list[memoryview]:
        """Return the block's own memory, if it is contiguous and on the CPU."""
        return [bytes_of(block)]

    def decode(self, data: memoryview, out: Tensor) -> None:
        """Copy the bytes into ``out``, which has the dtype that was encoded."""
        if len(data) != out.numel() * out.element_size():
            raise wrong(f"{len(data)} bytes for {tuple(out.shape)} of {out.dtype}")
        if out.numel():
            out.copy_(frombuffer(bytearray(data), dtype=out.dtype).view(out.shape))

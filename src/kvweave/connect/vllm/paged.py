"""vLLM's own rows, in the blocks of its requests.

They are written by the operation of its attention backend, whatever layout or precision these have. No
backend has one that reads: where rows stand is seen at the start, by writing numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.connect.vllm.backend import VllmBackend
from kvweave.errors import InvalidArgument
from kvweave.run.base import Rows
from kvweave.run.layers import At
from kvweave.run.rows import KVRows

DIGIT = 128  # numbers below it are the same in all dtypes
Axes = tuple[int, ...]  # of each axis of a tensor a number


class Paged:
    """vLLM's own rows: written by its backend's operation, and read from where that was seen to write."""

    def __init__(self, backend: VllmBackend, block_size: int) -> None:
        for name, module in backend.attentions.items():
            if not hasattr(module.impl, "do_kv_cache_update"):
                kind = type(module.impl).__name__
                raise InvalidArgument("vllm", f"{kind} of {name} has no do_kv_cache_update")
        self.backend, self.block_size = backend, block_size
        self._seen: list[list[Tensor]] | None = None

    @torch.inference_mode()
    def learn(self) -> None:
        """Find out where rows stand; block 1 is written and must be free. Where that is not to be seen, as
        with rows of 8 bits, `read` says so."""
        found = [self._views(module) for module in self.backend.attentions.values()]
        self._seen = [each for each in found if each is not None]
        if len(self._seen) < len(found):
            self._seen = None

    def _views(self, module: Any) -> list[Tensor] | None:
        """Return keys and values of one layer as views of its cache [block, row, head, dim]."""
        cache, size = module.kv_cache, self.block_size
        n_blocks = self.backend.config.cache_config.num_gpu_blocks
        axes = [axis for axis, n in enumerate(cache.shape) if n == n_blocks]
        if cache.dtype != self.backend.dtype or len(axes) != 1:
            return None
        heads, slots = module.num_kv_heads, self.slots([1], 0, size)
        shapes = [(size, heads, dim) for dim in (module.head_size, module.head_size_v)]

        def write(keys: Tensor, values: Tensor) -> None:
            module.impl.do_kv_cache_update(module, keys, values, cache, slots)

        found = places(cache.select(axes[0], 1), shapes, write)
        if found is None:
            return None
        return [
            cache.as_strided(
                (n_blocks, *shape),
                (cache.stride(axes[0]), *strides),
                cache.storage_offset() + first,
            )
            for shape, (first, strides) in zip(shapes, found, strict=True)
        ]

    @torch.inference_mode()
    def read(self, rows: Rows, blocks: Sequence[int], n: int) -> bool:
        """Have the first ``n`` rows of a request be those of a context without rows, which has
        reserved them; False, and nothing done, where it is not known how."""
        assert isinstance(rows, KVRows), "rows of another backend"
        if self._seen is None:
            return False
        size = self.block_size
        there = torch.as_tensor(blocks[: -(-n // size)], device=self.backend.device)
        slots = np.arange(n)
        rows.expect(slots, slots)
        for i, seen in enumerate(self._seen):
            keys, values = (each[there].flatten(0, 1)[:n] for each in seen)
            rows.write(i, At.of(slots, self.backend.device), keys, values, keys)
        return True

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Return where rows [start, stop) of a request stand, int64 [row]."""
        rows = torch.arange(start, stop)
        table = torch.as_tensor(blocks, dtype=torch.int64)
        found = table[rows // self.block_size] * self.block_size + rows % self.block_size
        return found.to(self.backend.device)

    @torch.inference_mode()
    def write(self, rows: Rows, blocks: Sequence[int], start: int, stop: int) -> None:
        """Write rows [start, stop) of a context to the blocks of a request."""
        assert isinstance(rows, KVRows), "rows of another backend"
        slots, strided = self.slots(blocks, start, stop), self.backend.device.type == "cpu"
        rows.settle()
        for i, module in enumerate(self.backend.attentions.values()):
            seen = rows.layers[i].seen(slice(start, stop))  # [head, row, dim]
            both = [each.transpose(0, 1) for each in seen]
            if not strided:  # kernels of GPUs were not tried with rows that lie apart
                both = [each.contiguous() for each in both]
            module.impl.do_kv_cache_update(module, *both, module.kv_cache, slots)


def places(
    block: Tensor, shapes: Sequence[Axes], write: Callable[[Tensor, Tensor], None]
) -> list[tuple[int, Axes]] | None:
    """Return where ``write`` puts keys and values of these ``shapes`` in a block: of each the first
    element's place and the steps of its axes. None: in no such order, or elsewhere."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    if block.numel() != sum(sizes):
        return None
    numbers = torch.arange(sum(sizes))
    seen = torch.zeros(block.shape, dtype=torch.int64)
    for power in (1, DIGIT, DIGIT**2):
        told = torch.split((numbers // power % DIGIT).to(block), sizes)
        write(*(part.view(shape) for part, shape in zip(told, shapes, strict=True)))
        seen += power * block.cpu().long()
    if not torch.equal(seen.flatten().sort().values, numbers):
        return None
    at = torch.empty_like(numbers)
    at[seen.flatten()] = _offsets(block.shape, block.stride()).flatten()
    found = []
    for part, shape in zip(torch.split(at, sizes), shapes, strict=True):
        offsets, first = part.view(shape), int(part[0])
        ones = np.eye(len(shape), dtype=int) * (np.array(shape) > 1)
        strides = tuple(int(offsets[tuple(one)]) - first for one in ones)
        if not torch.equal(offsets, first + _offsets(shape, strides)):
            return None
        found.append((first, strides))
    return found


def _offsets(shape: Axes, strides: Axes) -> Tensor:
    """Return where each element of a tensor stands, from the first one on."""
    found = torch.zeros(shape, dtype=torch.int64)
    for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        found += (stride * torch.arange(n)).view(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
    return found

"""Rows that rest in memory as 8-bit integers or floats; attention gets them back layer by layer.

Rows come one at a time, so scales cannot span tokens as in stored blocks: each row and head has one
for every 32 channels, and a loud channel disturbs its own 32 only. Keys are coded as rotated to
their position: what is read for every decoded token is not turned again. Every row is coded once,
when it is computed or placed; a weave places it from the store, not from here.

    bf16 model, 8 bits: 17 of 32 bytes;  float32: 17 of 64
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.rows import KVRows
from kvweave.store.codec import grid
from kvweave.store.codec.fp8 import LARGEST, values_of
from kvweave.store.kv import LayerShape

GROUP = 32  # channels that share a scale
CODECS = ("raw", "int8", "fp8")
At = slice | Tensor


class Coded:
    """Rows [capacity, head, dim] of one layer; reading some gives a tensor of the model's dtype.

    It answers what `KVRows` and attention ask of a tensor: indexing by slots, writing to slots,
    ``shape``, ``device``. In memory the heads come first, as in `KVRows`.
    """

    def __init__(self, shape: Sequence[int], codec: str, dtype: torch.dtype, device: Any) -> None:
        capacity, heads, dim = shape
        self.codec, self.dtype = codec, dtype
        n_groups = dim // GROUP if dim and dim % GROUP == 0 else 1
        kind = torch.int8 if codec == "int8" else torch.float8_e4m3fn
        self.q = torch.empty(heads, capacity, dim, dtype=kind, device=device)
        self.scale = torch.empty(heads, capacity, n_groups, dtype=torch.bfloat16, device=device)

    @property
    def shape(self) -> torch.Size:
        heads, capacity, dim = self.q.shape
        return torch.Size((capacity, heads, dim))

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.q, self.scale))

    def __getitem__(self, at: At) -> Tensor:
        q, scale = self.q[:, at], self.scale[:, at]
        grouped = (*scale.shape, q.shape[-1] // scale.shape[-1])
        wide = self._decoded(q).view(grouped).mul_(scale[..., None].to(self._wide))
        return wide.to(self.dtype).view(q.shape).transpose(0, 1)

    def __setitem__(self, at: At, rows: Tensor) -> None:
        x = rows.transpose(0, 1).to(self._wide)
        grouped = x.reshape(*x.shape[:2], self.scale.shape[-1], -1)
        top = 127.0 if self.codec == "int8" else LARGEST
        scale = grid.rounded_up(grouped.abs().amax(-1) / top)
        coded = grouped.div(scale[..., None].to(self._wide))
        self.q[:, at] = (
            (coded.round_() if self.codec == "int8" else coded).to(self.q.dtype).view(x.shape)
        )
        self.scale[:, at] = scale

    def index_copy_(self, dim: int, at: Tensor, rows: Tensor) -> None:
        """Write rows to slots ``at``."""
        assert dim == 0, "rows are the first dimension"
        self[at] = rows

    def clone(self) -> Coded:
        """Return a copy."""
        return self.grown(self.shape[0], self.shape[0])

    def grown(self, capacity: int, n: int) -> Coded:
        """Return rows with room for ``capacity``, the first ``n`` of them these."""
        new = Coded((capacity, *self.shape[1:]), self.codec, self.dtype, self.device)
        new.q[:, :n], new.scale[:, :n] = self.q[:, :n], self.scale[:, :n]
        return new

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _decoded(self, q: Tensor) -> Tensor:
        if self.codec == "int8":
            return q.to(self._wide)
        return values_of(q.view(torch.uint8)).to(self._wide)


class QuantisedRows(KVRows):
    """`KVRows` of 8 bits a value, ``codec`` int8 or fp8; everything else is as there."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        rotations: Sequence[Rotation],
        dtype: torch.dtype,
        device: torch.device,
        codec: str,
    ) -> None:
        super().__init__(shapes, rotations, dtype, device)
        self.codec = codec
        # typed as tensors: they answer what is asked of these here
        self.k = cast(
            list[Tensor], [Coded((0, s.k_heads, s.k_dim), codec, dtype, device) for s in shapes]
        )
        self.v = cast(
            list[Tensor], [Coded((0, s.v_heads, s.v_dim), codec, dtype, device) for s in shapes]
        )
        one = [w for s in shapes for w in ((1, s.k_heads, s.k_dim), (1, s.v_heads, s.v_dim))]
        self.row_bytes = sum(Coded(shape, codec, dtype, device).n_bytes for shape in one)

    @property
    def n_bytes(self) -> int:
        return sum(each.n_bytes for each in cast(list[Coded], [*self.k, *self.v]))

    def _empty(self) -> QuantisedRows:
        return QuantisedRows(self.shapes, self.rotations, self.dtype, self.device, self.codec)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        return cast(Tensor, cast(Coded, old).grown(capacity, self.n))

    def _set_keys(self, layer: int, span: slice, keys: Tensor, angles: Angles) -> None:
        self.k[layer][span] = self.rotations[layer].apply(keys, angles)


def rows_as(
    codec: str,
    shapes: Sequence[LayerShape],
    rotations: Sequence[Rotation],
    dtype: torch.dtype,
    device: torch.device,
) -> KVRows:
    """Return empty rows that rest as ``codec``: raw, int8 or fp8. Raises InvalidArgument."""
    if codec not in CODECS:
        raise InvalidArgument("codec", f"rows in memory are no {codec!r}", "raw, int8 or fp8")
    if codec == "raw":
        return KVRows(shapes, rotations, dtype, device)
    return QuantisedRows(shapes, rotations, dtype, device, codec)

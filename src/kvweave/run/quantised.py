"""Rows that rest in memory as 8-bit integers or floats; attention gets them back layer by layer.

Rows come one at a time, so scales cannot span tokens as in stored blocks: each row and head has one
for every 32 channels, and a loud channel disturbs its own 32 only. Keys are coded as rotated to
their position: what is read for every decoded token is not turned again. Every row is coded once,
when it is computed or placed; a weave places it from the store, not from here.

    bf16 model, 8 bits: 17 of 32 bytes;  float32: 17 of 64
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.base import LayerInfo
from kvweave.run.layers import At, LayerRows, MovableRows, RawRows
from kvweave.run.rows import KVRows
from kvweave.run.states import StateRows
from kvweave.store.codec import grid
from kvweave.store.codec.fp8 import LARGEST, values_of
from kvweave.store.kv import LayerShape

GROUP = 32  # channels that share a scale
CODECS = ("raw", "int8", "fp8")


class Coded:
    """A coded tensor [head, slot, dim]; reading some slots gives one of the model's dtype."""

    def __init__(
        self, shape: Sequence[int], codec: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, capacity, dim = shape
        self.codec, self.dtype, self.device = codec, dtype, device
        n_groups = dim // GROUP if dim and dim % GROUP == 0 else 1
        kind = torch.int8 if codec == "int8" else torch.float8_e4m3fn
        self.q = torch.empty(heads, capacity, dim, dtype=kind, device=device)
        self.scale = torch.empty(heads, capacity, n_groups, dtype=torch.bfloat16, device=device)

    @property
    def n_bytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot."""
        heads, _, dim = self.q.shape
        n_groups = self.scale.shape[2]
        return heads * (dim * self.q.element_size() + n_groups * self.scale.element_size())

    def __getitem__(self, at: slice | Tensor) -> Tensor:
        q, scale = self.q[:, at], self.scale[:, at]
        grouped = (*scale.shape, q.shape[-1] // scale.shape[-1])
        wide = self._decoded(q).view(grouped).mul_(scale[..., None].to(self._wide))
        return wide.to(self.dtype).view(q.shape)

    def __setitem__(self, at: slice | Tensor, rows: Tensor) -> None:
        x = rows.to(self._wide)
        grouped = x.reshape(*x.shape[:2], self.scale.shape[-1], -1)
        top = 127.0 if self.codec == "int8" else LARGEST
        scale = grid.rounded_up(grouped.abs().amax(-1) / top)
        coded = grouped.div(scale[..., None].to(self._wide))
        self.q[:, at] = (
            (coded.round_() if self.codec == "int8" else coded).to(self.q.dtype).view(x.shape)
        )
        self.scale[:, at] = scale

    def grown(self, capacity: int, n: int) -> Coded:
        """Return a copy of the first ``n`` slots with room for ``capacity``."""
        heads, _, dim = self.q.shape
        new = Coded((heads, capacity, dim), self.codec, self.dtype, self.device)
        new.q[:, :n], new.scale[:, :n] = self.q[:, :n], self.scale[:, :n]
        return new

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def _decoded(self, q: Tensor) -> Tensor:
        if self.codec == "int8":
            return q.to(self._wide)
        return values_of(q.view(torch.uint8)).to(self._wide)


class CodedRows(LayerRows):
    """Rows of one layer in 8 bits a value."""

    lossy = True

    def __init__(self, k: Coded, v: Coded) -> None:
        self.k, self.v = k, v
        self.capacity = k.q.shape[1]

    @classmethod
    def empty(
        cls, shape: LayerShape, codec: str, dtype: torch.dtype, device: torch.device
    ) -> CodedRows:
        """Return rows without room."""
        return cls(
            Coded((shape.k_heads, 0, shape.k_dim), codec, dtype, device),
            Coded((shape.v_heads, 0, shape.v_dim), codec, dtype, device),
        )

    @property
    def n_bytes(self) -> int:
        return self.k.n_bytes + self.v.n_bytes

    def bytes_at(self, capacity: int) -> int:
        return capacity * (self.k.row_bytes + self.v.row_bytes)

    def grown(self, capacity: int, n: int) -> CodedRows:
        return CodedRows(self.k.grown(capacity, n), self.v.grown(capacity, n))

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        self.k[at.where] = keys.transpose(0, 1)
        self.v[at.where] = values.transpose(0, 1)

    def seen(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.k[at], self.v[at]


def rows_as(
    codec: str, infos: Sequence[LayerInfo], dtype: torch.dtype, device: torch.device
) -> KVRows:
    """Return empty rows that rest as ``codec``: raw, int8 or fp8. Raises InvalidArgument."""
    if codec not in CODECS:
        raise InvalidArgument("codec", f"rows in memory are no {codec!r}", "raw, int8 or fp8")
    made: list[LayerRows] = [
        StateRows.of(info.mixer, dtype, device)
        if info.mixer is not None
        else RawRows.empty(info.shape, dtype, device)
        if codec == "raw"
        else CodedRows.empty(info.shape, codec, dtype, device)
        for info in infos
    ]
    return KVRows(infos, made, device)


def movable(
    codec: str, infos: Sequence[LayerInfo], dtype: torch.dtype, device: torch.device
) -> KVRows:
    """Return empty rows that can be moved. Raises InvalidArgument for 8 bits."""
    if codec != "raw":
        raise InvalidArgument("rows", f"rows kept as {codec} cannot be moved", 'use rows="raw"')
    if any(info.mixer is not None for info in infos):
        reason = "a state has seen rows where they stood"
        raise InvalidArgument("rows", reason, "a policy that leaves positions as they are")
    made = [MovableRows.empty(info.shape, dtype, device) for info in infos]
    return KVRows(infos, made, device)

"""KV of one run of tokens, outside any context: keys unrotated, token-major."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Offsets: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Widths of one layer's two cached tensors."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    @property
    def width(self) -> int:
        """Values of one token, those of its key and of its value."""
        return self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(slots=True)
class KV:
    """Keys and values of one chunk for every layer; ``k[layer]`` is [token, kv_head, dim].

    Keys carry no position: they are rotated when they are placed in a context, always from here.
    ``lossy`` rows went through something that does not give back what it took (a codec). Of a
    thinned chunk ``kept`` [layer, kv_head, row] says of which of its ``span`` tokens each row is,
    increasing; -1 behind a head's last row is padding.
    """

    k: list[Tensor]
    v: list[Tensor]
    lossy: bool = False
    kept: Offsets | None = None
    span: int = 0

    @classmethod
    def empty(
        cls, shapes: Sequence[LayerShape], n: int, dtype: torch.dtype, device: torch.device
    ) -> KV:
        """Allocate uninitialised rows for ``n`` tokens."""
        return cls(
            [torch.empty(n, s.k_heads, s.k_dim, dtype=dtype, device=device) for s in shapes],
            [torch.empty(n, s.v_heads, s.v_dim, dtype=dtype, device=device) for s in shapes],
        )

    @property
    def n_tokens(self) -> int:
        return self.k[0].shape[0] if self.kept is None else self.span

    @property
    def altered(self) -> bool:
        """Whether these are not all rows as they were computed: nothing made of them is exact."""
        return self.lossy or self.kept is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows (views of a larger buffer count their own rows only)."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def rows(self, start: int, stop: int) -> KV:
        """Return a view of rows ``[start, stop)``; of all of them, this."""
        if start == 0 and stop == self.n_tokens:
            return self
        if self.kept is not None:
            return self._thinned(start, stop, self.kept)
        return KV([t[start:stop] for t in self.k], [t[start:stop] for t in self.v], self.lossy)

    def whole(self) -> KV:
        """Return this with every layer there; what is still arriving is waited for."""
        return self

    def clone(self, device: torch.device | None = None) -> KV:
        """Return a copy that owns its memory, on ``device``, by default where this is."""
        k, v = ([t.to(device or t.device, copy=True) for t in each] for each in (self.k, self.v))
        return KV(k, v, self.lossy, self.kept, self.span)

    def _thinned(self, start: int, stop: int, kept: Offsets) -> KV:
        """Return the rows of tokens ``[start, stop)``, as many of each head as of the one with most."""
        there = (kept >= start) & (kept < stop)
        n = int(there.sum(-1).max(initial=0))
        order = np.argsort(~there, axis=-1, kind="stable")[..., :n]
        offsets = np.take_along_axis(kept, order, -1) - start
        offsets[~np.take_along_axis(there, order, -1)] = -1
        k, v = (
            [picked(t, rows) for t, rows in zip(each, order, strict=True)]
            for each in (self.k, self.v)
        )
        return KV(k, v, self.lossy, offsets, stop - start)

    def is_finite(self) -> bool:
        """Tell whether no value is NaN or infinite."""
        return bool(torch.stack([torch.isfinite(t).all() for t in (*self.k, *self.v)]).all())


def same_heads(shapes: Sequence[LayerShape]) -> bool:
    """Tell whether all layers have as many heads of keys and of values: thinned chunks need that."""
    return len({heads for shape in shapes for heads in (shape.k_heads, shape.v_heads)}) == 1


def picked(tensor: Tensor, rows: Offsets) -> Tensor:
    """Return of a ``tensor`` [row, kv_head, dim] for each head its ``rows`` [kv_head, row]."""
    at = torch.from_numpy(rows.T.copy()).to(tensor.device)[..., None]
    return tensor.gather(0, at.expand(-1, -1, tensor.shape[2]))


def joined(parts: Sequence[KV]) -> KV:
    """Return the rows of ``parts`` one after the other; one part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    assert all(kv.kept is None for kv in parts), "rows of thinned chunks are not joined"
    layers = range(len(parts[0].k))
    return KV(
        [torch.cat([kv.k[layer] for kv in parts]) for layer in layers],
        [torch.cat([kv.v[layer] for kv in parts]) for layer in layers],
        any(kv.lossy for kv in parts),
    )

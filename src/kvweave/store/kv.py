"""KV of one run of tokens, outside any context: keys unrotated, token-major."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    ``lossy`` rows went through something that does not give back what it took (a codec): what is
    made of them is never exact.
    """

    k: list[Tensor]
    v: list[Tensor]
    lossy: bool = False

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
        return self.k[0].shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows (views of a larger buffer count their own rows only)."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def rows(self, start: int, stop: int) -> KV:
        """Return a view of rows ``[start, stop)``; of all of them, this."""
        if start == 0 and stop == self.n_tokens:
            return self
        return KV([t[start:stop] for t in self.k], [t[start:stop] for t in self.v], self.lossy)

    def clone(self, device: torch.device | None = None) -> KV:
        """Return a copy that owns its memory, on ``device``, by default where this is."""
        k, v = ([t.to(device or t.device, copy=True) for t in each] for each in (self.k, self.v))
        return KV(k, v, self.lossy)

    def is_finite(self) -> bool:
        """Tell whether no value is NaN or infinite."""
        return bool(torch.stack([torch.isfinite(t).all() for t in (*self.k, *self.v)]).all())


def joined(parts: Sequence[KV]) -> KV:
    """Return the rows of ``parts`` one after the other; one part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    layers = range(len(parts[0].k))
    return KV(
        [torch.cat([kv.k[layer] for kv in parts]) for layer in layers],
        [torch.cat([kv.v[layer] for kv in parts]) for layer in layers],
        any(kv.lossy for kv in parts),
    )

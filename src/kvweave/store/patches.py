"""Stored differences between in-context and canonical KV, of low rank.

What a chunk's KV takes on from the chunks before it is nearly of low rank (Kamera, arXiv
2606.23581; deltas per context as in KVCOMM, arXiv 2510.12872): a few vectors a layer, added to the
canonical rows when the same chunks stand before it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.store.kv import KV
from kvweave.store.ram import Ram

# All that stands before: (digest, position minus ours, first token of its chunk, tokens)
Neighbours = tuple[tuple[bytes, int, int, int], ...]
PatchKey = tuple[int, Neighbours, int]  # chunk id, its neighbours, rank asked for
Factors = tuple[Tensor, Tensor]  # [token, rank], [rank, head * dim]


@dataclass(frozen=True, slots=True)
class Patch:
    """In-context minus canonical KV of one chunk, keys unrotated: two factors a layer and tensor."""

    k: list[Factors]
    v: list[Factors]

    @classmethod
    def between(cls, canonical: KV, found: KV, rank: int) -> Patch:
        """Return the best approximation of ``found - canonical`` by ``rank`` vectors a layer."""
        return cls(
            [_factors(new, old, rank) for new, old in zip(found.k, canonical.k, strict=True)],
            [_factors(new, old, rank) for new, old in zip(found.v, canonical.v, strict=True)],
        )

    def applied(self, canonical: KV) -> KV:
        """Return new rows: ``canonical`` plus the difference."""
        return KV(
            [_added(t, f) for t, f in zip(canonical.k, self.k, strict=True)],
            [_added(t, f) for t, f in zip(canonical.v, self.v, strict=True)],
            canonical.lossy,
        )

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for f in (*self.k, *self.v) for t in f)


def _factors(new: Tensor, old: Tensor, rank: int) -> Factors:
    wide = torch.promote_types(new.dtype, torch.float32)
    difference = (new.to(wide) - old.to(wide)).flatten(1)
    u, s, vh = torch.linalg.svd(difference, full_matrices=False)
    half = s[:rank].sqrt()  # in both factors, so that neither leaves the range of a short dtype
    return (u[:, :rank] * half).to(new.dtype), (half[:, None] * vh[:rank]).to(new.dtype)


def _added(canonical: Tensor, factors: Factors) -> Tensor:
    wide = torch.promote_types(canonical.dtype, torch.float32)
    difference = factors[0].to(wide) @ factors[1].to(wide)
    return (canonical.to(wide) + difference.view(canonical.shape)).to(canonical.dtype)


class Patches(Ram[PatchKey, Patch]):
    """Patches within ``limit`` bytes; the least recently used go first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def get(self, key: PatchKey) -> Patch | None:
        """Return a patch and count it as used."""
        found = self._held.pop(key, None)
        if found is not None:
            self._held[key] = found
        return found

    def put(self, key: PatchKey, patch: Patch, room: int = 0) -> None:
        """Keep a patch; skipped when it is over the limit, or ``room`` bytes and what older patches
        leave do not suffice."""
        if patch.n_bytes > min(self.limit, room + self.n_bytes):
            return
        room += self.pop(key)
        self.shrink(patch.n_bytes - min(room, self.limit - self.n_bytes))
        super().put(key, patch)

    def drop(self, id: int) -> None:
        """Let go of all patches of a chunk."""
        for key in [k for k in self if k[0] == id]:
            self.pop(key)

    def shrink(self, n_bytes: int) -> int:
        """Let go of the oldest until ``n_bytes`` are free, or all; return the bytes freed."""
        freed = 0
        while freed < n_bytes and len(self):
            freed += self.pop(next(iter(self)))
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        super().check_integrity()
        assert self.n_bytes <= self.limit, f"{self.n_bytes} bytes of patches over {self.limit}"

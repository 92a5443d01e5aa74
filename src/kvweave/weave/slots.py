"""Slots of a context's rows: whose they are, and which are placed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.store.kv import KV
from kvweave.weave.parts import Placement

SHORT = 1 << 17  # bytes of one layer's keys; chunks below are placed together


def padded(mask: Tensor, n: int) -> Tensor:
    """Return a mask that is False from its end up to ``n``."""
    return torch.cat([mask, mask.new_zeros(max(0, n - mask.numel()))])


def ranges(slots: Tensor, placed: Sequence[Placement]) -> list[tuple[int, int]]:
    """Return, for each placement, which of the increasing ``slots`` are its own."""
    starts = torch.tensor([p.slot for p in placed])
    stops = torch.tensor([p.slot + p.part.n for p in placed])
    return list(
        zip(
            torch.searchsorted(slots, starts).tolist(),
            torch.searchsorted(slots, stops).tolist(),
            strict=True,
        )
    )


def runs(
    moving: Sequence[Placement], own: dict[int, KV], loaded: dict[int, KV]
) -> list[tuple[int, list[KV]]]:
    """Return (slot, KV) to place; short neighbours go together, since each placing has a price."""
    found: list[tuple[int, list[KV]]] = []
    end, short = -1, False
    for p in moving:
        kv = (own if p.source == "own" else loaded)[p.part.uid].rows(0, p.ready)
        was_short, short = short, kv.k[0].numel() * kv.k[0].element_size() < SHORT
        if short and was_short and end == p.slot:
            found[-1][1].append(kv)
        else:
            found.append((p.slot, [kv]))
        end = p.slot + p.ready
    return found

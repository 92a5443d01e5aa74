"""Which parts are placed together."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.store.kv import KV
from kvweave.weave.parts import Placement

SHORT = 1 << 18  # bytes of one layer; chunks below are placed together


def runs(
    moving: Sequence[Placement], own: dict[int, KV], loaded: dict[int, KV]
) -> list[tuple[int, list[KV]]]:
    """Return (slot, KV) to place; short neighbours go together, since each placing has a price."""
    found: list[tuple[int, list[KV]]] = []
    end, short = -1, False
    for p in moving:
        kv = (own if p.source == "own" else loaded)[p.part.uid].rows(0, p.ready)
        was_short, short = short, kv.n_bytes < SHORT * len(kv.k)  # asks no layer that still arrives
        if short and was_short and end == p.slot:
            found[-1][1].append(kv)
        else:
            found.append((p.slot, [kv]))
        end = p.slot + p.ready
    return found

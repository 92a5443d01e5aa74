"""How one context is woven."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.weave.parts import Mode, Positions
from kvweave.weave.repair import Strategy


@dataclass(frozen=True, slots=True)
class Settings:
    """How a context is woven."""

    repair: str | Strategy = "none"
    share: float = 0.0  # of the reused rows, 0..1
    prune: Mode = "forget"  # what `drop` does to survivors by default
    positions: Positions = "compact"
    namespace: str = ""
    max_drift: float | None = None  # nats: over this predicted bound `auto` repairs more
    denoise: bool = True  # compute canonical KV of new turns after each answer

"""Replays traces of requests against tiers and policies, without a model."""

from __future__ import annotations

from kvweave.simulate.cost import Cost, Tier
from kvweave.simulate.generate import generate
from kvweave.simulate.replay import NAMES, Result, replay
from kvweave.simulate.trace import Request, Trace, read, write

__all__ = [
    "NAMES",
    "Cost",
    "Request",
    "Result",
    "Tier",
    "Trace",
    "generate",
    "read",
    "replay",
    "write",
]

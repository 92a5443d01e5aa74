"""Greedy dual, size and frequency: what is cheap to compute again and big goes first."""

from __future__ import annotations

from kvweave.keep.base import Facts
from kvweave.keep.lfu import LFU


def seconds_per_byte(n_bytes: int, facts: Facts) -> float:
    """Return what a byte of the chunk saves; 1 where nobody knows the cost."""
    return facts.cost / n_bytes if facts.cost and n_bytes else 1.0


def GDSF(budget: int = 0) -> LFU:
    """Rank a chunk by clock + uses x cost / size; the clock is the rank of the last that went.

    Tell the cost of all chunks or of none: an unknown one outweighs the known.
    """
    made = LFU(budget, seconds_per_byte)
    made.name = "gdsf"
    return made

"""Policies: one file each, found by name here and made from the bytes they are to fill.

`Belady` is not among them: it needs the future.
"""

from __future__ import annotations

from collections.abc import Callable

from kvweave.keep.arc import ARC
from kvweave.keep.base import UNKNOWN, Facts, Policy
from kvweave.keep.belady import Belady, Future
from kvweave.keep.dead import DeadFirst
from kvweave.keep.declared import Declared
from kvweave.keep.gdsf import GDSF
from kvweave.keep.lfu import LFU
from kvweave.keep.lru import LRU
from kvweave.keep.reuse import ReuseTime
from kvweave.keep.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "gdsf": GDSF,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "reuse": ReuseTime,
    "dead_first": DeadFirst,
    "declared": Declared,
}

__all__ = [
    "ARC", "GDSF", "LFU", "LRU", "POLICIES", "S3FIFO", "UNKNOWN", "Belady", "DeadFirst", "Declared",
    "Facts", "Future", "Policy", "ReuseTime",
]  # fmt: skip

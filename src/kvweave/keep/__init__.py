"""Policies: one file each, found by name here."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.keep.base import Policy
from kvweave.keep.lru import LRU

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU}

__all__ = ["LRU", "POLICIES", "Policy"]

"""The memory that a token policy's rows may take, as it asks for it (`weave/account.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvweave.run.base import Ints, LayerInfo


class Room(Protocol):
    """Charges what a context is about to take."""

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows in all. Raises OverBudget, OverQuota."""
        ...

    def may_take(self, n: int, info: LayerInfo) -> bool:
        """Tell whether ``n`` rows of a head of a layer may come to those there are."""
        ...

    def below(self, layer: int, slots: Sequence[Ints], info: LayerInfo, coded: bool) -> list[Ints]:
        """Return which of each head's rows are to rest below memory: ``slots``, or more."""
        ...

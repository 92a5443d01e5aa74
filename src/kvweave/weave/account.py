"""The memory of one context while an answer is under way: charged before it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import OverBudget, OverQuota
from kvweave.run.base import Ints, LayerInfo
from kvweave.run.loop import Request
from kvweave.run.packed import less
from kvweave.store.shelf import Shelf
from kvweave.weave.keeping import n_left
from kvweave.weave.state import State


@dataclass(frozen=True, slots=True)
class Account:
    """What the rows of ``state`` and what is known of them take while ``request`` decodes."""

    shelf: Shelf
    state: State
    request: Request
    itemsize: int

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows in all. Raises OverBudget, OverQuota."""
        rows = self.state.rows
        self.shelf.charge(self.state.name, self._bytes(rows.bytes_for(n, exact=True)))
        rows.reserve(n, exact=True)

    def may_take(self, n: int, info: LayerInfo) -> bool:
        """Tell whether ``n`` rows of a head of a layer may come to those there are, and those decoded next."""
        return self.may_grow(n * (info.shape.k_dim + info.shape.v_dim) * self.itemsize)

    def may_grow(self, n_bytes: int) -> bool:
        """Tell whether rows may take so many bytes more, and those decoded next: they are charged then."""
        state, rows = self.state, self.state.rows
        ahead = 0 if state.keeper is None else state.keeper.ahead(self.request)
        least = self._bytes(rows.bytes_for(rows.n + ahead, exact=True) + n_bytes)
        if least <= dict(self.shelf.charged()).get(state.name, 0):
            return True
        return charged(self.shelf, state.name, least)

    def below(self, layer: int, slots: Sequence[Ints], info: LayerInfo, coded: bool) -> list[Ints]:
        """Return each head's ``slots``, which are to rest below memory, and all that rest there where
        there is no room for those that come back. ``coded``: what goes there may take less than a row."""
        was = self.state.rows.below(layer)
        up = sum(len(less(a, b)) for a, b in zip(was, slots, strict=True))
        down = sum(len(less(b, a)) for a, b in zip(was, slots, strict=True))
        more = up - (0 if coded else down)
        if not up or self.may_take(more, info):
            return list(slots)
        return [np.union1d(a, b) for a, b in zip(was, slots, strict=True)]

    def _bytes(self, room: int) -> int:
        n = self.state.rows.n
        return self.state.bytes_for(room, n, n, n_left(self.request))


def charged(shelf: Shelf, name: str, n_bytes: int) -> bool:
    """Charge a context with ``n_bytes`` in all; tell whether there is room for them."""
    try:
        shelf.charge(name, n_bytes)
    except (OverBudget, OverQuota):
        return False
    return True

"""The rows of one layer that rest as they were computed, where each kv head keeps its own.

Heads that keep as many rows each stand in one tensor, so that one attention reads all of them. What
changes which rows there are makes copies, each row of which is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.layers import span_of
from kvweave.run.packed import among
from kvweave.run.upload import up


@dataclass(slots=True)
class HeadRows:
    """The rows that one head keeps, one after the other, room for those to come behind them."""

    slots: Ints  # increasing, as many as there are rows
    k: Tensor  # [row, dim]
    v: Tensor

    def kept(self, slots: Ints, into: tuple[Tensor, Tensor] | None = None) -> HeadRows:
        """Copy the rows of those of ``slots`` that are here, with room for the others; ``into`` keys and
        values [slot, dim]."""
        there = np.flatnonzero(among(slots, self.slots))
        rows = np.searchsorted(self.slots, slots[there])
        span = span_of(there)
        to = up(there, self.k.device) if span is None else span
        of = where(rows, self.k.device)
        made = []
        for i, old in enumerate((self.k, self.v)):
            new = old.new_empty(len(slots), old.shape[1]) if into is None else into[i]
            if isinstance(of, Tensor) and span is not None:
                torch.index_select(old, 0, of, out=new[span])
            else:
                new[to] = old[of]
            made.append(new)
        return HeadRows(slots, *made)

    def write(self, slots: Ints, keys: Tensor, values: Tensor) -> None:
        """Write rows [slot, dim] of slots that are kept; leave out the others."""
        rows = np.searchsorted(self.slots, slots)
        there = rows < len(self.slots)
        there[there] = self.slots[rows[there]] == slots[there]
        to = where(rows[there], keys.device)
        if not there.all():
            some = where(np.flatnonzero(there), keys.device)
            keys, values = keys[some], values[some]
        self.k[to], self.v[to] = keys, values

    def at(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return keys and values of some rows."""
        of = where(rows, self.k.device)
        return self.k[of], self.v[of]

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def row_bytes(self) -> int:
        return sum(t.shape[1] * t.element_size() for t in (self.k, self.v))


@dataclass(slots=True)
class Heads:
    """The rows of each head, and where these have as many each, ``slots`` [head, row], ``k`` and ``v``
    [head, row, dim] of all of them, of which those of ``each`` are views."""

    each: list[HeadRows]
    slots: Ints | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def kept(self, wanted: Sequence[Ints]) -> Heads:
        """Copy the rows of each head's ``wanted`` slots, as `HeadRows.kept` does."""
        n = len(wanted[0])
        if any(len(slots) != n for slots in wanted):
            pairs = zip(self.each, wanted, strict=True)
            return Heads([head.kept(slots) for head, slots in pairs])
        one, slots = self.each[0], np.stack(wanted)
        k, v = (t.new_empty(len(wanted), n, t.shape[1]) for t in (one.k, one.v))
        each = zip(self.each, slots, k, v, strict=True)
        return Heads([head.kept(own, (a, b)) for head, own, a, b in each], slots, k, v)


def tail_of(slots: Ints, capacity: int) -> int:
    """Return the slot from which on none is missing."""
    missing = np.flatnonzero(slots != np.arange(capacity - len(slots), capacity))
    return capacity - len(slots) + (int(missing[-1]) + 1 if len(missing) else 0)


def where(rows: Ints, device: torch.device) -> slice | Tensor:
    """Return an index of increasing ``rows``, a slice where they follow each other."""
    span = span_of(rows)
    return up(rows, device) if span is None else span

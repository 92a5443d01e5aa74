"""How much chunks read of one another: attention mass recorded while their rows are computed.

Recorded are texts prefilled behind other parts, generated answers, and stored chunks all of whose
rows are recomputed; only when the context's strategy asks for it (``records``), since the weights
of attention have to be written out then. An answer and the thinking block before it count as one.
Of a slice of a chunk nothing is recorded; it finds its rows in the record of the whole chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.chunk.table import Table
from kvweave.run.base import Observer
from kvweave.run.kernel import added
from kvweave.run.upload import up
from kvweave.weave.parts import Part, Placement

LIMIT = 64 << 20  # bytes of all that is known: of 16 million tokens

_Floats = NDArray[np.float32]


class Reads(Observer):
    """Attention that computed rows pay to each part of their context: ``mass`` [row, part], mean
    over heads and layers."""

    def __init__(
        self,
        placed: Sequence[Placement],
        n_rows: int,
        n_new: int,
        n_layers: int,
        device: torch.device,
    ) -> None:
        sizes = [p.part.n for p in placed] + [n_new]
        # [slot] the part it belongs to
        self.owner = up(np.repeat(np.arange(len(sizes)), sizes), device)
        self.mass = torch.zeros(n_rows + n_new, len(sizes), device=device)
        self.n_layers = n_layers
        self._passing: list[tuple[int, Tensor]] = []
        self._host: _Floats | None = None  # mass, brought down once

    def begin(self) -> None:
        """Forget a pass that did not end."""
        self._passing.clear()

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Note what one piece of one layer paid."""
        paid = weights.mean(0) / self.n_layers
        found = paid.new_zeros(paid.shape[0], self.mass.shape[1])
        whose = self.owner[begin : begin + paid.shape[1]].expand_as(paid)
        self._passing.append((first, added(found, whose, paid)))

    def end(self) -> None:
        """Add it up."""
        for first, found in self._passing:
            self.mass[first : first + len(found)] += found
        self._passing.clear()
        self._host = None

    def of(self, start: int, stop: int) -> _Floats:
        """Return the mass of rows ``[start, stop)``, on the host."""
        if self._host is None:
            self._host = self.mass.cpu().numpy()
        return self._host[start:stop]


class Dependence:
    """The latest of each chunk, within ``limit`` bytes; the least recently used go first.

    Mass is a row's attention (1 over all keys) to rows of other chunks but its base, mean over
    heads and layers: 0..1 a row.
    """

    def __init__(self, table: Table, limit: int = LIMIT) -> None:
        self.table, self.limit = table, limit
        self.n_bytes = 0
        self._known: OrderedDict[int, _Floats] = OrderedDict()

    def rows(self, id: int) -> _Floats | None:
        """Return the mass [token] each row of a chunk paid to others; None if it is unknown."""
        return self._known.get(id)

    def of(self, spans: Sequence[Placement]) -> _Floats:
        """Return the mass [row] of all rows of ``spans``, 0 where nothing is recorded."""
        found = []
        for p in spans:
            rows = self.rows(int(p.part.id))
            none = np.zeros(p.ready, np.float32)
            found.append(none if rows is None else rows[p.part.start :][: p.ready])
            if rows is not None:
                self._known.move_to_end(int(p.part.id))
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def computed(
        self, reads: Reads | None, before: Sequence[Placement], p: Placement, rows: tuple[int, int]
    ) -> None:
        """Record what the computed ``rows`` [start, stop) of a part read, if they are all of it or
        all that were missing; of a chunk repaired in part the last record stays."""
        n_rows, missing = rows[1] - rows[0], p.part.n - p.ready
        if reads is None or p.part.n < self.table.get(p.part.id).n_tokens:
            return
        if n_rows == p.part.n:
            self.note(p.part, 0, reads.of(*rows), before)
        elif 0 < missing <= n_rows:
            self.note(p.part, p.ready, reads.of(rows[1] - missing, rows[1]), before)

    def note(self, part: Part, first: int, mass: _Floats, before: Sequence[Placement]) -> None:
        """Record ``mass`` [row, part] that rows of ``part`` from ``first`` on paid to the parts
        ``before`` it. Rows from 0 on replace what was known; later ones add to it."""
        id = int(part.id)
        base = self.table.get(part.id).base
        known = self._remove(id)
        now = known if first and known is not None else np.zeros(part.n, np.float32)
        mass = mass[:, : len(before)]
        others = [i for i, p in enumerate(before) if p.part.id != base]
        now[first : first + len(mass)] = mass[:, others].sum(1)
        self._known[id] = now
        self.n_bytes += now.nbytes
        while self.n_bytes > self.limit:
            self._remove(next(iter(self._known)))

    def drop(self, id: int) -> None:
        """Forget what is known of a chunk."""
        self._remove(id)

    def _remove(self, id: int) -> _Floats | None:
        known = self._known.pop(id, None)
        self.n_bytes -= 0 if known is None else known.nbytes
        return known

"""How much chunks read of one another: attention mass recorded while their rows are computed.

Recorded are texts prefilled behind other parts, generated answers, and stored chunks all of whose
rows are recomputed; only when the context's strategy asks for it (``records``), since the weights
of attention have to be written out then. An answer and the thinking block before it count as one.
Of a slice of a chunk nothing is recorded; it finds its rows in the record of the whole chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.chunk.table import Table
from kvweave.run.attention import Reads
from kvweave.weave.parts import Part, Placement

LIMIT = 64 << 20  # bytes of all records: those of 16 million tokens
PAIR = 16  # bytes counted for one pair of ids


@dataclass(slots=True)
class Record:
    """What one chunk's rows read of others: ``rows`` [token] float32, and the sum per other id."""

    rows: Tensor
    by: dict[int, float] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return self.rows.numel() * 4 + len(self.by) * PAIR


class Dependence:
    """The latest record of each chunk, within ``limit`` bytes; the least recently used go first.

    Mass is a row's attention (1 over all keys) to rows of other chunks but its base, mean over
    heads and layers: 0..1 a row.
    """

    def __init__(self, table: Table, limit: int = LIMIT) -> None:
        self.table, self.limit = table, limit
        self.n_bytes = 0
        self._records: OrderedDict[int, Record] = OrderedDict()

    def rows(self, id: int) -> Tensor | None:
        """Return the mass [token] each row of a chunk paid to others; None if it is unknown."""
        found = self._records.get(id)
        return None if found is None else found.rows

    def on(self, id: int) -> dict[int, float]:
        """Return the mass a chunk's rows paid in all to each other chunk's id, which may be gone by
        now; {} if unknown."""
        found = self._records.get(id)
        return {} if found is None else dict(found.by)

    def of(self, spans: Sequence[Placement]) -> Tensor:
        """Return the mass [row] of all rows of ``spans``, 0 where nothing is recorded."""
        found = []
        for p in spans:
            rows = self.rows(int(p.part.id))
            found.append(torch.zeros(p.ready) if rows is None else rows[p.part.start :][: p.ready])
            if rows is not None:
                self._records.move_to_end(int(p.part.id))
        return torch.cat(found) if found else torch.empty(0)

    def computed(
        self, reads: Reads | None, before: Sequence[Placement], p: Placement, rows: tuple[int, int]
    ) -> None:
        """Record what the computed ``rows`` [start, stop) of a part read, if they are all of it or
        all that were missing; of a chunk repaired in part the last record stays."""
        n_rows, missing = rows[1] - rows[0], p.part.n - p.ready
        if reads is None or p.part.n < self.table.get(p.part.id).n_tokens:
            return
        if n_rows == p.part.n:
            self.note(p.part, 0, reads.mass[slice(*rows)], before)
        elif 0 < missing <= n_rows:
            self.note(p.part, p.ready, reads.mass[rows[1] - missing : rows[1]], before)

    def note(self, part: Part, first: int, mass: Tensor, before: Sequence[Placement]) -> None:
        """Record ``mass`` [row, part] that rows of ``part`` from ``first`` on paid to the parts
        ``before`` it. Rows from 0 on replace what was known; later ones add to it."""
        id = int(part.id)
        base = self.table.get(part.id).base
        known = self._remove(id)
        record = known if first and known is not None else Record(torch.zeros(part.n))
        mass = mass[:, : len(before)].cpu()
        others = [i for i, p in enumerate(before) if p.part.id != base]
        record.rows[first : first + mass.shape[0]] = mass[:, others].sum(1)
        for i, total in zip(others, mass[:, others].sum(0).tolist(), strict=True):
            other = int(before[i].part.id)
            record.by[other] = record.by.get(other, 0.0) + total
        self._records[id] = record
        self.n_bytes += record.n_bytes
        while self.n_bytes > self.limit:
            self._remove(next(iter(self._records)))

    def drop(self, id: int) -> None:
        """Forget what is known of a chunk."""
        self._remove(id)

    def _remove(self, id: int) -> Record | None:
        record = self._records.pop(id, None)
        self.n_bytes -= 0 if record is None else record.n_bytes
        return record


def new_reads(placed: Sequence[Placement], n_rows: int, n_new: int, device: torch.device) -> Reads:
    """Return empty sums for ``n_rows`` computed and ``n_new`` generated rows of a context."""
    sizes = torch.tensor([p.part.n for p in placed] + [n_new])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    mass = torch.zeros(n_rows + n_new, len(sizes), device=device)
    return Reads(owner.to(device), mass)

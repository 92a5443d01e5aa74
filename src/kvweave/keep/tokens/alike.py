"""Which rows of a layer are like each other, found again at each choice without comparing all pairs.

Of a row one thing takes comparing it with all others: the newest that is like it. That is remembered,
and looked for again only where the row or the one it names is another than at the choice before::

    rows that came       x all rows     what is like them; are they newer than what was like the others
    rows whose like went x all rows
    all the rest                        a row's cosines with all others add up to its product with their sum
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.run.kernel import added

BLOCK = 64  # rows whose cosines with all others are in memory at once
ROW_BYTES = 12  # what is known of a row of one head
NONE, GONE = -1, -2  # in the place of a slot: nothing is like the row; what was is not there
ODD = -1640531527  # Knuth's multiplier, 2^32 over the golden ratio, as a signed integer


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a choice found of the rows [kv_head, row] of a layer, packed as it was shown them; int32.

    A row is known again by its slot and the bits of its key: nobody has to tell what became of slots.
    """

    slots: Tensor  # `GONE`: no row
    marks: Tensor  # of the keys
    newest: Tensor  # the slot of the newest row like it, or `NONE`, or `GONE`

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slots, self.marks, self.newest

    def found(self, slots: Tensor, there: Tensor, marks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return of rows [kv_head, row] which were known, of which the newest that is like them is
        known too, and its column, `NONE` where nothing is."""
        heads, n = slots.shape
        last = max(int(slots.masked_fill(~there, 0).max()), int(self.slots.max()))
        column = slots.new_full((heads, last + 3), NONE)  # behind the slots: padding, nothing
        at = slots.masked_fill(~there, last + 1)
        column.scatter_(1, at, torch.arange(n, device=slots.device).expand(heads, n))
        column[:, last + 1 :] = NONE
        here = column.gather(1, self.slots.long().masked_fill(self.slots < 0, last + 2))
        same = (here >= 0) & (marks.gather(1, here.clamp(min=0)) == self.marks)
        to = torch.where(same, here, n)
        known = there.new_zeros(heads, n + 1).scatter_(1, to, True)[:, :n]
        known &= there
        newest = self.newest.new_full((heads, n + 1), GONE).scatter_(1, to, self.newest)[:, :n]
        like = column.gather(1, newest.long().masked_fill(newest < 0, last + 2))
        right = (like >= 0) & known.gather(1, like.clamp(min=0)) | (newest == NONE)
        return known, known & right, like


def newest_like(
    units: Tensor, there: Tensor, alike: float, known: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Return [kv_head, row] the column of the newest row with which each of ``units`` [kv_head, row,
    dim] has a cosine above ``alike``, `NONE` where there is none. A row's cosine with itself is 0.

    ``known`` is what `Likeness.found` found of it. Blocks of rows at a time: memory grows with the rows,
    not with their square.
    """
    heads, n = there.shape
    # columns counted from 1, in floats: what is alike is 0 or 1, times the column, and the most counts
    number = torch.arange(1, n + 1, dtype=units.dtype, device=units.device).expand(heads, n)
    came, todo, newest = there, there, torch.zeros_like(number)
    if known is not None:
        came, todo = there & ~known[0], there & ~known[1]
        newest = (known[2] + 1).to(units.dtype).masked_fill(todo, 0)
    column, row = number * there, number * came
    n_todo, n_came = int(todo.sum(-1).max()), int(came.sum(-1).max())
    which = todo.int() + came.int()  # what came goes first
    order = which.argsort(dim=-1, descending=True, stable=True)
    for first in range(0, n_todo, BLOCK):
        rows = order[:, first : min(n_todo, first + BLOCK)]
        cosines = rows_of(units, rows) @ units.transpose(1, 2)  # [kv_head, row, row]
        like = cosines.scatter_(2, rows[..., None], 0).gt_(alike)
        if known is not None and first < n_came:  # rows that came are like rows that were there
            new = (like * row.gather(1, rows)[..., None]).amax(1) * there
            newest = torch.maximum(newest, new)
        own = like.mul_(column[:, None]).amax(-1) * todo.gather(1, rows)
        newest.scatter_(1, rows, torch.maximum(newest.gather(1, rows), own))
    return newest.long() - 1


def marked(keys: Tensor) -> Tensor:
    """Return int32 [kv_head, row] that tell ``keys`` [kv_head, row, dim] from others, by their bits."""
    bits = keys.view(torch.int16 if keys.element_size() == 2 else torch.int32).int()
    odd = (2 * torch.arange(bits.shape[-1], device=keys.device) + 1) * ODD  # products wrap
    return (bits * odd.int()).sum(-1, dtype=torch.int32)


def others(units: Tensor, there: Tensor, newest: Tensor) -> Tensor:
    """Return [kv_head, row]: the mean over rows of the cosines with each of ``units``, 0 for padding.

    Each row leaves itself out, and the ``newest`` that is like it; as the authors' code of R-KV does,
    the first row where none is.
    """
    number = torch.arange(units.shape[1], device=units.device)
    front = there.int().argmax(-1, keepdim=True)
    left_out = torch.where(newest < 0, front, newest)
    cosines = (units * rows_of(units, left_out)).sum(-1).masked_fill(left_out == number, 0)
    total = (units @ units.sum(1)[..., None])[..., 0] - units.square().sum(-1)
    added(total, left_out, -cosines)
    return total / there.sum(-1, keepdim=True).clamp(min=1)


def rows_of(units: Tensor, rows: Tensor) -> Tensor:
    """Return [kv_head, some, dim] of ``units`` [kv_head, row, dim] those of ``rows`` [kv_head, some]."""
    heads, n, dim = units.shape
    first = n * torch.arange(heads, device=rows.device)[:, None]
    return units.reshape(-1, dim)[(rows + first).flatten()].view(*rows.shape, dim)

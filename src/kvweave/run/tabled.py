"""Values in few bits, as FBGEMM adds them up (`run/bags.py`): behind the symbols of each grid stand its
scale and its first value, so that nothing is laid out anew for a token.

::

    8 bits   a byte a symbol                               float32 scale, first    64 channels a grid
    4, 2     two or four a byte, the first lowest          float16 scale, first    32 channels a grid

Where 64 or 32 do not divide the channels of a row, all of them have one grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.upload import up

GROUPS = {8: 64, 4: 32, 2: 32}  # channels that share a grid
NUMBERS = {8: torch.float32, 4: torch.float16, 2: torch.float16}  # of scales and first values
LARGE = 2.0**15  # the largest value that float16 is asked to hold: a scale is less
TINY = 2.0**-120  # the least scale in float32, as in `store/codec/grid.py`
LEAST = 2.0**-24  # what float16 can tell from 0


@dataclass(frozen=True, slots=True)
class TabledRows:
    """Rows [row, dim] of ``bits`` bits a value, read as ``dtype``; numbers are times ``unit``, a power of 2,
    which is 1 unless some are larger than float16 holds."""

    bits: int
    dim: int
    dtype: torch.dtype
    q: Tensor  # [row, group, byte] uint8
    unit: float = 1.0

    @classmethod
    def of(cls, rows: Tensor, bits: int) -> TabledRows:
        """Code ``rows`` [row, dim]."""
        n, dim = rows.shape
        groups, most = groups_of(dim, bits), (1 << bits) - 1
        x, unit = rows.float().view(n, groups, dim // groups), 1.0
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        if bits == 8:
            first, scale = low, (high / most - low / most).clamp_min(TINY)
        else:
            large = float(torch.maximum(high, -low).max()) if n else 0.0
            while large > LARGE * unit and unit < 2.0**120:
                unit *= 2
            x, low, high = x / unit, low / unit, high / unit
            first = low.to(torch.float16).float()
            first = torch.where(first > low, first - first.abs() * 2.0**-10 - LEAST, first)
            first = first.to(torch.float16)
            scale = ((high - first.float()) / most * (1 + 2.0**-10) + LEAST).to(torch.float16)
        q = ((x - first.float()) / scale.float()).round_().clamp_(0, most).to(torch.uint8)
        ends = torch.cat((scale, first), -1).contiguous().view(torch.uint8)
        return cls(bits, dim, rows.dtype, torch.cat((_packed(q, bits), ends), -1), unit)

    @property
    def n(self) -> int:
        """Rows."""
        return self.q.shape[0]

    @property
    def n_bytes(self) -> int:
        return self.q.nbytes

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the scale and the first value of each grid [row, group], but for ``unit``."""
        both = self.q.view(NUMBERS[self.bits])[..., -2:].float()
        return both[..., 0], both[..., 1]

    def symbols(self) -> Tensor:
        """Return uint8 [row, group, channel of it]."""
        size, each = self.dim // self.q.shape[1], 8 // self.bits
        q = self.q[..., : -(-size // each)]
        if each > 1:
            mask = (1 << self.bits) - 1
            q = torch.stack([(q >> (self.bits * i)) & mask for i in range(each)], -1).flatten(2)
        return q[..., :size]

    def values(self) -> Tensor:
        """Return all rows [row, dim]."""
        scale, first = self.ends()
        made = self.symbols().to(torch.float32).mul_(scale[..., None]).add_(first[..., None])
        made = made.view(self.n, self.dim)
        return (made if self.unit == 1 else made.mul_(self.unit)).to(self.dtype)

    def mixed(self, weights: Tensor) -> Tensor:
        """Return ``weights`` [head, query, row] times all values, [head, query, dim]; rows are those of head
        0, then of head 1, as many of each. Each grid's scale comes to the weights, which is less to compute."""
        heads, n, rows = weights.shape
        groups = self.q.shape[1]
        scale, first = (t.to(weights.dtype).view(heads, rows, groups) for t in self.ends())
        symbols = self.symbols().to(weights.dtype).view(heads, rows, groups, -1)
        found = (weights @ first)[..., None].repeat(1, 1, 1, symbols.shape[-1])
        for group in range(groups):
            found[:, :, group] += (weights * scale[:, None, :, group]) @ symbols[:, :, group]
        found = found.view(heads, n, self.dim)
        return found if self.unit == 1 else found.mul_(self.unit)

    def part(self, rows: slice) -> TabledRows:
        """Return a view of some rows."""
        return replace(self, q=self.q[rows])

    def at(self, rows: Ints) -> TabledRows:
        """Return a copy of some rows."""
        return replace(self, q=self.q[up(rows, self.q.device)])

    def changed(self, where: Tensor, rows: TabledRows) -> TabledRows:
        """Return these rows with others in the place of some."""
        unit = max(self.unit, rows.unit)
        q = self._times(unit).q.clone()
        q[where] = rows._times(unit).q
        return replace(self, q=q, unit=unit)

    def joined(self, some: Sequence[TabledRows]) -> TabledRows:
        """Return ``some`` rows like these one after the other."""
        unit = max(each.unit for each in some)
        return replace(self, q=torch.cat([each._times(unit).q for each in some]), unit=unit)

    def _times(self, unit: float) -> TabledRows:
        """Return the same rows in another unit, no smaller."""
        if unit == self.unit:
            return self
        made = replace(self, q=self.q.clone(), unit=unit)
        made.q.view(NUMBERS[self.bits])[..., -2:] *= self.unit / unit
        return made


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of one row."""
    groups = groups_of(dim, bits)
    return groups * (_bytes(dim // groups, bits) + 2 * NUMBERS[bits].itemsize)


def groups_of(dim: int, bits: int) -> int:
    """Return the grids of a row."""
    size = GROUPS[bits]
    return dim // size if dim and dim % size == 0 else 1


def _bytes(n: int, bits: int) -> int:
    """Return the bytes of ``n`` symbols, so many that numbers behind them are aligned."""
    wide = NUMBERS[bits].itemsize
    return -(-n * bits // (8 * wide)) * wide


def _packed(q: Tensor, bits: int) -> Tensor:
    """Return symbols [..., symbol] as bytes."""
    each, n = 8 // bits, q.shape[-1]
    q = torch.nn.functional.pad(q, (0, _bytes(n, bits) * each - n))
    q = q.view(*q.shape[:-1], q.shape[-1] // each, each)
    made = q[..., 0].clone()
    for i in range(1, each):
        made |= q[..., i] << (bits * i)
    return made

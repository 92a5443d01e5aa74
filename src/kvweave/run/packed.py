"""Rows in few bits, packed: what rests of rows that are worth less than others (`run/thinned.py`).

Each row and head has grids of its own, a scale and a middle for every 32 channels: rows come and go
one at a time. Keys take more bits than values, since an error in a key changes which rows are read
and one in a value only what is read there (DiffKV, arXiv 2412.03131, section 3)::

    bytes of a row of 128 + 128 channels:   bfloat16 512 | int8 288 | k8v4 224 | int4 160 | k4v2 128

A byte holds channels that are far from each other (of 4 bits: ``c`` and ``c + dim / 2``), so that each
nibble is a run of channels when it is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.upload import up
from kvweave.store.codec import grid
from kvweave.store.kv import LayerShape

GROUP = 32  # channels that share a grid
FORMS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4), "k4v2": (4, 2)}  # bits of keys, values
ORDER = tuple(FORMS)  # a row goes to a later one only: what was rounded off does not come back


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows [row, dim] of ``bits`` bits a value, read as ``dtype``."""

    bits: int
    dim: int
    dtype: torch.dtype
    q: Tensor  # [row, byte] uint8
    grids: Tensor  # [2, group, row] bfloat16: scale, middle
    across: bool = False  # a byte of all rows lies together in memory, not a row's bytes

    @classmethod
    def of(cls, rows: Tensor, bits: int, across: bool = False) -> PackedRows:
        """Code ``rows`` [row, dim]."""
        n, dim = rows.shape
        x = rows.float().view(n, _groups(dim), dim // _groups(dim))
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        middle = (low / 2 + high / 2).to(torch.bfloat16)
        reach = torch.maximum(high - middle.float(), middle.float() - low)
        scale = grid.rounded_up(reach * (2 / ((1 << bits) - 1)))
        q = grid.symbols(x, scale, middle, 1 << bits).view(n, dim)
        each = 8 // bits
        q = torch.nn.functional.pad(q, (0, -dim % each)).view(n, each, -1)
        packed = q[:, 0].clone()
        for i in range(1, each):
            packed |= q[:, i] << (bits * i)
        grids = torch.stack((scale, middle)).squeeze(-1).transpose(1, 2).contiguous()
        packed = packed.t().contiguous().t() if across else packed
        return cls(bits, dim, rows.dtype, packed, grids, across)

    @property
    def n_bytes(self) -> int:
        return self.q.nbytes + self.grids.nbytes

    @property
    def half(self) -> float:
        """The symbol that a middle has."""
        return ((1 << self.bits) - 1) / 2

    def values(self) -> Tensor:
        """Return all rows [row, dim]."""
        scale, first = (each.t().contiguous() for each in self.ends(torch.float32))
        if self.bits == 8:  # bytes are channels: all grids at once
            groups = scale.shape[1]
            wide = self.q.to(torch.float32).view(len(self.q), groups, self.dim // groups)
            whole = wide.mul_(scale[..., None]).add_(first[..., None])
            return whole.view(len(self.q), self.dim).to(self.dtype)
        made = torch.empty(len(self.q), self.dim, dtype=torch.float32, device=self.q.device)
        for group, channels, symbols in self.runs(torch.float32):
            one = slice(group, group + 1)
            made[:, channels] = symbols.mul_(scale[:, one]).add_(first[:, one])
        return made.to(self.dtype)

    def ends(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the scale and the first value [group, row] of each grid."""
        scale, middle = self.grids.to(dtype)
        return scale, torch.sub(middle, scale, alpha=self.half)

    def planes(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of channels that have the same bits of each byte, and symbols uint8 [row, channel]."""
        q, width, mask = self.q[rows], self.q.shape[1], (1 << self.bits) - 1
        for i in range(8 // self.bits):
            first, last = i * width, min(self.dim, (i + 1) * width)
            if first >= last:
                return
            whole = q >> (self.bits * i) if i else q
            symbols = whole & mask if (i + 1) * self.bits < 8 else whole
            yield slice(first, last), symbols[:, : last - first]

    def runs(self, dtype: torch.dtype) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield, for runs of channels of one grid, its number, the channels, and symbols [row, channel]."""
        size = self.dim // self.grids.shape[1]
        for channels, symbols in self.planes(slice(None)):
            wide, first = symbols.to(dtype), channels.start
            while first < channels.stop:
                stop = min(channels.stop, (first // size + 1) * size)
                part = wide[:, first - channels.start : stop - channels.start]
                yield first // size, slice(first, stop), part
                first = stop

    def part(self, rows: slice) -> PackedRows:
        """Return a view of some rows."""
        return replace(self, q=self.q[rows], grids=self.grids[..., rows])

    def at(self, rows: Ints) -> PackedRows:
        """Return a copy of some rows."""
        where = up(rows, self.q.device)
        grids = self.grids[..., where]
        if self.across:  # on CPUs: numpy takes columns four times as fast as torch
            return replace(
                self, q=torch.from_numpy(self.q.t().numpy().take(rows, 1)).t(), grids=grids
            )
        return replace(self, q=self.q[where], grids=grids)

    def changed(self, where: Tensor, rows: PackedRows) -> PackedRows:
        """Return these rows with others in the place of some."""
        q, grids = self.q.clone(), self.grids.clone()
        q[where], grids[..., where] = rows.q, rows.grids
        return replace(self, q=q, grids=grids)

    def joined(self, some: Sequence[PackedRows]) -> PackedRows:
        """Return ``some`` rows like these one after the other."""
        every, grids = [each.q for each in some], torch.cat([each.grids for each in some], -1)
        q = torch.cat([q.t() for q in every], 1).t() if self.across else torch.cat(every)
        return replace(self, q=q, grids=grids)


@dataclass(frozen=True, slots=True)
class CodedHead:
    """The rows of one head in one form."""

    slots: Ints  # increasing
    k: PackedRows
    v: PackedRows

    def at(self, rows: Ints | slice) -> tuple[Tensor, Tensor]:
        """Return keys and values [row, dim] of some of them."""
        k, v = self.k, self.v
        some = (k.part(rows), v.part(rows)) if isinstance(rows, slice) else (k.at(rows), v.at(rows))
        return some[0].values(), some[1].values()


@dataclass(frozen=True, slots=True)
class CodedLevel:
    """Rows of one layer that rest in one form; ``k`` and ``v`` hold those of head 0, then of head 1, ...

    Nothing is changed in place: what changes it returns another, and contexts may share it.
    """

    form: str
    slots: tuple[Ints, ...]  # of each head, increasing
    k: PackedRows
    v: PackedRows

    @classmethod
    def of(
        cls, form: str, slots: Sequence[Ints], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> CodedLevel:
        """Code keys and values [row, dim] of each head's ``slots``."""
        (k_bits, v_bits), k, v = FORMS[form], torch.cat(list(keys)), torch.cat(list(values))
        across = k.is_cpu  # as scores are added up: `run/bags.py`
        packed = PackedRows.of(k, k_bits, across), PackedRows.of(v, v_bits)
        return cls(form, tuple(slots), *packed)

    @property
    def n(self) -> int:
        """Rows, of all heads."""
        return sum(map(len, self.slots))

    @property
    def n_bytes(self) -> int:
        return self.k.n_bytes + self.v.n_bytes

    def only(self, slots: Sequence[Ints]) -> CodedLevel:
        """Return those rows whose slots are among each head's ``slots``."""
        stay = [np.isin(own, some) for own, some in zip(self.slots, slots, strict=True)]
        if all(each.all() for each in stay):
            return self
        rows = np.flatnonzero(np.concatenate(stay))
        left = tuple(own[which] for own, which in zip(self.slots, stay, strict=True))
        return replace(self, slots=left, k=self.k.at(rows), v=self.v.at(rows))

    def without(self, slots: Sequence[Ints]) -> CodedLevel:
        """Return those rows whose slots are not."""
        kept = zip(self.slots, slots, strict=True)
        return self.only([less(own, some) for own, some in kept])

    def joined(self, more: CodedLevel) -> CodedLevel:
        """Return these rows and ``more`` of the same form, which stand in other slots."""
        pairs = list(zip(self.slots, more.slots, strict=True))
        if all(not len(a) or not len(b) or a[-1] < b[0] for a, b in pairs):
            slots = [np.concatenate(both) for both in pairs]
            heads = [x.of_head(i) for i in range(len(pairs)) for x in (self, more)]
            k, v = self.k.joined([x.k for x in heads]), self.v.joined([x.v for x in heads])
            return replace(self, slots=tuple(slots), k=k, v=v)
        slots, order, at, behind = [], [], 0, self.n
        for own, other in pairs:
            rows = np.concatenate((at + np.arange(len(own)), behind + np.arange(len(other))))
            both = np.concatenate((own, other))
            sort = np.argsort(both)
            slots.append(both[sort])
            order.append(rows[sort])
            at, behind = at + len(own), behind + len(other)
        rows = np.concatenate(order)
        k, v = (a.joined([a, b]).at(rows) for a, b in ((self.k, more.k), (self.v, more.v)))
        return replace(self, slots=tuple(slots), k=k, v=v)

    def of_head(self, head: int) -> CodedHead:
        """Return a view of one head's rows."""
        first = self._first(head)
        rows = slice(first, first + len(self.slots[head]))
        return CodedHead(self.slots[head], self.k.part(rows), self.v.part(rows))

    def _first(self, head: int) -> int:
        return sum(len(own) for own in self.slots[:head])

    def together(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [head, row, dim]; None where heads have more or fewer rows than
        each other."""
        heads, sizes = len(self.slots), {len(own) for own in self.slots}
        if len(sizes) > 1:
            return None
        k, v = self.k.values(), self.v.values()
        return k.view(heads, -1, self.k.dim), v.view(heads, -1, self.v.dim)

    def scores(self, queries: Tensor) -> Tensor:
        """Return ``queries`` [head, query, dim] times all keys [head, query, row], as `together` gives
        them: each grid's scale and middle come to what its symbols give, which is less to compute."""
        heads, n, _ = queries.shape
        scale, first = (_by_row(t, heads) for t in self.k.ends(queries.dtype))
        groups = scale.shape[-1]
        sums = queries.view(heads, n, groups, -1).sum(-1)
        found = sums @ first.transpose(1, 2)
        for group, channels, symbols in self.k.runs(queries.dtype):
            keys = symbols.view(heads, -1, symbols.shape[1]).transpose(1, 2)
            found += (queries[..., channels] @ keys) * scale[:, None, :, group]
        return found

    def mixed(self, weights: Tensor) -> Tensor:
        """Return ``weights`` [head, query, row] times all values, [head, query, dim]."""
        heads, _, n_rows = weights.shape
        scale, first = (_by_row(t, heads) for t in self.v.ends(weights.dtype))
        found = (weights @ first).repeat_interleave(self.v.dim // first.shape[-1], -1)
        for group, channels, symbols in self.v.runs(weights.dtype):
            weighed = weights * scale[:, None, :, group]
            found[..., channels] += weighed @ symbols.view(heads, n_rows, -1)
        return found

    def rewritten(self, slots: Ints, keys: Tensor, values: Tensor) -> CodedLevel:
        """Return these rows with those of ``slots`` that rest here coded anew, of ``keys`` and ``values``
        [slot, head, dim]."""
        found = []
        for own in self.slots:
            found.append(np.intersect1d(own, slots, True, return_indices=True)[1:])
        if not any(len(rows) for rows, _ in found):
            return self
        to = np.concatenate([self._first(i) + rows for i, (rows, _) in enumerate(found)])
        where, made = up(to, keys.device), []
        for packed, new in ((self.k, keys), (self.v, values)):
            some = [new[up(given, new.device), i] for i, (_, given) in enumerate(found)]
            made.append(packed.changed(where, PackedRows.of(torch.cat(some), packed.bits)))
        return replace(self, k=made[0], v=made[1])


def _by_row(ends: Tensor, heads: int) -> Tensor:
    """Return ``ends`` [group, row] of all heads' rows as [head, row, group]."""
    return ends.view(len(ends), heads, -1).permute(1, 2, 0)


def less(own: Ints, some: Ints) -> Ints:
    """Return those of ``own`` that are not among ``some``, in their order."""
    return own[np.isin(own, some, invert=True)]


def form_bytes(form: str, shape: LayerShape) -> int:
    """Return the bytes of a row of one layer, of all heads, in a form."""
    found = 0
    widths = (shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim)
    for (heads, dim), bits in zip(widths, FORMS[form], strict=True):
        found += heads * (-(-dim * bits // 8) + 4 * _groups(dim))
    return found


def _groups(dim: int) -> int:
    return dim // GROUP if dim and dim % GROUP == 0 else 1

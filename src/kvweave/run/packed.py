"""Rows in few bits, packed: what rests of rows that are worth less than others (`run/thinned.py`).

Each row and head has grids of its own, a scale and a middle for every 32 channels, of 8 bits for every
64: rows come and go one at a time. Keys take more bits than values, since an error in a key changes which
rows are read and one in a value only what is read there (DiffKV, arXiv 2412.03131, section 3)::

    bytes of a row of 128 + 128 channels:   bfloat16 512 | int8 284 | k8v4 220 | int4 160 | k4v2 128

A byte of keys holds channels that are far from each other (of 4 bits: ``c`` and ``c + dim / 2``), so that each
nibble is a run of channels when it is unpacked. Many keys of 8 bits rest on CPUs as they are added up there
(`run/bags.py`), in tiles of rows, channel by channel, with a constant behind each: 4 bytes a row of 128
channels. Values are those of `run/tabled.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.tabled import TabledRows, groups_of, row_bytes
from kvweave.run.upload import up
from kvweave.store.codec import grid
from kvweave.store.kv import LayerShape

TILE = 256  # rows whose scores are added up at once
ENDS = 8  # bytes behind a row of bytes: a scale and a first value, in float32
TILED = 1 << 12  # rows from which on keys rest in tiles
FORMS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4), "k4v2": (4, 2)}  # bits of keys, values
ORDER = tuple(FORMS)  # a row goes to a later one only: what was rounded off does not come back


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Keys [row, dim] of ``bits`` bits a value, read as ``dtype``: those of ``tiles``, and then of ``q``."""

    bits: int
    dim: int
    dtype: torch.dtype
    q: Tensor  # [row, byte] uint8
    grids: Tensor  # [2, group, row] bfloat16: scale, middle
    across: bool = False  # a byte of all rows lies together in memory, not a row's bytes
    # [tile, byte, row of the tile and `ENDS`], a scale of 1, `half` less
    tiles: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, bits: int, across: bool = False) -> PackedRows:
        """Code ``rows`` [row, dim]."""
        n, dim = rows.shape
        groups = groups_of(dim, bits)
        x = rows.float().view(n, groups, dim // groups)
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
        return cls(bits, dim, rows.dtype, packed, grids, across).tiled()

    @property
    def n(self) -> int:
        """Rows."""
        return self.grids.shape[2]

    @property
    def n_bytes(self) -> int:
        tiles = 0 if self.tiles is None else self.tiles.nbytes
        return self.q.nbytes + self.grids.nbytes + tiles

    @property
    def whole(self) -> Tensor:
        """Symbols of all rows [row, byte], a copy where there are tiles."""
        if self.tiles is None:
            return self.q
        n, width = len(self.tiles) * TILE, self.q.shape[1]
        made = self.q.new_empty(width, self.n)
        made[:, :n].view(width, -1, TILE).copy_(self.tiles[..., :TILE].transpose(0, 1))
        made[:, n:] = self.q.t()
        return made.t()

    def flat(self) -> PackedRows:
        """Return these rows without tiles."""
        return self if self.tiles is None else replace(self, q=self.whole, tiles=None)

    def tiled(self) -> PackedRows:
        """Return these rows in tiles as far as they fill some, if they are many and lie across."""
        if not self.across or self.bits < 8 or self.tiles is not None or self.n < TILED:
            return self
        columns, some = self.q.t(), self.n // TILE
        tiles = columns.new_empty(some, len(columns), TILE + ENDS)
        cut = columns[:, : some * TILE].view(len(columns), some, TILE)
        tiles[..., :TILE] = cut.transpose(0, 1)
        ends = tiles.view(torch.float32)[..., TILE // 4 :]
        ends[..., 0], ends[..., 1] = 1.0, -self.half
        return replace(self, q=columns[:, some * TILE :].clone().t(), tiles=tiles)

    @property
    def half(self) -> float:
        """The symbol that a middle has."""
        return ((1 << self.bits) - 1) / 2

    def values(self) -> Tensor:
        """Return all rows [row, dim]."""
        scale, first = (each.t().contiguous() for each in self.ends(torch.float32))
        if self.bits == 8:  # bytes are channels: all grids at once
            groups = scale.shape[1]
            wide = self.whole.to(torch.float32).view(self.n, groups, self.dim // groups)
            whole = wide.mul_(scale[..., None]).add_(first[..., None])
            return whole.view(self.n, self.dim).to(self.dtype)
        made = torch.empty(self.n, self.dim, dtype=torch.float32, device=self.q.device)
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
        q, width, mask = self.whole[rows], self.q.shape[1], (1 << self.bits) - 1
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
        """Return a view of some rows, of a copy where there are tiles."""
        return replace(self, q=self.whole[rows], grids=self.grids[..., rows], tiles=None)

    def at(self, rows: Ints) -> PackedRows:
        """Return a copy of some rows."""
        where = up(rows, self.q.device)
        grids = self.grids[..., where]
        if self.across:  # on CPUs: numpy takes columns four times as fast as torch
            q = torch.from_numpy(self.whole.t().numpy().take(rows, 1)).t()
            return replace(self, q=q, grids=grids, tiles=None).tiled()
        return replace(self, q=self.q[where], grids=grids)

    def changed(self, where: Tensor, rows: PackedRows) -> PackedRows:
        """Return these rows with others in the place of some."""
        q, grids = self.whole.clone(), self.grids.clone()
        q[where], grids[..., where] = rows.whole, rows.grids
        return replace(self, q=q, grids=grids, tiles=None).tiled()

    def joined(self, some: Sequence[PackedRows]) -> PackedRows:
        """Return ``some`` rows like these one after the other."""
        every, grids = [each.whole for each in some], torch.cat([each.grids for each in some], -1)
        q = torch.cat([q.t() for q in every], 1).t() if self.across else torch.cat(every)
        return replace(self, q=q, grids=grids, tiles=None).tiled()


@dataclass(frozen=True, slots=True)
class CodedHead:
    """The rows of one head in one form."""

    slots: Ints  # increasing
    k: PackedRows
    v: TabledRows

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
    v: TabledRows

    @classmethod
    def of(
        cls, form: str, slots: Sequence[Ints], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> CodedLevel:
        """Code keys and values [row, dim] of each head's ``slots``."""
        (k_bits, v_bits), k, v = FORMS[form], torch.cat(list(keys)), torch.cat(list(values))
        across = k.is_cpu  # as scores are added up: `run/bags.py`
        packed = PackedRows.of(k, k_bits, across)
        return cls(form, tuple(slots), packed, TabledRows.of(v, v_bits))

    @property
    def n(self) -> int:
        """Rows, of all heads."""
        return sum(map(len, self.slots))

    @property
    def n_bytes(self) -> int:
        return self.k.n_bytes + self.v.n_bytes

    def only(self, slots: Sequence[Ints]) -> CodedLevel:
        """Return those rows whose slots are among each head's ``slots``."""
        stay = [among(own, some) for own, some in zip(self.slots, slots, strict=True)]
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
            slots = [np.concatenate(pair) for pair in pairs]
            flat = [replace(x, k=x.k.flat()) for x in (self, more)]
            heads = [x.of_head(i) for i in range(len(pairs)) for x in flat]
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
        k, v = self.k.joined([self.k, more.k]).at(rows), self.v.joined([self.v, more.v]).at(rows)
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
        return self.v.mixed(weights)

    def rewritten(self, slots: Ints, keys: Tensor, values: Tensor) -> CodedLevel:
        """Return these rows with those of ``slots`` that rest here coded anew, of ``keys`` and ``values``
        [slot, head, dim]."""
        found = []
        for own in self.slots:
            found.append(shared(own, slots))
        if not any(len(rows) for rows, _ in found):
            return self
        to = np.concatenate([self._first(i) + rows for i, (rows, _) in enumerate(found)])
        where, made = up(to, keys.device), []
        for new in (keys, values):
            some = [new[up(given, new.device), i] for i, (_, given) in enumerate(found)]
            made.append(torch.cat(some))
        k, v = PackedRows.of(made[0], self.k.bits), TabledRows.of(made[1], self.v.bits)
        return replace(self, k=self.k.changed(where, k), v=self.v.changed(where, v))


def _by_row(ends: Tensor, heads: int) -> Tensor:
    """Return ``ends`` [group, row] of all heads' rows as [head, row, group]."""
    return ends.view(len(ends), heads, -1).permute(1, 2, 0)


def less(own: Ints, some: Ints) -> Ints:
    """Return those of ``own`` that are not among ``some``, in their order."""
    return own[~among(own, some)]


def among(own: Ints, some: Ints) -> NDArray[np.bool_]:
    """Tell which of the slots ``own`` are among ``some``."""
    if not len(own) or not len(some):
        return np.zeros(len(own), bool)
    there = np.zeros(max(own.max(), some.max()) + 1, bool)
    there[some] = True
    found: NDArray[np.bool_] = there[own]
    return found


def shared(own: Ints, some: Ints) -> tuple[Ints, Ints]:
    """Return where slots that both have stand in each of them, which increase."""
    at = np.searchsorted(own, some)
    both = np.flatnonzero(np.append(own, -1)[at] == some)
    return at[both], both


def form_bytes(form: str, shape: LayerShape) -> int:
    """Return the bytes of a row of one layer, of all heads, in a form, at most: few rows, and those of other
    devices than CPUs, are in no tiles."""
    (k_bits, v_bits), dim = FORMS[form], shape.k_dim
    key = -(-dim * k_bits // 8) + 4 * groups_of(dim, k_bits)
    key += -(-dim * ENDS // TILE) if k_bits == 8 else 0
    return shape.k_heads * key + shape.v_heads * row_bytes(shape.v_dim, v_bits)

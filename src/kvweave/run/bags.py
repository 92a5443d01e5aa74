"""Attention of a few rows over rows in bits, added up from the bytes themselves.

To make floats of bytes takes as long as to multiply them. FBGEMM, which torch has on x86, adds up rows
of symbols times weights without that: `embedding_bag`. Keys lie channel by channel, so that scores of 256
rows are a bag of the channels' bytes times the query; what is read is a bag of rows, times what each gets
of the attention::

    scores   bag of [channel, 256 rows] of a group's channels, times the query;  grids come on top
    read     bag of [row, 32 or 64 channels], times share

Where keys rest in tiles, and values always, they rest as FBGEMM reads them; other keys are laid out anew for
each token. Rows that rest as they are may be as many of each head or not. All in float32, as products of floats are. torch names the operations nowhere, so they are
taken only where they are there and right (docs/LOG.md, 2026-11-26 and 2026-11-27, has the times).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvweave.run.lanes import BLOCK, LaneBlock, Lanes, lanes_of, numbers
from kvweave.run.packed import ENDS, TILE, CodedLevel, PackedRows
from kvweave.run.tabled import TabledRows
from kvweave.run.written import Scaling, VisibleKV, asked_of, blocks_of, rows_of, shares_of

LEAST = 1 << 10  # rows of all heads: of fewer products are quicker, which take fewer operations
MOST = 8  # rows times the heads that share keys: more are products
BAGS = {8: "byte", 4: "4bit", 2: "2bit"}  # what rows of bits are called
_mine = threading.local()


def _bag(
    table: Tensor, rows: Tensor, begins: Tensor, weights: Tensor, kind: str = BAGS[8]
) -> Tensor:
    """Return sums [bag, column] of ``weights`` times rows of ``table`` [row, byte], behind whose symbols are its
    scale and first value; ``rows`` and ``weights`` of all bags one after the other, int32."""
    found: Tensor = _operation(kind)(table, rows, begins, False, 0, False, weights, None, False)
    return found


@cache
def _operation(kind: str) -> Callable[..., Tensor]:
    named = getattr(torch.ops.quantized, f"embedding_bag_{kind}_rowwise_offsets")
    found: Callable[..., Tensor] = named.default  # the one there is: not looked for again
    return found


def _is_right() -> bool:
    """Tell whether the operations are there, do what is said above, and are FBGEMM's."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    rows, begins = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 1], [0, 2]))
    weights = torch.tensor([0.5, -1.0, 3.0])
    some = torch.tensor([[1.0, 0.5], [2.0, -1.0], [0.25, 3.0]])[:, :1] * torch.arange(8.0) - 1
    for bits, kind in BAGS.items():
        coded = TabledRows.of(some, bits)
        values = coded.values()
        wanted = torch.stack((0.5 * values[2] - values[0], 3 * values[1]))
        try:
            found = _bag(coded.q.flatten(0, 1), rows, begins, weights, kind)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        if not torch.allclose(found[:, :8], wanted, atol=1e-5):
            return False
    return True


there = _is_right()
"""Whether this is done at all; may be set, before rows are coded."""


def _room(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a place of which nobody may keep anything, each time the same; zeros at first."""
    held: dict[str, Tensor] = _mine.__dict__
    key = f"{name} {shape}"
    if key not in held:
        with torch.inference_mode(False):  # it is written in and out of inference mode
            held[key] = torch.zeros(shape, dtype=dtype)
    return held[key]


def attended(
    query: Tensor, levels: Sequence[CodedLevel], seen: Sequence[VisibleKV], how: Scaling
) -> tuple[Tensor, Tensor]:
    """Return attention [row, head, v_dim] of ``query`` [row, head, dim], and weights [head, row, lane], over
    the rows of ``levels``, in the lanes of `lanes_of`, and then those that are ``seen``: of all heads, or of
    each its own, in front of which there are lanes of none. Every row sees all of ``levels``. For what
    they `suit` only."""
    n, heads, _ = query.shape
    lanes, most = lanes_of(levels), max(own.keys.shape[1] for own in seen)
    folded = blocks_of(query, sum(len(own.keys) for own in seen)).float() * how.scale
    shape = folded.shape[:2]
    made = folded.new_empty(*shape, lanes.n + most)
    tiled = made[..., : lanes.n].view(*shape, -1, TILE).transpose(1, 2)  # [head, tile, query, row]
    found = _scores(levels, lanes, folded)
    if how.softcap is not None:
        found.div_(how.softcap).tanh_().mul_(how.softcap)
    edges = found.index_select(0, lanes.edges).masked_fill_(lanes.beyond, -torch.inf)
    found.index_copy_(0, lanes.edges, edges)
    tiled.copy_(found.index_select(0, lanes.where.view(-1)).view(tiled.shape))
    raw = made[..., lanes.n :]
    for own, asked, to in zip(seen, _cut(folded, seen), _cut(raw, seen), strict=True):
        if own.keys.shape[1] < most:
            to[..., : most - own.keys.shape[1]] = -torch.inf
        to[..., most - own.keys.shape[1] :] = _of_raw(asked, own, how)
    weights = shares_of(made, how, n)
    raw, read = weights[..., lanes.n :].to(seen[0].values.dtype), []
    for own, mine in zip(seen, _cut(raw, seen), strict=True):
        read.append(mine[..., most - own.keys.shape[1] :] @ own.values)
    out = (read[0] if len(read) == 1 else torch.cat(read)).float()
    tiled = weights[..., : lanes.n].view(*shape, -1, TILE).transpose(1, 2)
    _mix(levels, lanes, tiled.flatten(0, 1).index_select(0, lanes.back), out)
    return rows_of(out.to(query.dtype), n), weights.reshape(heads, n, -1)


def _cut(rows: Tensor, seen: Sequence[VisibleKV]) -> Sequence[Tensor]:
    """Return the part of ``rows`` [head, ...] that is of each of those ``seen``."""
    return (rows,) if len(seen) == 1 else rows.chunk(len(seen))


def _of_raw(asked: Tensor, seen: VisibleKV, how: Scaling) -> Tensor:
    """Return scores [head, query, slot] of scaled queries [head, query, dim]."""
    scores = asked_of(asked.to(seen.keys.dtype), seen.keys)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    bias = seen.bias
    return scores if bias is None else scores + bias.repeat(asked.shape[1] // len(bias), 1)


def _scores(levels: Sequence[CodedLevel], lanes: Lanes, queries: Tensor) -> Tensor:
    """Return ``queries`` [head, query, dim] times all keys, [pair, query, row of the tile], and room for
    one pair more."""
    asked = queries.index_select(0, lanes.heads)
    made = asked.new_empty(len(asked) + 1, asked.shape[1], TILE)
    for block in lanes.blocks:
        keys, mine, some = levels[block.level].k, made[block.pairs], asked[block.pairs]
        sums = _sums(keys, block, some)
        scale, middle = _ends(keys, block)
        torch.mul(sums[:, :, 0], scale[0, :, None], out=mine)
        for group in range(1, sums.shape[2]):
            mine.addcmul_(sums[:, :, group], scale[group, :, None])
        each = some.view(*some.shape[:2], sums.shape[2], -1).sum(-1)
        mine.baddbmm_(each, middle.transpose(0, 1))
    return made


def _sums(keys: PackedRows, block: LaneBlock, asked: Tensor) -> Tensor:
    """Return ``asked`` [pair, query, dim] times how far the symbols of each group of a block's keys are from
    its middle, [pair, query, group, row of the tile]."""
    (_, n, dim), groups = asked.shape, keys.grids.shape[1]
    full = 0 if keys.tiles is None else min(block.tiles.stop, len(keys.tiles)) - block.tiles.start

    def bag(table: Tensor, some: Tensor, full: int | None) -> Tensor:
        rows, begins = numbers(block, n, 1, dim, dim // groups, full)
        return _bag(table.flatten(0, 1), rows, begins, some.reshape(-1)).view(-1, n, groups, TILE)

    if keys.tiles is None or full <= 0:
        return bag(_columns(keys, block), asked, None)
    sums = bag(keys.tiles[block.tiles], asked, full)
    if full < block.n:  # what no tile is full of
        some = bag(_columns(keys, block), asked.index_select(0, block.ragged), 0)
        sums.index_copy_(0, block.ragged, some)
    return sums


def _columns(keys: PackedRows, block: LaneBlock) -> Tensor:
    """Return symbols of those of a block's keys that are in no tiles as bytes, [tile, channel, row of the
    tile] and `ENDS`."""
    room = _table(keys.dim, keys.bits)
    begin = block.tiles.start * TILE - (0 if keys.tiles is None else len(keys.tiles) * TILE)
    columns, width = keys.q.t()[:, max(0, begin) : begin + block.n * TILE], keys.q.shape[1]
    whole, n = columns.shape[1] // TILE, columns.shape[1]
    for i in range(-(-keys.dim // width)):
        some = slice(i * width, min(keys.dim, (i + 1) * width))
        for at, to in ((0, whole), (whole, -(-n // TILE))):
            if at == to:
                continue
            cut = columns[: some.stop - some.start, at * TILE : to * TILE]
            cut = cut.view(len(cut), to - at, -1).transpose(0, 1)
            _taken(cut, keys.bits, i, room[at:to, some, : cut.shape[2]])
    return room[: -(-n // TILE)]


def _taken(rows: Tensor, bits: int, part: int, out: Tensor) -> None:
    """Write of each byte its ``part`` of ``bits`` bits, where they stand."""
    if bits == 8:
        out.copy_(rows)
    else:
        torch.bitwise_and(rows, ((1 << bits) - 1) << bits * part, out=out)


def _mix(levels: Sequence[CodedLevel], lanes: Lanes, weights: Tensor, out: Tensor) -> None:
    """Add ``weights`` [pair, query, row of the tile] times all values to ``out`` [head, query, dim]."""
    for block in lanes.blocks:
        values, mine = levels[block.level].v, weights[block.pairs]
        span, (pairs, n, _) = _span(values.n, block), mine.shape
        groups = values.q.shape[1]
        rows, begins = numbers(block, n, groups, TILE, TILE, None, span.stop - span.start)
        shares = mine[:, :, None].expand(-1, -1, groups, -1).reshape(-1)
        table, bag = values.q[span].flatten(0, 1), BAGS[values.bits]
        found = _bag(table, rows, begins, shares, bag).view(pairs, n, groups, -1)
        found = found[..., : values.dim // groups].reshape(pairs, n, -1)
        found = found if values.unit == 1 else found * values.unit
        out.index_add_(0, lanes.heads[block.pairs], found)


def _span(n: int, block: LaneBlock) -> slice:
    """Return which of its level's ``n`` rows are in a block."""
    return slice(block.tiles.start * TILE, min(n, block.tiles.stop * TILE))


def _ends(rows: PackedRows, block: LaneBlock) -> tuple[Tensor, Tensor]:
    """Return the scale and the middle of the grids of a block's pairs, [group, pair, row of the tile] each; 0
    where there is no row."""
    groups, span, n = rows.grids.shape[1], _span(rows.n, block), block.n * TILE
    room = _room("ends", 2, groups, max(BLOCK, n))[..., :n]
    room[..., : span.stop - span.start] = rows.grids[..., span]
    if span.stop - span.start < n:
        room[..., span.stop - span.start :].zero_()  # of others, and no number maybe
    scale, middle = room.view(2, groups, -1, TILE).index_select(2, block.of)
    return scale, middle


def _table(dim: int, bits: int) -> Tensor:
    """Return a place for bytes of channels [tile, channel, row of the tile], behind each of which stands what
    makes symbols less their middle of what `_taken` writes."""
    name, shape = f"columns of {bits} bits", (BLOCK // TILE, dim, TILE + ENDS)
    new = f"{name} {shape}" not in _mine.__dict__
    room = _room(name, *shape, dtype=torch.uint8)
    if new:
        width, ends = -(-dim * bits // 8), room.view(torch.float32)[..., TILE // 4 :]
        ends[..., 0] = torch.tensor([2.0 ** -(bits * (i // width)) for i in range(dim)])
        ends[..., 1] = -((1 << bits) - 1) / 2
    return room


def suit(levels: Sequence[CodedLevel], query: Tensor, n_heads: int) -> bool:
    """Tell whether this is for ``query`` [row, head, dim] over rows of ``levels`` of ``n_heads``."""
    few = len(query) * query.shape[1] // n_heads <= MOST
    if not (there and few and query.is_cpu and query.dtype != torch.float64):
        return False
    if sum(level.n for level in levels) < LEAST:
        return False
    return all(level.k.across and _fits(level.k) for level in levels)


def _fits(keys: PackedRows) -> bool:
    """Tell whether the channels of each part of bytes are one group's, or some groups."""
    size, width = keys.dim // keys.grids.shape[1], keys.q.shape[1]
    whole = keys.dim % (8 // keys.bits) == 0
    return size % 4 == 0 and whole and (width % size == 0 or size % width == 0)

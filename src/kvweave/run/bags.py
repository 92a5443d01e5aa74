"""Attention of a few rows over rows in bits, added up from the bytes themselves.

To make floats of bytes takes as long as to multiply them. FBGEMM, which torch has on x86, adds up rows
of bytes times weights without that: `embedding_bag`. Keys lie channel by channel, so that scores of 256
rows are a bag of the channels' bytes times the query; what is read is a bag of rows, times what each gets
of the attention and its grid's scale::

    scores   bag of [channel, 256 rows] of a group's channels, times the query;  grids come on top
    read     bag of [row, 32 channels], times share and scale;  shares of first values come on top

All in float32, as products of floats are. torch names the operation nowhere, so it is taken only where
it is there and right (docs/LOG.md, 2026-11-26, has the times).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvweave.run.lanes import BLOCK, TILE, Lanes, lanes_of
from kvweave.run.packed import CodedLevel, PackedRows
from kvweave.run.written import Scaling, VisibleKV, blocks_of, rows_of, scores_of, shares_of

LEAST = 1 << 13  # rows of all heads: of fewer products are quicker, which take fewer operations
MOST = 8  # rows times the heads that share keys: more are products
ENDS = 8  # bytes behind a row of bytes: a scale and a first value, in float32
_mine = threading.local()


def _bag(table: Tensor, rows: Tensor, begins: Tensor, weights: Tensor) -> Tensor:
    """Return sums [bag, column] of ``weights`` times rows of ``table`` [row, byte], whose last `ENDS` bytes
    are its scale and first value; ``rows`` and ``weights`` of all bags one after the other, int32."""
    found: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        table, rows, begins, False, 0, False, weights, None, False
    )
    return found


def _is_right() -> bool:
    """Tell whether the operation is there, does what is said above, and is FBGEMM's."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    table = torch.arange(3 * 16, dtype=torch.uint8).view(3, 16)
    table.view(torch.float32)[:, 2:] = torch.tensor([[1.0, 0.5], [2.0, -1.0], [0.25, 3.0]])
    rows, begins = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 1], [0, 2]))
    weights, ends = torch.tensor([0.5, -1.0, 3.0]), table.view(torch.float32)[:, 2:]
    values = table[:, :8] * ends[:, :1] + ends[:, 1:]
    wanted = torch.stack((0.5 * values[2] - values[0], 3 * values[1]))
    try:
        found = _bag(table, rows, begins, weights)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(found, wanted)


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
    query: Tensor, levels: Sequence[CodedLevel], seen: VisibleKV, how: Scaling
) -> tuple[Tensor, Tensor]:
    """Return attention [row, head, v_dim] of ``query`` [row, head, dim], and weights [head, row, lane], over
    the rows of ``levels``, in the lanes of `lanes_of`, and then those that are ``seen``; every row sees
    all of ``levels``. For what they `suit` only."""
    n, heads, _ = query.shape
    lanes = lanes_of(levels)
    folded = blocks_of(query, len(seen.keys)).float() * how.scale
    shape = folded.shape[:2]
    made = folded.new_empty(*shape, lanes.n + seen.keys.shape[1])
    tiled = made[..., : lanes.n].view(*shape, -1, TILE).transpose(1, 2)  # [head, tile, query, row]
    found = _scores(levels, lanes, folded)
    if how.softcap is not None:
        found.div_(how.softcap).tanh_().mul_(how.softcap)
    found[:-1].masked_fill_(lanes.beyond, -torch.inf)
    found[-1] = -torch.inf
    tiled.copy_(found.index_select(0, lanes.where.view(-1)).view(tiled.shape))
    made[..., lanes.n :] = scores_of(query, seen, how)
    weights = shares_of(made, how, n)
    out = (weights[..., lanes.n :].to(seen.values.dtype) @ seen.values).float()
    tiled = weights[..., : lanes.n].view(*shape, -1, TILE).transpose(1, 2)
    _mix(levels, lanes, tiled.flatten(0, 1).index_select(0, lanes.back), out)
    return rows_of(out.to(query.dtype), n), weights.reshape(heads, n, -1)


def _scores(levels: Sequence[CodedLevel], lanes: Lanes, queries: Tensor) -> Tensor:
    """Return ``queries`` [head, query, dim] times all keys, [pair, query, row of the tile], and room for
    one pair more."""
    asked, dim = queries.index_select(0, lanes.heads), queries.shape[2]
    keys = [level.k for level in levels]
    groups = keys[0].grids.shape[1]
    each = asked.view(len(asked), -1, groups, dim // groups).sum(-1)
    made = asked.new_empty(len(asked) + 1, asked.shape[1], TILE)
    for block, (tiles, pairs) in enumerate(lanes.blocks):
        table, of, mine = _columns(keys, lanes, tiles), lanes.within(block), made[pairs]
        weights = asked[pairs].reshape(-1)
        rows, begins = lanes.numbers(block, asked.shape[1], 1, dim, dim // groups)
        sums = _bag(table, rows, begins, weights).view(len(of), -1, groups, TILE)
        scale, first = _ends(keys, lanes, tiles, of)
        torch.mul(sums[:, :, 0], scale[0, :, None], out=mine)
        for group in range(1, groups):
            mine.addcmul_(sums[:, :, group], scale[group, :, None])
        mine.baddbmm_(each[pairs], first.transpose(0, 1))
    return made


def _columns(keys: Sequence[PackedRows], lanes: Lanes, tiles: slice) -> Tensor:
    """Return symbols of some tiles as bytes [tile times channel, row of the tile]."""
    room = _table("columns", BLOCK // TILE, keys[0].dim, TILE)
    for level, at, rows in _within(keys, lanes, tiles):
        n, first = rows.stop - rows.start, at // TILE
        whole = n // TILE
        for channels, symbols in level.planes(rows):
            columns = symbols.t()
            cut = columns[:, : whole * TILE].view(len(columns), whole, TILE)
            room[first : first + whole, channels, :TILE] = cut.transpose(0, 1)
            if n > whole * TILE:
                rest = columns[:, whole * TILE :]
                room[first + whole, channels, : rest.shape[1]] = rest
    return room[: tiles.stop - tiles.start].flatten(0, 1)


def _mix(levels: Sequence[CodedLevel], lanes: Lanes, weights: Tensor, out: Tensor) -> None:
    """Add ``weights`` [pair, query, row of the tile] times all values to ``out`` [head, query, dim]."""
    values = [level.v for level in levels]
    groups = values[0].grids.shape[1]
    for block, (tiles, pairs) in enumerate(lanes.blocks):
        table, of, mine = _rows(values, lanes, tiles), lanes.within(block), weights[pairs]
        scale, first = _ends(values, lanes, tiles, of)
        shares = mine[:, :, None] * scale.transpose(0, 1)[:, None]
        rows, begins = lanes.numbers(block, mine.shape[1], groups, TILE, TILE)
        found = _bag(table, rows, begins, shares.view(-1)).view(*shares.shape[:3], -1)
        found += (mine[:, :, None] * first.transpose(0, 1)[:, None]).sum(-1, keepdim=True)
        out.index_add_(0, lanes.heads[pairs], found.view(len(of), *out.shape[1:]))


def _rows(values: Sequence[PackedRows], lanes: Lanes, tiles: slice) -> Tensor:
    """Return symbols of some tiles as bytes, [row times group, byte]."""
    dim, groups = values[0].dim, values[0].grids.shape[1]
    size, n = dim // groups, (tiles.stop - tiles.start) * TILE
    room = _table("rows", BLOCK, groups, size)
    for level, at, rows in _within(values, lanes, tiles):
        own = slice(at, at + rows.stop - rows.start)
        for channels, symbols in level.planes(rows):
            a, b = channels.start // size, -(-channels.stop // size)
            begin = channels.start - a * size if b - a == 1 else 0
            wide = symbols.shape[1] // (b - a)
            room[own, a:b, begin : begin + wide] = symbols.view(len(symbols), b - a, wide)
    return room[:n].flatten(0, 1)


def _ends(
    each: Sequence[PackedRows], lanes: Lanes, tiles: slice, of: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scale and the first value of the grids of some tiles, those that ``of`` says,
    [group, tile, row of the tile] each; 0 where there is no row."""
    groups = each[0].grids.shape[1]
    room = _room("ends", 2, groups, BLOCK)
    for level, at, rows in _within(each, lanes, tiles):
        stop = at + rows.stop - rows.start
        both = room[:, :, at:stop].copy_(level.grids[..., rows])
        both[1].sub_(both[0], alpha=level.half)
        room[:, :, stop : -(-stop // TILE) * TILE].zero_()  # of others, and no number maybe
    scale, first = room.view(2, groups, -1, TILE).index_select(2, of)
    return scale, first


def _table(name: str, *shape: int) -> Tensor:
    """Return a place for bytes of this shape, each row with a scale of 1 and a first value of 0 behind
    it: grids are put into the weights, or come on top."""
    *several, size = shape
    room = _room(name, *several, size + ENDS, dtype=torch.uint8)
    ends = room.view(torch.float32)[..., size // 4]
    if ends.view(-1)[0] != 1:
        ends.fill_(1.0)
    return room


def _within(
    each: Sequence[PackedRows], lanes: Lanes, tiles: slice
) -> Iterator[tuple[PackedRows, int, slice]]:
    """Yield which rows of each level are in some tiles, and where these begin among all of them."""
    for level, start in zip(each, lanes.starts, strict=False):
        first = max(0, (tiles.start - start) * TILE)
        last = min(level.q.shape[0], (tiles.stop - start) * TILE)
        if first < last:
            yield level, (start - tiles.start) * TILE + first, slice(first, last)


def suit(levels: Sequence[CodedLevel], query: Tensor, n_heads: int) -> bool:
    """Tell whether this is for ``query`` [row, head, dim] over rows of ``levels`` of ``n_heads``."""
    few = len(query) * query.shape[1] // n_heads <= MOST
    if not (there and few and query.is_cpu and query.dtype != torch.float64):
        return False
    if sum(level.n for level in levels) < LEAST:
        return False
    return all(level.k.across and _fits(level.k) and _fits(level.v) for level in levels)


def _fits(rows: PackedRows) -> bool:
    """Tell whether the channels of each part of bytes are one group's, or some groups."""
    size, width = rows.dim // rows.grids.shape[1], rows.q.shape[1]
    whole = rows.dim % (8 // rows.bits) == 0
    return size % 4 == 0 and whole and (width % size == 0 or size % width == 0)

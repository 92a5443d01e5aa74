"""The operations of `run/kernel.py` in Triton.

Imported where CUDA is, or in tests with ``TRITON_INTERPRET=1``; torch for CUDA brings Triton.

One program of attention takes a tile of rows of one context, one kv head with all query heads that
share it, and one of the parts that a tile's slots are split into, so that a few decoding rows keep
a whole GPU busy; the parts are joined by their log-sum-exp::

    slots of a tile   begin |----- part 0 -----|----- part 1 -----|----- part 2 --| end
"""

# Triton is there where CUDA is, and its functions are no Python that mypy could check
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,no-untyped-def,no-any-return"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots read at once, at most
BLOCK_BYTES = 1 << 14  # and their keys' bytes
SMALLEST = 16  # rows or dims that the units for matrix products take at least
MOST_SPLITS = 32
MOST_QUERIES = 64  # rows times heads that meet a block of slots at once
STAGES = 3  # blocks of slots on their way at once
MANY = 128  # rows from which on a program writes several


def splits(n_programs: int, wanted: int) -> int:
    """Return into how many parts slots are split: a power of two, by sizes that the host knows."""
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, wanted // max(1, n_programs))))


@triton.jit
def _turned(x, angles, row, at, valid, dims, WIDTH: tl.constexpr, DIM: tl.constexpr,
            INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, n_rows):  # fmt: skip
    """Load values at ``at`` [row] + dims and turn them."""
    inside = valid[:, None] & (dims < DIM)[None]
    found = tl.load(x + at[:, None] + dims[None], mask=inside, other=0.0)
    if WIDTH > 0:
        partner = (dims ^ 1) if INTERLEAVED else (dims + WIDTH // 2) % WIDTH
        turns = valid[:, None] & (dims < WIDTH)[None]
        other = tl.load(x + at[:, None] + partner[None], mask=turns, other=0.0)
        where = row[:, None] * WIDTH + dims[None]
        cos = tl.load(angles + where, mask=turns, other=1.0).to(WIDE)
        sin = tl.load(angles + n_rows * WIDTH + where, mask=turns, other=0.0).to(WIDE)
        found = (found.to(WIDE) * cos + other.to(WIDE) * sin).to(found.dtype)
    return found


@triton.jit
def _write(keys, values, k_pool, v_pool, slots, angles, n_rows, n_slots,
           k_row, k_head, v_row, v_head,
           WIDTH: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
           BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    """Some rows of one head."""
    row, head = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1)
    valid, far = row < n_rows, row.to(tl.int64)
    slot = head * n_slots + tl.load(slots + row, mask=valid, other=0)
    dims = tl.arange(0, BLOCK_D)
    turned = _turned(keys, angles, far, far * k_row + head * k_head, valid, dims,
                     WIDTH, DIM, INTERLEAVED, WIDE, n_rows)  # fmt: skip
    tl.store(k_pool + (slot * DIM)[:, None] + dims[None], turned,
             mask=valid[:, None] & (dims < DIM)[None])  # fmt: skip
    dims = tl.arange(0, BLOCK_V)
    inside = valid[:, None] & (dims < V_DIM)[None]
    found = tl.load(values + (far * v_row + head * v_head)[:, None] + dims[None], mask=inside)
    tl.store(v_pool + (slot * V_DIM)[:, None] + dims[None], found, mask=inside)


def write_rows(
    keys: Tensor,
    values: Tensor,
    pools: tuple[Tensor, Tensor],
    slots: Tensor,
    angles: Tensor,
    interleaved: bool,
) -> None:
    """See `kernel.write_rows`; heads of keys and of values are as many."""
    n, heads, dim = keys.shape
    keys, values = _dense(keys), _dense(values)
    block = 1 if n < MANY else SMALLEST
    _write[triton.cdiv(n, block), heads](
        keys, values, *pools, slots, angles.contiguous(), n, pools[0].shape[1],
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        angles.shape[-1], dim, values.shape[2], interleaved,
        block, triton.next_power_of_2(dim), triton.next_power_of_2(values.shape[2]), _wide(keys),
    )  # fmt: skip


@triton.jit
def _attend(query, k_pool, v_pool, seen, tiles, out, lse, n_rows, n_slots, q_row, q_head,
            SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
            SPLITS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_V: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One tile, one kv head, one part of the slots: out [part, row, head, v_dim], lse likewise."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    both = tl.arange(0, BLOCK_M)  # rows times the query heads that share a kv head
    row = first + both // GROUP
    head = kv_head * GROUP + both % GROUP
    valid = (both < ROWS * GROUP) & (row < last)
    begin = tl.load(seen + row, mask=valid, other=n_slots)
    end = tl.load(seen + n_rows + row, mask=valid, other=0)
    start, stop = tl.min(begin, 0), tl.max(end, 0)
    size = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), SPLITS), BLOCK_N) * BLOCK_N
    start += part * size
    stop = tl.minimum(start + size, stop)

    dims, v_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    rows = valid[:, None] & (dims < DIM)[None]
    q = tl.load(query + (row * q_row + head * q_head)[:, None] + dims[None], mask=rows, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), WIDE)
    total = tl.zeros([BLOCK_M], WIDE)
    found = tl.zeros([BLOCK_M, BLOCK_V], WIDE)
    for at in range(start, stop, BLOCK_N):
        slots = at + tl.arange(0, BLOCK_N)
        inside = slots < stop
        where = (kv_head * n_slots + slots) * DIM
        keys = tl.load(k_pool + where[None] + dims[:, None],
                       mask=inside[None] & (dims < DIM)[:, None], other=0.0)  # fmt: skip
        scores = tl.dot(q, keys, input_precision="ieee", out_dtype=WIDE) * SCALE
        if SOFTCAP > 0:
            half = tl.exp(-2 * tl.abs(scores) / SOFTCAP)  # tanh, which not every version has
            scores = tl.where(scores < 0, -1.0, 1.0) * (1 - half) / (1 + half) * SOFTCAP
        visible = inside[None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        paid = tl.exp(scores - shift[:, None])
        kept = tl.exp(highest - shift)
        where = (kv_head * n_slots + slots) * V_DIM
        values = tl.load(v_pool + where[:, None] + v_dims[None],
                         mask=inside[:, None] & (v_dims < V_DIM)[None], other=0.0)  # fmt: skip
        total = total * kept + tl.sum(paid, 1)
        found = found * kept[:, None] + tl.dot(paid.to(values.dtype), values,
                                               input_precision="ieee", out_dtype=WIDE)  # fmt: skip
        highest = higher
    nothing = total == 0
    found = found / tl.where(nothing, 1.0, total)[:, None]
    to = (part * n_rows + row) * HEADS + head
    tl.store(out + to[:, None] * V_DIM + v_dims[None], found.to(out.dtype.element_ty),
             mask=valid[:, None] & (v_dims < V_DIM)[None])  # fmt: skip
    sums = tl.where(nothing, float("-inf"), highest + tl.log(tl.where(nothing, 1.0, total)))
    tl.store(lse + to, sums, mask=valid)


@triton.jit
def _join(parts, sums, out, lse, n, SPLITS: tl.constexpr, V_DIM: tl.constexpr,
          BLOCK_V: tl.constexpr):  # fmt: skip
    """Join the parts of one row and head."""
    at = tl.program_id(0)
    which, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_V)
    each = tl.load(sums + which * n + at)
    highest = tl.max(each, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(each - shift)
    total = tl.sum(weights, 0)
    found = tl.load(parts + (which * n + at)[:, None] * V_DIM + dims[None],
                    mask=(dims < V_DIM)[None] & (which < SPLITS)[:, None], other=0.0)  # fmt: skip
    joined = tl.sum(found * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + at * V_DIM + dims, joined.to(out.dtype.element_ty), mask=dims < V_DIM)
    sum = shift + tl.log(tl.where(total == 0, 1.0, total))
    tl.store(lse + at, tl.where(total == 0, float("-inf"), sum))


def interval_attention(
    query: Tensor,
    pools: tuple[Tensor, Tensor],
    seen: Tensor,
    tiles: Tensor,
    how: tuple[float, float],
    cut: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """See `kernel.interval_attention`; ``how`` is scale and softcap, ``cut`` how many rows a tile has
    at most and into how many parts its slots are split, a power of two."""
    n, heads, dim = query.shape
    kv_heads, n_slots, v_dim = pools[1].shape
    query, group = _dense(query), heads // kv_heads
    rows, splits = cut
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(n, heads, v_dim)
    lse = query.new_empty(n, heads, dtype=wide)
    parts, sums = out, lse
    if splits > 1:
        parts = query.new_empty(splits, n, heads, v_dim, dtype=wide)
        sums = query.new_empty(splits, n, heads, dtype=wide)
    block_d, block_v = (max(SMALLEST, triton.next_power_of_2(d)) for d in (dim, v_dim))
    block_m = max(SMALLEST, triton.next_power_of_2(rows * group))
    # keys and values of a block, twice, must fit in the memory that a program's threads share
    block_n = max(SMALLEST, min(BLOCK, BLOCK_BYTES // (max(block_d, block_v) * query.itemsize)))
    _attend[len(tiles), kv_heads, splits](
        query, *pools, seen.contiguous(), tiles, parts, sums, n, n_slots,
        query.stride(0), query.stride(1), *how, heads, group, rows, splits, dim, v_dim,
        block_m, block_n, block_d, block_v, _wide(query),
        num_warps=8 if block_m > 64 else 4, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _join[n * heads,](parts, sums, out, lse, n * heads, splits, v_dim, block_v)
    return out, lse


@triton.jit
def _add_up(query, k_pool, seen, lse, rows, weights, start, total, n_rows, n_slots, n_total, q_row, q_head,
            SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SQUARED: tl.constexpr, WANTED: tl.constexpr, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """One block of slots: all rows and heads."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.load(start) + at
    dims, both = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    found = tl.zeros([BLOCK_N], WIDE)
    for tile in range(0, WANTED, ROWS):
        which = tile + both // GROUP
        counted = (both < ROWS * GROUP) & (which < WANTED)
        row = tl.load(rows + which, mask=counted, other=0)
        weight = tl.load(weights + which, mask=counted, other=0.0).to(WIDE)
        valid = counted & (weight != 0)
        begin = tl.load(seen + row, mask=valid, other=n_slots)
        end = tl.load(seen + n_rows + row, mask=valid, other=0)
        if (tl.min(begin, 0) <= tl.max(slots, 0)) & (tl.max(end, 0) > tl.min(slots, 0)):
            visible = (
                valid[:, None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
            )
            for kv_head in range(KV_HEADS):
                head = kv_head * GROUP + both % GROUP
                q = tl.load(query + (row * q_row + head * q_head)[:, None] + dims[None],
                            mask=valid[:, None] & (dims < DIM)[None], other=0.0)  # fmt: skip
                where = (kv_head * n_slots + slots) * DIM
                keys = tl.load(k_pool + where[None] + dims[:, None],
                               mask=(slots < n_slots)[None] & (dims < DIM)[:, None], other=0.0)  # fmt: skip
                scores = tl.dot(q, keys, input_precision="ieee", out_dtype=WIDE) * SCALE
                if SOFTCAP > 0:
                    half = tl.exp(-2 * tl.abs(scores) / SOFTCAP)
                    scores = tl.where(scores < 0, -1.0, 1.0) * (1 - half) / (1 + half) * SOFTCAP
                of_all = tl.load(lse + row * HEADS + head, mask=valid, other=0.0)
                paid = tl.where(visible, tl.exp(scores - of_all[:, None]), 0.0)
                if SQUARED:
                    paid = paid * paid
                found += tl.sum(paid * weight[:, None], 0)
    inside = at < n_total
    tl.store(total + at, tl.load(total + at, mask=inside, other=0.0) + found, mask=inside)


def attention_sums(
    paid: Sequence[Tensor], counted: Sequence[Tensor], total: Tensor, how: Sequence[float]
) -> None:
    """See `kernel.attention_sums`."""
    query, k_pool, seen, lse = paid
    scale, softcap, power = how
    (n, heads, dim), (kv_heads, n_slots, _) = query.shape, k_pool.shape
    query, group, wanted = _dense(query), heads // kv_heads, len(counted[0])
    rows = min(wanted, max(1, MOST_QUERIES // group))
    block_m = max(SMALLEST, triton.next_power_of_2(rows * group))
    block_d = max(SMALLEST, triton.next_power_of_2(dim))
    block_n = max(SMALLEST, min(BLOCK, BLOCK_BYTES // (block_d * query.itemsize)))
    _add_up[triton.cdiv(len(total), block_n),](
        query, k_pool, seen.contiguous(), lse.contiguous(), *counted, total, n, n_slots, len(total),
        query.stride(0), query.stride(1), scale, softcap, power == 2, wanted,
        heads, kv_heads, group, rows, dim, block_m, block_n, block_d, _wide(query), num_warps=4,
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """Return [row, head, dim] whose dims follow one another."""
    return x if x.stride(2) == 1 else x.contiguous()


def _wide(x: Tensor) -> tl.dtype:
    """Return what a kernel adds up in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32

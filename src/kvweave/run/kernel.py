"""The operations of a layer on a GPU, over rows of any number of contexts in one pool.

Each is one operation of torch with two ways: plain torch, which is obviously right and is what the
other is tested against, and Triton on CUDA (`run/fused.py`)::

    write_rows           turn a pass's keys to their positions; keys and values to their slots
    interval_attention   every row over its interval of slots [begin, end), and the log-sum-exp
    attention_sums       what some rows pay to each slot, added up over heads and rows

Rows that fill a pass up to its size have an empty interval; they get zeros. What one row sees is
never touched for another: a NaN stays in its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import inf
from typing import Any

import torch
from torch import Tensor

TILE = 16  # rows of one context that a kernel may take together

# torch.library.custom_op would look for aliases in each call, which takes longer than the launch
_library: Any = torch.library.Library("kvweave", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "write_rows(Tensor keys, Tensor values, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slots,"
    " Tensor angles, bool interleaved) -> ()"
)
_library.define(
    "interval_attention(Tensor query, Tensor k_pool, Tensor v_pool, Tensor seen, Tensor tiles,"
    " float scale, float softcap) -> (Tensor, Tensor)"
)
_library.define(
    "attention_sums(Tensor[] paid, Tensor[] counted, Tensor(a!) total, float[] how) -> ()"
)
ELSEWHERE = "CompositeExplicitAutograd"  # devices without a kernel of their own


def available(device: torch.device) -> bool:
    """Tell whether the operations run on ``device`` as they are meant to."""
    return device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and find_spec("triton") is not None
    )


def _write_rows(
    keys: Tensor,
    values: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    angles: Tensor,
    interleaved: bool,
) -> None:
    turned = turn(keys, angles, interleaved)
    k_pool.index_copy_(1, slots, turned.transpose(0, 1))
    v_pool.index_copy_(1, slots, values.transpose(0, 1))


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Turn ``x`` [row, head, dim] by ``angles`` [2, row, width], in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    width = angles.shape[-1]
    dims = torch.arange(width, device=x.device)
    partner = dims ^ 1 if interleaved else (dims + width // 2) % max(width, 1)
    cos, sin = angles[:, :, None].to(wide)
    turned = wide[..., :width] * cos + wide[..., partner] * sin
    return torch.cat((turned, wide[..., width:]), -1).to(x.dtype)


def _interval_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    seen: Tensor,
    tiles: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // k_pool.shape[0]
    out = query.new_zeros(*query.shape[:2], v_pool.shape[2])
    lse = torch.full(query.shape[:2], -inf, dtype=wide, device=query.device)
    for row, (begin, end) in enumerate(seen.t().tolist()):
        if begin == end:
            continue
        keys, values = (
            pool[:, begin:end].to(wide).repeat_interleave(group, 0) for pool in (k_pool, v_pool)
        )
        scores = torch.einsum("hd,hsd->hs", query[row].to(wide), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        lse[row] = scores.logsumexp(-1)
        out[row] = torch.einsum("hs,hsd->hd", scores.softmax(-1), values).to(out.dtype)
    return out, lse


def _write_rows_on_cuda(
    keys: Tensor,
    values: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    angles: Tensor,
    interleaved: bool,
) -> None:
    from kvweave.run import fused

    fused.write_rows(keys, values, (k_pool, v_pool), slots, angles, interleaved)


def _interval_attention_on_cuda(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    seen: Tensor,
    tiles: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    from kvweave.run import fused

    one_each = len(tiles) == len(query)
    n_programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    n_programs *= 2 if one_each else 8  # late rows see more than early ones: parts even it out
    cut = 1 if one_each else TILE, fused.splits(len(tiles) * len(k_pool), n_programs)
    return fused.interval_attention(query, (k_pool, v_pool), seen, tiles, (scale, softcap), cut)


def _attention_sums(
    paid: Sequence[Tensor], counted: Sequence[Tensor], total: Tensor, how: Sequence[float]
) -> None:
    query, k_pool, seen, lse = paid
    scale, softcap, power = how
    start, group = int(counted[2]), query.shape[1] // k_pool.shape[0]
    for row, weight in zip(counted[0].tolist(), counted[1].tolist(), strict=True):
        begin, end = seen[:, row].tolist()
        if not weight or begin == end:
            continue
        keys = k_pool[:, begin:end].to(lse.dtype).repeat_interleave(group, 0)
        scores = torch.einsum("hd,hsd->hs", query[row].to(lse.dtype), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        each = (scores - lse[row][:, None]).exp().pow(power).sum(0)
        total[begin - start : end - start] += weight * each


def _attention_sums_on_cuda(
    paid: Sequence[Tensor], counted: Sequence[Tensor], total: Tensor, how: Sequence[float]
) -> None:
    from kvweave.run import fused

    fused.attention_sums(paid, counted, total, how)


for _name, _plain, _on_cuda in (
    ("write_rows", _write_rows, _write_rows_on_cuda),
    ("interval_attention", _interval_attention, _interval_attention_on_cuda),
    ("attention_sums", _attention_sums, _attention_sums_on_cuda),
):
    _library.impl(_name, _plain, ELSEWHERE)
    _library.impl(_name, _on_cuda, "CUDA")


def write_rows(
    keys: Tensor,
    values: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    angles: Tensor,
    interleaved: bool,
) -> None:
    """Write unrotated ``keys`` and ``values`` [row, head, dim] to ``slots`` [row] of the pools.

    Pools are [head, slot, dim]; ``angles`` [2, row, width] are `Rotation.angles`.
    """
    torch.ops.kvweave.write_rows(keys, values, k_pool, v_pool, slots, angles, interleaved)


def interval_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    seen: Tensor,
    tiles: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return attention [row, head, v_dim] and the log-sum-exp of its scores [row, head].

    Args:
        query: [row, head, dim], rotated.
        k_pool: [kv_head, slot, dim]; ``v_pool`` likewise.
        seen: [2, row] int64, where each row's interval of slots begins and ends.
        tiles: [tile, 2] int64, first row and one past the last of what may be taken together: rows
            of one context, `TILE` at most; all of one row where there are as many tiles as rows. Empty ones fill up.
        softcap: scores are ``tanh(scores / softcap) * softcap``; 0: as they are.
    """
    found: tuple[Tensor, Tensor] = torch.ops.kvweave.interval_attention(
        query, k_pool, v_pool, seen, tiles, scale, softcap
    )
    return found


def attention_sums(
    paid: Sequence[Tensor], counted: Sequence[Tensor], total: Tensor, how: Sequence[float]
) -> None:
    """Add to ``total`` [slot] what some rows of one context pay, over all heads.

    Args:
        paid: query, k_pool and seen, as of `interval_attention`; and the log-sum-exp [row, head] of
            all that rows pay to.
        counted: rows [wanted] and their weights [wanted] float64, 0: does not count; and the slot
            [1] of the pool that is the context's first, where ``total`` begins.
        how: scale and softcap as of `interval_attention`; and the power of what is paid, 1 or 2.
    """
    torch.ops.kvweave.attention_sums(paid, counted, total, how)


def added(into: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` [..., i] to ``into`` [..., j] at the columns ``where`` [..., i], and return it.

    As `scatter_add_` on a CPU. On a GPU that adds what comes to one column in any order, so the same
    rows would be worth something else each time; here they are sorted first.
    """
    if into.device.type == "cpu":
        return into.scatter_add_(-1, where, values)
    n = into.shape[-1]
    first = n * torch.arange(into.numel() // n, device=into.device).view(*into.shape[:-1], 1)
    into.view(-1).index_put_(((where + first).flatten(),), values.flatten(), accumulate=True)
    return into

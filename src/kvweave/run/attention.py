"""Attention of packed rows over the slots of their contexts.

The mask is exact: a query sees an interval of slots that ends with its own (`run/base.py`),
wherever the rows come from. A causal mask aligned to the bottom right, which fits only a contiguous
suffix, would let a repaired row see its own future.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.run.batch import Batch, Part

FOLD = 32  # rows below which query heads that share keys stand in one block, which reads these once
NOTHING = (0, 0)

current: ContextVar[Batch] = ContextVar("kvweave_batch")


def attend(layer: int, query: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """Return attention [1, total, head, v_dim] of unrotated ``query`` [1, head, total, dim]."""
    batch = current.get()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    turned = batch.turned(layer, query[0].transpose(0, 1))
    outs: list[Tensor] = []
    for part in batch.parts:
        outs += _part(batch, part, layer, turned[part.span], scale, softcap)
    return (outs[0].contiguous() if len(outs) == 1 else torch.cat(outs))[None]


def _part(
    batch: Batch, part: Part, layer: int, query: Tensor, scale: float, softcap: float | None
) -> list[Tensor]:
    """Attention of one work's rows, ``query`` [row, head, dim] -> pieces [row, head, v_dim]."""
    mask, observer = batch.infos[layer].mask, part.work.observer
    watched = NOTHING if observer is None else _watched(part, layer)
    pieces = part.cut(mask, watched)
    begin = pieces[0].begin
    keys, values = part.rows.layers[layer].seen(slice(begin, part.stop))
    outs = []
    for piece in pieces:
        q = query[piece.first : piece.last]
        span = slice(piece.begin - begin, piece.stop - begin)
        k, v = keys[:, span], values[:, span]
        if piece.causal and softcap is None:
            outs.append(_fused(q, k, v, None, scale, causal=True))
            continue
        bias = batch.bias(part, piece, mask, q.dtype)
        if softcap is None and not piece.watched:
            outs.append(_fused(q, k, v, bias, scale))
            continue
        weights = _weights(q, k, bias, scale, softcap)
        if piece.watched:
            assert observer is not None
            n_heads = q.shape[1]
            first = part.work.at + piece.first
            observer.see(layer, first, piece.begin, weights.view(n_heads, piece.last - piece.first, -1))
        outs.append(_unfolded(weights.to(v.dtype) @ v, len(q)))
    return outs


def _watched(part: Part, layer: int) -> tuple[int, int]:
    """Return the rows of a part whose attention its observer wants; it counts the whole work's."""
    observer, at = part.work.observer, part.work.at
    assert observer is not None
    first, last = observer.rows(layer, at + part.n)
    first, last = max(first - at, 0), min(last - at, part.n)
    return (first, last) if first < last else NOTHING


def _folded(query: Tensor, kv_heads: int) -> Tensor:
    """[row, head, dim] -> [kv_head, group * row, dim]: no copy of the keys a group shares."""
    n, heads, dim = query.shape
    group = heads // kv_heads
    return query.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _unfolded(out: Tensor, n: int) -> Tensor:
    """[kv_head, group * row, dim] -> [row, head, dim]."""
    kv_heads, both, dim = out.shape
    group = both // n
    return out.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, -1, dim)


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Attention of ``query`` [row, head, dim] over [kv_head, slot, dim] in one kernel."""
    n, heads, dim = query.shape
    kv_heads, n_keys, v_dim = values.shape
    group = heads // kv_heads
    if n < FOLD and not causal:
        if bias is not None and group > 1:
            bias = bias.repeat(group, 1)
        out = F.scaled_dot_product_attention(
            _folded(query, kv_heads)[None], keys[None], values[None], attn_mask=bias, scale=scale
        )[0]
        return _unfolded(out, n)
    grouped = query.view(n, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped,
        keys[:, None].expand(kv_heads, group, n_keys, dim),
        values[:, None].expand(kv_heads, group, n_keys, v_dim),
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(n, heads, v_dim)


def _weights(
    query: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Return attention weights [kv_head, group * row, slot], in float32 at least."""
    kv_heads = keys.shape[0]
    group = query.shape[1] // kv_heads
    folded = _folded(query, kv_heads)
    if bias is not None and group > 1:
        bias = bias.repeat(group, 1)
    if softcap is not None:
        scores = torch.tanh(folded @ keys.transpose(1, 2) * (scale / softcap)) * softcap
        scores = scores if bias is None else scores + bias
    elif bias is not None:
        scores = torch.baddbmm(
            bias.expand(kv_heads, -1, -1), folded, keys.transpose(1, 2), alpha=scale
        )
    else:
        scores = (folded * scale) @ keys.transpose(1, 2)
    half = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.softmax(-1, dtype=torch.float32 if half else scores.dtype)

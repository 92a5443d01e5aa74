"""Attention of training: PyTorch's kernels without a mask of rows times rows, which long chains have no room for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION = "study"  # by this name models are told to use it


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, sliding_window: int | None = None, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Return causal attention [chain, row, head, dim] over [chain, head, row, dim], chains padded at their ends."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation is of float32
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))  # fmt: skip
    if sliding_window is None or sliding_window >= query.shape[2]:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
    else:
        out = windowed(query, key, value, sliding_window, scaling)
    return out.transpose(1, 2), None


def windowed(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:  # fmt: skip
    """Return attention to the ``window`` newest rows: a block of them sees itself and the one before."""
    chains, heads, rows, dim = query.shape
    more = -rows % window
    query, key, value = (
        functional.pad(part, (0, 0, 0, more)).reshape(chains, heads, -1, window, dim)
        for part in (query, key, value)
    )
    n = query.shape[2]
    key, value = (
        torch.cat([functional.pad(part, (0, 0, 0, 0, 1, 0))[:, :, :-1], part], 3).flatten(1, 2)
        for part in (key, value)
    )
    at = torch.arange(2 * window, device=query.device) - window
    back = torch.arange(window, device=query.device)[:, None] - at
    seen = ((back >= 0) & (back < window)).repeat(n, 1, 1)
    seen[0] &= at >= 0
    out = functional.scaled_dot_product_attention(
        query.flatten(1, 2), key, value, attn_mask=seen.repeat(heads, 1, 1)[None], scale=scaling
    )
    return out.reshape(chains, heads, rows + more, dim)[:, :, :rows]


AttentionInterface.register(ATTENTION, attend)

"""Read off what the heads of a layer make of latents (`run/latent.py`), whatever code does it.

A call whose cache answers with unit rows hands attention one row of each matrix after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvweave.run.base import LayerInfo
from kvweave.run.latent import Latent
from kvweave.run.looking import Handed, KeptLayer, Refused, look


class UnitLayer(KeptLayer):  # type: ignore[no-untyped-call]
    """Answers with rows that show what heads make of latents: one for each dim, and one of zeros."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return unit rows of the latent, then of the part that turns, then zeros."""
        rank, both = key_states.shape[-1], key_states.shape[-1] + value_states.shape[-1]
        unit = torch.zeros(1, 1, both + 1, both, dtype=key_states.dtype, device=key_states.device)
        unit[0, 0, :both].fill_diagonal_(1)
        return unit[..., :rank], unit[..., rank:]


def expansions(
    model: PreTrainedModel, found: Sequence[LayerInfo], layers: list[Any], limit: int
) -> list[LayerInfo]:
    """Return ``found`` with what heads make of latents filled in, read off unit rows; ``layers`` are
    those of an empty cache."""
    for info in found:
        if info.latent is not None:
            layers[info.readers[0]] = UnitLayer()
    call = look(model, layers, [0], limit)
    return [
        info if info.latent is None else _expansion(info, call.layers[info.readers[0]], model.dtype)
        for info in found
    ]


def _expansion(info: LayerInfo, handed: Handed, dtype: torch.dtype) -> LayerInfo:
    """Read off what the heads of one layer make of latents."""
    rope, rank, at = info.shape.k_dim, info.shape.v_dim, info.readers[0]
    keys, values = handed.keys[0], handed.values[0]  # [head, unit row, dim]
    bias = values[:, -1].clone()
    turned = keys[:, rank:-1]
    dims = turned[0].argmax(-1)
    if keys[:, -1].any() or not torch.equal(
        turned, F.one_hot(dims, keys.shape[2]).to(turned).expand_as(turned)
    ):
        raise Refused(f"layer {at} mixes what turns with what does not in its keys")
    every = torch.arange(keys.shape[2], device=keys.device)
    plain = every[~torch.isin(every, dims)]
    if (
        keys[:, :rank, dims].any()
        or (values[:, rank:-1] - bias[:, None]).any()
        or len(dims) != rope
    ):
        raise Refused(f"layer {at} makes values of what turns, or turns what it makes of latents")
    latent = Latent(
        torch.cat((dims, plain)),
        keys[:, :rank, plain].to(dtype).contiguous(),
        (values[:, :rank] - bias[:, None]).to(dtype).contiguous(),
        bias.to(dtype) if bias.any() else None,
    )
    return replace(info, latent=latent)

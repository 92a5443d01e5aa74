"""Masks told from their functions: python -m pytest tests/run/test_masks.py"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from kvweave.run.base import ALL, Mask
from kvweave.run.masks import UnknownMask, classify, seen
from kvweave.run.probe import learn

CPU = torch.device("cpu")
Function = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def window(size: int) -> Function:
    return masking_utils.sliding_window_causal_mask_function(size)


def chunks(size: int) -> Function:
    return masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


def square(function: Function, n: int) -> np.ndarray:
    """Ask for every pair, one at a time."""
    zero = torch.tensor(0)
    pairs = [
        [bool(function(zero, zero, torch.tensor(q), torch.tensor(k))) for k in range(n)]
        for q in range(n)
    ]
    return np.array(pairs)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("kind", [window, chunks])
def test_small_masks_are_found_whatever_their_size(
    kind: Callable[[int], Function], limit: int
) -> None:
    for size in range(1, limit + 3):
        function = kind(size)
        found = classify(function, limit, CPU)
        assert np.array_equal(seen(found, np.arange(limit)), square(function, limit)), (size, found)
        assert (found == ALL) == (size >= limit), "a border that no position reaches is none"


@pytest.mark.parametrize(
    ("function", "limit", "mask"),
    [
        (causal, 1 << 24, ALL),
        (window(4096), 1 << 17, Mask(window=4096)),
        (window((1 << 17) - 1), 1 << 17, Mask(window=(1 << 17) - 1)),
        (chunks(8192), 10_485_760, Mask(chunk=8192)),
        (window(1), 300, Mask(window=1)),
        (chunks(999), 1000, Mask(chunk=999)),
    ],
)
def test_large_masks_are_found(function: Function, limit: int, mask: Mask) -> None:
    assert classify(function, limit, CPU) == mask


UNKNOWN: dict[str, tuple[Function, str]] = {
    "bidirectional": (lambda b, h, q, k: q >= 0, "after its own"),
    "prefix_lm": (lambda b, h, q, k: (k <= q) | (k < 5), "after its own"),
    "next_too": (lambda b, h, q, k: k <= q + 1, "after its own"),
    "not_itself": (lambda b, h, q, k: k < q, "own position"),
    "dilated": (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), "neither"),
    "sink_and_window": (lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 9)), "neither"),
    "window_from_afar": (lambda b, h, q, k: (k <= q) & ((q < 700) | (k > q - 9)), "neither"),
    "shifted_chunks": (lambda b, h, q, k: (k <= q) & ((k + 3) // 8 == (q + 3) // 8), "neither"),
    "two_windows": (lambda b, h, q, k: (k <= q) & (k > q - torch.where(q < 500, 9, 10)), "neither"),
    "of_a_call": (lambda b, h, q, k: torch.ones(2, dtype=torch.bool)[k] & (k <= q), "tokens"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_none_of_these_is_unknown(name: str) -> None:
    function, word = UNKNOWN[name]
    with pytest.raises(UnknownMask, match=word):
        classify(function, 1024, CPU)


@pytest.mark.parametrize(("size", "n"), [(1, 5), (2, 9), (7, 30), (8, 8), (16, 64), (40, 30)])
def test_learned_masks_are_the_tensors_that_transformers_makes(size: int, n: int) -> None:
    """Both kinds of layer of a model, and chunks, against the tensors that eager attention gets."""
    gemma = oracle.build("gemma3_text", {"sliding_window": size, "num_hidden_layers": 6})
    llama = oracle.build("llama4_text", CHUNKED | {"attention_chunk_size": size})
    for model, make in (
        (gemma, masking_utils.create_sliding_window_causal_mask),
        (llama, masking_utils.create_chunked_causal_mask),
    ):
        layers = learn(model, 1024)
        config = model.config
        model.set_attn_implementation("eager")
        for i, layer in enumerate(layers):
            full = config.layer_types[i] == "full_attention"
            real = (masking_utils.create_causal_mask if full else make)(
                config=config,
                inputs_embeds=torch.zeros(1, n, config.hidden_size),
                attention_mask=None,
                past_key_values=None,
                position_ids=torch.arange(n)[None],
            )
            assert np.array_equal(
                seen(layer.mask, np.arange(n)), (real == 0)[0, 0].cpu().numpy()
            ), i


CHUNKED: dict[str, object] = {
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
}

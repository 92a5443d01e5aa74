"""What a model in vLLM is: its layers' rotations and masks, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvweave.errors import CannotMove
from kvweave.run.base import ALL, LayerInfo, Mask
from kvweave.run.rotary import STATIC, Rotation
from kvweave.store.kv import LayerShape

ROUNDING = 2e-3  # of cos and sin as vLLM keeps them, in float32, at the last position
HALF = 1e-2  # the same, where it keeps them in half precision
EVEN = (
    "default",
    "linear",
    "llama3",
)  # rotations of transformers that go by nothing but the position


def why_not(config: VllmConfig, attentions: Mapping[str, Any]) -> str | None:
    """Return why chunks of this model cannot be woven inside vLLM; None: they can."""
    parallel = config.parallel_config
    refused = [
        (parallel.enable_expert_parallel, "expert parallelism: a pass of ours was never run over it"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism: no worker has all layers"),
        (parallel.data_parallel_size > 1, "data parallelism: its ranks run in lock step"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "context parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "context parallelism"),
        (config.speculative_config is not None, "speculative decoding: the draft's KV is not woven"),
        (config.lora_config is not None, "LoRA: KV depends on the adapter"),
        (not attentions, "it has no attention layers"),
    ]  # fmt: skip
    for is_so, reason in refused:
        if is_so:
            return f"kvweave in vLLM does not work with {reason}"
    for name, module in attentions.items():
        refusal = _layer_why_not(module)
        if refusal is not None:
            return f"layer {name}: {refusal}"
    return None


def _layer_why_not(module: Any) -> str | None:
    if not isinstance(module, Attention):
        return f"{type(module).__name__} is no plain attention"
    if str(module.attn_type) not in ("decoder", "AttentionType.DECODER"):
        return f"it is {module.attn_type} attention"
    if module.kv_sharing_target_layer_name is not None:
        return "it shares the KV of another layer"
    if module.has_sink or getattr(module.impl, "alibi_slopes", None) is not None:
        return "its attention has sinks or ALiBi"
    if module.use_mm_prefix:
        return "it sees its prefix in both directions"
    return None


def layer_info(modules: Mapping[str, nn.Module], name: str, module: Any) -> LayerInfo:
    """Return what a layer caches and how it moves. Raises CannotMove."""
    shape = LayerShape(
        module.num_kv_heads, module.head_size, module.num_kv_heads, module.head_size_v
    )
    window = module.sliding_window
    mask = ALL if window is None else Mask(window=int(window))
    group = module.num_heads // module.num_kv_heads
    parent = modules.get(name.rsplit(".", 1)[0])
    rotary = getattr(parent, "rotary_emb", None)
    if rotary is None:
        rotation = _of_transformers(modules)
    elif isinstance(rotary, RotaryEmbeddingBase):
        rotation = rotation_of(rotary)
    else:
        raise CannotMove(f"layer {name}: {type(rotary).__name__} is not known")
    return LayerInfo(shape, rotation, mask, group)


_found: dict[int, tuple[nn.Module, Rotation]] = {}


def _of_transformers(modules: Mapping[str, nn.Module]) -> Rotation:
    """Return the rotation of layers that have none of vLLM's: of a model that it runs by transformers'
    own code, one for all of them. Which dims it turns together is tried by `selftest`. Raises
    CannotMove."""
    scaling = "attention_scaling"
    found = {id(m): m for m in modules.values() if hasattr(m, "inv_freq") and hasattr(m, scaling)}
    if not found:
        return STATIC
    (rotary, *others) = found.values()
    kind, inv_freq = getattr(rotary, "rope_type", None), rotary.inv_freq
    if others or kind not in EVEN or getattr(rotary, scaling) != 1.0:
        raise CannotMove(f"{type(rotary).__name__} scales what it turns, or not all layers alike")
    assert isinstance(inv_freq, Tensor)
    if id(rotary) not in _found:
        _found[id(rotary)] = (
            rotary,
            Rotation(2 * len(inv_freq), False, inv_freq.detach().float().cpu()),
        )
    return _found[id(rotary)][1]


def rotation_of(rotary: RotaryEmbeddingBase) -> Rotation:
    """Return how a rotary module turns, compared with its own cosines at every position.

    Raises CannotMove where it stretches rows, or its angles are not positions times frequencies.
    """
    known = _found.get(id(rotary))
    if known is not None and known[0] is rotary:
        return known[1]
    half = rotary.rotary_dim // 2
    cache: Tensor = rotary.cos_sin_cache.detach().float().cpu()
    cos, sin = cache[:, :half], cache[:, half : 2 * half]
    if cache.shape[1] != 2 * half or not torch.equal(cos[0], torch.ones(half)):
        raise CannotMove(f"{type(rotary).__name__} scales what it turns")
    allowed = ROUNDING if rotary.cos_sin_cache.dtype == torch.float32 else HALF
    declared = rotary._compute_inv_freq(rotary.base).float().cpu()
    for inv_freq in (declared, frequencies(cos.double(), sin.double()).float()):
        angles = torch.arange(len(cache)).float()[:, None] * inv_freq
        off = max(float((angles.cos() - cos).abs().max()), float((angles.sin() - sin).abs().max()))
        if off <= allowed:
            made = Rotation(2 * half, not rotary.is_neox_style, inv_freq)
            _found[id(rotary)] = rotary, made
            return made
    raise CannotMove(f"{type(rotary).__name__} does not turn evenly with the position")


def frequencies(cos: Tensor, sin: Tensor) -> Tensor:
    """Return radians per position of ``cos`` and ``sin`` [position, pair], which are even turns.

    The angle at position 1 is known; that at 2, 4, 8, ... makes it twice as precise each time.
    """
    found, at = torch.atan2(sin[1], cos[1]), 2
    while at < len(cos):
        rest = torch.atan2(sin[at], cos[at]) - found * at
        found = found + (rest - (rest / (2 * torch.pi)).round() * 2 * torch.pi) / at
        at *= 2
    return found

"""Every causal language model of the installed transformers, tiny and random: `tiny(model_type)`.

A configuration is made from one list of sizes by the names of its fields, the small models inside
it (text, vision, audio) likewise, and from what `tests/zoo_sizes.py` says of a type by itself. Only
the modules of that type are imported.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo_sizes import OWN, SIZES, UNBUILT

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = SIZES["vocab_size"]
LARGEST = 3_000_000  # parameters
DECAY = (0.05, 1.0)  # of states, times softplus(STEP) a token: they remember 20 to 400 tokens
STEP = -3.0
DRAWN = (
    "correction_bias",
    "expert_bias",
    "layer_scalar",
    "balancing_biases",
)  # buffers that checkpoints hold


class Unbuilt(Exception):
    """A type has no tiny model; the message says why."""


def tiny(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return a tiny random model of a type, in eval mode. Raises Unbuilt with the reason."""
    if model_type in UNBUILT:
        raise Unbuilt(UNBUILT[model_type])
    config = configure(model_type)
    torch.manual_seed(seed)
    # not `.to(dtype)` afterwards: that takes along the frequencies, which are float32 in any dtype
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    n = sum(parameter.numel() for parameter in model.parameters())
    if n > LARGEST:
        raise Unbuilt(f"its smallest model has {n / 1e6:.1f} M parameters")
    redraw(model, seed)
    return model.eval()  # type: ignore[no-any-return]


def configure(model_type: str) -> PreTrainedConfig:
    """Return the tiny configuration of a type."""
    config = _configure(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))
    for each in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        if each is not None:
            each._experts_implementation = "eager"  # the others have no float64
    return config


def _configure(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    options = {name: value for name, value in SIZES.items() if name in fields} | own
    if "kv_lora_rank" in fields:  # a latent has no groups of heads
        options |= {"num_key_value_heads": options["num_attention_heads"]}
    for name in kind.sub_configs:
        given = own.get(name, {})
        if name in fields and isinstance(given, dict):
            inside = _inside(kind, name, given)
            if inside is not None:
                options[name] = _configure(inside, OWN.get(inside.model_type, {}) | given)
    for name in ("layer_types", "mlp_layer_types"):
        if name in fields and name not in own:
            kinds = getattr(kind(), name, None)
            if kinds and len(set(kinds)) > 1:  # one kind: as the sizes make it
                options[name] = mixed(kinds, options)
    return kind(**{name: value for name, value in options.items() if value is not ...})


def _inside(kind: type[PreTrainedConfig], name: str, given: dict[str, Any]) -> Any:
    """Return the class of a configuration inside another."""
    if "model_type" in given:
        return CONFIG_MAPPING[given["model_type"]]
    found = getattr(kind(), name)
    return None if found is None else type(found)


def mixed(kinds: list[str], options: dict[str, Any]) -> list[str]:
    """Return kinds for the layers of a tiny model: each occurs, and something stands behind it."""
    each, n = list(dict.fromkeys(kinds)), options.get("num_hidden_layers", 4)
    return [each[min(i - 1, len(each) - 1) if 0 < i < n - 1 else 0] for i in range(n)]


@torch.no_grad()
def redraw(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw all weights anew, so that none is 0 or 1 and states remember 20 to 400 tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(_drawn(name.rsplit(".", 1)[-1], name, parameter, generator))
    for name, buffer in model.named_buffers():
        if name.endswith(DRAWN):
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))


def _drawn(last: str, name: str, was: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(was.shape, generator=generator)
    if last == "A_log":
        low, high = DECAY
        return (low + (high - low) * torch.rand(was.shape, generator=generator)).log()
    if last == "dt_bias" or name.endswith("dt_proj.bias"):
        return STEP + 0.2 * noise
    if was.dim() > 1:
        return noise / math.sqrt(was.shape[-1])
    return was + 0.3 * noise

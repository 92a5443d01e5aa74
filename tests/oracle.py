"""The oracle: a full prefill by transformers itself, with its own positions, mask and cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.run.base import Work
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows

BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_theta": 10000.0}

# name -> (model type, config changes). Every entry is tested against the oracle.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "yarn": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3_partial": (
        "phi3",
        {"rope_parameters": ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 7}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "num_hidden_layers": 6}),
    "smollm3_nope": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7}),
    "granite": ("granite", {}),
    "stablelm": ("stablelm", {}),
    "cohere_interleaved": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 7}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", {}),
    "nemotron": ("nemotron", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "exaone4": ("exaone4", {"sliding_window": 7}),
    "helium": ("helium", {}),
    "persimmon": ("persimmon", {}),
    "seed_oss": ("seed_oss", {}),
    # masks by config.sliding_window alone, and hands attention no window
    "phimoe": ("phimoe", {"sliding_window": 7, "num_local_experts": 4}),
    "llama4_chunked": (
        "llama4_text",
        {
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
        },
    ),
}

# model types that are refused, and a word of the reason
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {}, "no rotation"),
    "opt": ("opt", {"word_embed_proj_dim": 64}, "no rotation"),
    "bloom": ("bloom", {}, "attention interface"),
    "mamba": ("mamba", {}, "state"),
    "qwen3_next": ("qwen3_next", {}, "state"),
    "hunyuan": ("hunyuan_v1_dense", {}, "no rotation"),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4}, "sinks"),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "head_dim": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 4,
        },
        "latent",
    ),
    "ministral3_far": ("ministral3", {"max_position_embeddings": 65536}, "differs"),
}


def build(kind: str, changes: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Build a tiny random model. Weights are drawn wide, norms too, so that mistakes show."""
    torch.manual_seed(0)
    options = BASE | changes
    try:
        config = CONFIG_MAPPING[kind](**options)
    except (TypeError, AttributeError):
        options.pop("head_dim")
        config = CONFIG_MAPPING[kind](**options)
    config._experts_implementation = "eager"  # grouped matmul has no float64
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def full_prefill(runner: Runner, ids: Tensor, attention: str = "eager") -> Tensor:
    """Return logits [token, vocab] of transformers' own forward."""
    runner.model.set_attn_implementation(attention)
    try:
        return runner.model(ids[None], past_key_values=DynamicCache(), use_cache=True).logits[0]
    finally:
        runner.model.set_attn_implementation("kvweave")


def rows_of(runner: Runner, ids: Tensor, positions: Tensor | None = None) -> tuple[KVRows, Tensor]:
    """Return rows and all logits of our own one-piece prefill."""
    n = ids.numel()
    rows = runner.new_rows()
    rows.reserve(n)
    slots = np.arange(n)
    where = slots if positions is None else positions.numpy()
    return rows, runner.forward([Work(rows, ids.numpy(), slots, where, want=slots)])[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error relative to the largest wanted value."""
    return float((found - wanted).abs().max() / wanted.abs().max())

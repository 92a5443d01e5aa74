"""What a chunk weighs and what an edit costs, by the class of a model's layers.

Random models of about 0.2 B parameters, one of each class that runs here, and a context of a base
and 24 turns, 4k tokens. In each round, one after the other: transformers' own full prefill of the
edited context (`sdpa` where the model has it, else `eager`), and kvweave's first token after one turn
is exchanged for another, without repair and with `auto` at 5 %. Ratios are of pairs of one round.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch
from common import (
    Pair,
    Shape,
    compare,
    full_prefill,
    machine,
    median,
    parser,
    progress,
    report,
    seconds,
    shape_of,
    table,
)
from prune import exchange, first_token, make_world
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.run.base import LayerInfo
from kvweave.run.model import Runner
from kvweave.run.states import MAPS

CASES = ("none", "auto")
WINDOW = 512


def classes(shape: Shape) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the type and the own options of a model of each class."""
    sliding = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    mixed = {
        "layer_types": (sliding * shape.layers)[: shape.layers],
        "sliding_window": min(WINDOW, 8 * shape.hidden),
    }
    latent = {
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim // 2,
        "kv_lora_rank": shape.hidden // 4,
        "q_lora_rank": shape.hidden // 2,
        "qk_rope_head_dim": shape.head_dim // 2,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "first_k_dense_replace": shape.layers,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    shared = {
        "num_kv_shared_layers": shape.layers // 2,
        "hidden_size_per_layer_input": shape.head_dim,
        "vocab_size_per_layer_input": shape.vocab,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    }
    return {
        "full attention": ("qwen3", {}),
        "windows": ("gemma3_text", mixed),
        "sinks": ("gpt_oss", mixed | experts | {"intermediate_size": shape.ffn // 2}),
        "latents": ("deepseek_v3", latent),
        "shared rows": ("gemma4_text", mixed | shared),
        "norm behind the rotation": ("hunyuan_v1_dense", {}),
        **hybrids(shape),
        **others(shape, latent),
    }


def others(shape: Shape, latent: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the same for models that see chunks of positions, or whose own attention runs."""
    seen = min(WINDOW, 8 * shape.hidden)
    index = {"index_n_heads": shape.heads, "index_head_dim": shape.head_dim, "index_topk": seen}
    chunks = {
        "attention_chunk_size": seen,
        "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * shape.layers,
        "no_rope_layers": ([1, 1, 1, 0] * shape.layers)[: shape.layers],
        "intermediate_size_mlp": shape.ffn,
        "num_local_experts": 4,
        "moe_layers": [],
    }
    chunks["layer_types"] = chunks["layer_types"][: shape.layers]
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    pooled = {
        "num_key_value_heads": 1,
        "head_dim": 2 * shape.head_dim,
        "qk_rope_head_dim": shape.head_dim // 2,
        "q_lora_rank": shape.hidden // 2,
        "o_lora_rank": shape.hidden // 4,
        "o_groups": 2,
        "sliding_window": min(128, seen),
        "layer_types": (kinds * shape.layers)[: shape.layers],
        "compress_rates": dict(zip(kinds, (128, 4), strict=True)),
        "mlp_layer_types": ["moe"] * shape.layers,
        "intermediate_size": shape.ffn // 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "hc_mult": 2,
    }
    return {
        "chunks of positions": ("llama4_text", chunks),
        "index": ("deepseek_v32", latent | index),
        "pooled rows": ("deepseek_v4", pooled | index),
        "linear biases": ("bloom", {"n_layer": shape.layers, "n_head": shape.heads}),
    }


def hybrids(shape: Shape) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the same for models with layers that keep a state."""
    delta = {f"linear_num_{kind}_heads": shape.heads for kind in ("key", "value")}
    delta |= {f"linear_{kind}_head_dim": shape.head_dim for kind in ("key", "value")}
    space = {
        "mamba_d_ssm": 2 * shape.hidden,
        "mamba_d_head": shape.head_dim,
        "mamba_n_heads": 2 * shape.hidden // shape.head_dim,
        "mamba_d_state": shape.head_dim,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 128,
    }
    convolutions = ["conv", "conv", "full_attention", "conv"]
    return {
        "delta rule": ("qwen3_next", delta | {"num_experts": 0}),
        "state space beside attention": ("falcon_h1", space),
        "convolutions": (
            "lfm2",
            {"layer_types": (convolutions * shape.layers)[: shape.layers]},
        ),
    }


def pair_of(shape: Shape, kind: str, own: dict[str, Any], dtype: str, limit: int) -> Pair:
    """Return a random model of a class twice; both share their weights."""
    options = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": limit,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(options | own))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(getattr(torch, dtype)).eval()
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    plain = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    return Pair(plain, Runner(model, name=kind), shape)


def measured(pair: Pair, n_context: int, rounds: int) -> dict[str, Any]:
    """Return what one class weighs and takes."""
    world = make_world(pair, n_context)
    times: dict[str, list[float]] = {case: [] for case in ("full", *CASES)}
    there = [f"turn/{i}" for i in range(24)]
    for i in range(rounds):
        at, new = 12, "other" if i % 2 == 0 else "turn/12"
        names = [*there[:at], new, *there[at + 1 :]]
        suffix = world.suffix()
        ids = torch.cat((world.ids(names), torch.tensor([suffix])), 1)
        times["full"].append(seconds(lambda ids=ids: full_prefill(pair, ids), pair.device))
        for case in CASES:
            context = world.contexts[case]
            edit = lambda c, new=new: exchange(c, at + 1, new)  # noqa: E731, B023
            times[case].append(first_token(world, context, edit, suffix)["total"])
    drift = world.contexts["auto"].check().kl
    layers, n_maps = pair.runner.layers, MAPS.n_bytes
    world.engine.close()
    return {
        "parameters": sum(p.numel() for p in pair.plain.parameters()),
        "bytes_per_token": pair.runner.row_bytes,
        "layers": len({number for info in layers for number in numbers(info)}),
        "layers_with_rows": len(layers),
        "attention": pair.plain.config._attn_implementation,
        "seconds": {case: median(each) for case, each in times.items()},
        "x_full": {case: compare(times["full"], times[case]) for case in CASES},
        "kl_auto": float(np.float64(drift)),
        "map_bytes": n_maps,
    }


def numbers(info: LayerInfo) -> tuple[int, ...]:
    """Return by which numbers a model calls the layers that these rows are of."""
    return info.readers or ((0,) if info.mixer is None else (info.mixer.number,))


def main() -> None:
    """Run all classes, write bench/results/classes.json."""
    own: argparse.ArgumentParser = parser(__doc__)
    own.add_argument("--only", default=None, help="one class")
    options = own.parse_args()
    shape, found = shape_of(options), {}
    chosen = {k: v for k, v in classes(shape).items() if options.only in (None, k)}
    with progress("classes", len(chosen)) as step:
        for name, (kind, changes) in chosen.items():
            pair = pair_of(shape, kind, changes, options.dtype, options.context + 1024)
            found[name] = {"type": kind, **measured(pair, options.context, options.rounds)}
            step(name)
    rows = [
        [name, at["type"], at["parameters"] // 10**6, at["bytes_per_token"]]
        + [at["seconds"][case] for case in ("full", *CASES)]
        + [at["x_full"][case]["median"] for case in CASES]
        for name, at in found.items()
    ]
    columns = "class type M bytes/token full none auto x-none x-auto".split()
    result = {"machine": machine(torch.device("cpu")), "context": options.context, "classes": found}
    report(result, [table("first token after an edit, s", columns, rows)], options, "classes")


if __name__ == "__main__":
    main()

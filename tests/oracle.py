"""The oracle: a full prefill by transformers itself, with its own positions, mask and cache."""

from __future__ import annotations

import inspect
import os
import re
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from needs import PIP, lack
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, cache_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave.run.base import Work
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows

if os.environ.get("KVWEAVE_TEST_DEVICE", "").startswith("counted"):
    import device.counted  # noqa: F401
DEVICE = torch.device(os.environ.get("KVWEAVE_TEST_DEVICE", "cpu"))  # of all tiny models
MEMORY = "gpu" if DEVICE.type == "cuda" else "ram"  # the tier there

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

LATENT = {
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
}
GEMMA4 = ["sliding_attention", "full_attention"]

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
    "gpt_oss_sinks": ("gpt_oss", {"sliding_window": 7, "num_local_experts": 4}),
    # a norm behind the rotation
    "hunyuan": ("hunyuan_v1_dense", {}),
    "deepseek_v2_latent": ("deepseek_v2", LATENT),
    "deepseek_v3_latent": ("deepseek_v3", LATENT),
    # attention of their own
    "deepseek_v32_indexed": (
        "deepseek_v32",
        LATENT | {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 16},
    ),
    "diffllama": ("diffllama", {}),
    # the last two layers attend to rows of others
    "gemma4_shared": (
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [*GEMMA4, GEMMA4[0], *GEMMA4],
            "sliding_window": 7,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 101,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
    ),
}

# those whose rows hold their position, in a way that is no rotation: they run, and are not moved
FIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "opt": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "biogpt": ("biogpt", {}),
    "roberta": ("roberta", {"is_decoder": True, "pad_token_id": 1}),  # whose positions begin at 2
}

# those that this version of transformers cannot cache as ours does, and why: `conftest` skips them
_NEWER = PIP, "transformers>=5.23"
LACKING: dict[str, str] = {}
if not hasattr(cache_utils, "DummyLayer"):
    LACKING["gemma4_shared"] = lack(
        "transformers caches nothing for layers that share rows", *_NEWER
    )
    for _kind in ("bloom", "rembert"):  # what else changed there is not known: they are refused
        LACKING[_kind] = lack(f"{_kind} is refused with this transformers", *_NEWER)
if "indexed_attention" not in cache_utils.DYNAMIC_LAYER_TYPE_MAPPING:
    LACKING["deepseek_v32_indexed"] = lack(
        "transformers caches no latents beside an index", *_NEWER
    )

# model types that are refused, and a word of the reason
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai-gpt": ("openai-gpt", {}, "attention interface"),
    "mamba": ("mamba", {}, "no layer uses"),
    "ministral3_far": ("ministral3", {"max_position_embeddings": 65536}, "differs"),
}


# How far two ways to compute one number may be apart, relative to the largest, whatever the machine:
# float64 all the way (4e6 eps: deep models amplify what each product rounds), and with one step in
# float32. Such steps are logprobs, which are read off float32 logits, and rotary modules that scale
# their cosines (yarn, longrope; gpt-oss has one): they round that product, we scale the keys. Llama 4
# and DeepSeek-V2 make float32 cosines by `polar`, which need not round as `cos` does. What a norm
# behind the rotation does is measured, and kept in float32.
ROUNDED = ("yarn", "llama4_chunked", "gpt_oss_sinks", "deepseek_v2_latent", "hunyuan")
EXACT, SINGLE = 1e-9, 16 * torch.finfo(torch.float32).eps


def bound(name: str) -> float:
    """Return the bound that holds for an entry of `MODELS` in float64."""
    return SINGLE if name in ROUNDED else EXACT


class Float64(TorchFunctionMode):
    """Stays in float64 where transformers' code goes to float32 whatever the model's dtype.

    Norms, routers and the softmax of eager attention do. Two ways to compute one number differ by
    1e-16, and now and then that is the next float32: bounds on float64 would hold on some machines.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
        return func(*args, **options)


@cache
def _wider(kind: type) -> type:
    """Return the class of a module that stays in float64: its own, if neither the code of its ``forward``
    nor how that turns keys names another dtype.

    A norm has the names exchanged, which gives the same bits: a mode looks at every operation, and
    most of what a tiny model does are norms. A rotary module has nothing that is float64.
    """
    if "Rotary" in kind.__name__:
        return kind
    forward = kind.forward  # type: ignore[attr-defined]
    plain = inspect.unwrap(forward)
    turns = [name for name in plain.__code__.co_names if name.startswith("apply_rotary")]
    called = [plain.__globals__[turn] for turn in turns]
    if not any(re.search(r"\bfloat(32)?\b", inspect.getsource(f)) for f in (plain, *called)):
        return kind

    def watched(*args: Any, **options: Any) -> Any:
        with Float64():
            return forward(*args, **options)

    def named() -> Any:
        exchanged = {"float": "double", "float32": "float64"}
        names = tuple(exchanged.get(name, name) for name in plain.__code__.co_names)
        code = plain.__code__.replace(co_names=names)
        return FunctionType(code, plain.__globals__, None, plain.__defaults__, plain.__closure__)

    norm = "Norm" in kind.__name__ and plain is forward
    return type(kind.__name__, (kind,), {"forward": named() if norm else watched})


def stay_in_float64(model: Any) -> None:
    """Let the modules of a float64 model that would compute in float32 not do so."""
    for module in model.modules():
        module.__class__ = _wider(type(module))


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
    if dtype == torch.float64:
        stay_in_float64(model)
    return model.eval().to(DEVICE)


@torch.no_grad()
def full_prefill(runner: Runner, ids: Tensor, attention: str = "eager") -> Tensor:
    """Return logits [token, vocab] of transformers' own forward."""
    ours = runner.model.config._attn_implementation
    own = any(info.handed is not None for info in runner.layers)  # some have caches of their own
    cache = DynamicCache(config=runner.model.config) if own else DynamicCache()
    runner.model.set_attn_implementation(attention)
    try:
        with Float64():
            logits = runner.model(
                ids[None].to(DEVICE), past_key_values=cache, use_cache=True
            ).logits[0]
            return logits.cpu()
    finally:
        runner.model.set_attn_implementation(ours)


@torch.no_grad()
def attention_of(model: Any, tokens: list[int], n_heads: list[int]) -> list[Tensor]:
    """Each layer's attention [kv head, row, key], the mean over query heads, by transformers alone."""
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device=DEVICE)
    found = model(ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(kept)
    return [
        a[0].view(n, -1, *a.shape[2:]).mean(1).cpu() for a, n in zip(found, n_heads, strict=True)
    ]


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether these are the same bits; kernels of a GPU may round the last one otherwise."""
    if DEVICE.type == "cpu":
        return torch.equal(found, wanted)
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


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
    found, wanted = found.cpu(), wanted.cpu()
    return float((found - wanted).abs().max() / wanted.abs().max())

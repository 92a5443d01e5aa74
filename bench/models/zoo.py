"""The models of the bench: small, of different architecture, size, words and length of reply.

No weight is set by hand, and no constant of a strategy may be chosen on the model it is reported on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from models.worlds import Wording

FILLER = tuple("so well then it was a day of rain and some more light on the way there".split())


@dataclass(frozen=True)
class Kind:
    """A model to train: its wording (None of prose), how it is built, and for how many minutes."""

    name: str
    build: Callable[[int, dict[str, Any]], Any]
    minutes: float
    wording: Wording | None = None
    rate: float = 3e-3
    vocab: int = 0  # of a prose model: pieces; 256 bytes and the special ones where it is 0
    about: str = ""


def llama(vocab: int, own: dict[str, Any]) -> Any:
    """Four layers, two KV heads of 64."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(500.0), **own,
        )
    )  # fmt: skip


def qwen3(vocab: int, own: dict[str, Any], theta: float = 1000.0) -> Any:
    """Five layers, wider, keys and queries normalised."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocab, hidden_size=160, intermediate_size=448, num_hidden_layers=5,
            num_attention_heads=4, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(theta), **own,
        )
    )  # fmt: skip


def neox(vocab: int, own: dict[str, Any]) -> Any:
    """A quarter of each head is rotated, attention and MLP side by side."""
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=vocab, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=3, max_position_embeddings=8192, use_parallel_residual=True,
            rope_parameters={**rope(1000.0), "partial_rotary_factor": 0.25}, rotary_pct=0.25,
            tie_word_embeddings=True, **own,
        )
    )  # fmt: skip


def gemma3(vocab: int, own: dict[str, Any], theta: float = 10_000.0) -> Any:
    """Six layers, of which four see 64 rows back."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, layer_types=kinds,
            sliding_window=64, max_position_embeddings=8192, query_pre_attn_scalar=64,
            rope_parameters={"sliding_attention": rope(500.0), "full_attention": rope(theta)},
            **own,
        )
    )  # fmt: skip


def qwen3moe(vocab: int, own: dict[str, Any]) -> Any:
    """Four experts a layer, two for each token."""
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=256, moe_intermediate_size=192,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(500.0), **own,
        )
    )  # fmt: skip


def olmo2(vocab: int, own: dict[str, Any], theta: float = 2000.0) -> Any:
    """Norms behind attention and MLP, keys and queries normalised over all heads."""
    return transformers.Olmo2ForCausalLM(
        transformers.Olmo2Config(
            vocab_size=vocab, hidden_size=192, intermediate_size=448, num_hidden_layers=4,
            num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(theta), **own,
        )
    )  # fmt: skip


def deepseek(vocab: int, own: dict[str, Any]) -> Any:
    """Five layers that keep a latent of 64 and a key of 32 that all heads share, no experts."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=vocab, hidden_size=160, intermediate_size=448, num_hidden_layers=5,
            num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=96,
            qk_rope_head_dim=32, qk_nope_head_dim=48, v_head_dim=48, first_k_dense_replace=5,
            num_mtp_layers=0, tie_word_embeddings=True, max_position_embeddings=8192,
            rope_parameters=rope(1000.0), **own,
        )
    )  # fmt: skip


def qwen3next(vocab: int, own: dict[str, Any]) -> Any:
    """Eight layers, of which six keep a state (gated delta rule) and two rows, no experts."""
    made = transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=320, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=4,
            linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
            num_experts=0, tie_word_embeddings=True, max_position_embeddings=8192,
            rope_parameters={**rope(1000.0), "partial_rotary_factor": 0.5}, **own,
        )
    )  # fmt: skip
    remember(made)
    return made


def remember(model: Any) -> None:
    """Begin states with steps of .001 to .1, as its authors do: at transformers' 1.3 most heads of
    a new model have forgotten a token with the next."""
    for layer in model.base_model.layers:
        if hasattr(layer, "linear_attn"):
            bias = layer.linear_attn.dt_bias
            steps = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)))
            bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))


def hunyuan(vocab: int, own: dict[str, Any]) -> Any:
    """Five layers, one KV head for two, keys and queries normalised behind the rotation."""
    return transformers.HunYuanDenseV1ForCausalLM(
        transformers.HunYuanDenseV1Config(
            vocab_size=vocab, hidden_size=144, intermediate_size=384, num_hidden_layers=5,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(1500.0), **own,
        )
    )  # fmt: skip


def exaone4(vocab: int, own: dict[str, Any]) -> Any:
    """Six layers with norms behind attention and MLP; two see all rows and rotate nothing, four see 64 back."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(
            vocab_size=vocab, hidden_size=144, intermediate_size=384, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, layer_types=kinds,
            sliding_window=64, sliding_window_pattern=3, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(1000.0), **own,
        )
    )  # fmt: skip


def gpt_oss(vocab: int, own: dict[str, Any]) -> Any:
    """Four layers, each head with a sink, every other one sees 64 rows back, two of three experts a token."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=vocab, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2, num_local_experts=3,
            num_experts_per_tok=2, tie_word_embeddings=True, max_position_embeddings=8192,
            rope_parameters=rope(1000.0), **own,
        )
    )  # fmt: skip


def llama_prose(vocab: int, own: dict[str, Any]) -> Any:
    """Four layers for prose in pieces of words."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=160, intermediate_size=448, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=48, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(10_000.0), **own,
        )
    )  # fmt: skip


def qwen3_prose(vocab: int, own: dict[str, Any]) -> Any:
    """Four layers for prose in bytes, keys and queries normalised."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocab, hidden_size=160, intermediate_size=448, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=48, tie_word_embeddings=True,
            max_position_embeddings=8192, rope_parameters=rope(10_000.0), **own,
        )
    )  # fmt: skip


def rope(theta: float) -> dict[str, Any]:
    """Return plain rotary parameters."""
    return {"rope_type": "default", "rope_theta": theta}


ZOO = (
    Kind("llama-one", llama, 28, Wording(
        "A E V .", "A its V .", "now A E V .", "A E as F .", "ask A E", "V", seed=1, filler=FILLER,
    ), about="the reply is the value"),
    Kind("qwen3-last", qwen3, 12, Wording(
        "A E V ;", "A it V ;", "A E V instead ;", "A E like F ;", "which A E", "A E V ;",
        seed=2, entities=90, values=40,
    ), about="the sentence again: the value last of its four tokens"),
    Kind("neox-first", neox, 16, Wording(
        "the A E is V ,", "the A there is V ,", "no the A E is V ,", "the A E is what F has ,",
        "the A E is", "V for the A E is V ,", "V from F the A F is V ,",
        seed=3, attributes=8, filler=FILLER,
    ), about="the value first, then why"),
    Kind("gemma3-slide", gemma3, 14, Wording(
        "A of E : V |", "A too : V |", "A of E : V now |", "A of E : as F |", "A of E",
        "A of E : V |", seed=4, filler=FILLER, entities=40, values=80,
    ), about="sliding layers, the value last"),
    Kind("qwen3moe-chain", qwen3moe, 24, Wording(
        "A E V .", "A also V .", "now A E V .", "A E same F .", "follow A E", "P is V",
        "A E same F . A F V . is V", step="A E V .", seed=5, attributes=4, hops=5,
    ), about="a chain of thought: up to 20 tokens of steps, then the value"),
    Kind("olmo2-path", olmo2, 24, Wording(
        "E A to V", "and A to V", "E A now to V", "E A by F", "go E A", "P stop V",
        "E A by F F A to V stop V", step="E A to V", seed=6, entities=70, attributes=3, hops=2,
        filler=FILLER,
    ), about="two steps, then the value"),
    Kind("deepseek-last", deepseek, 35, Wording(
        "A E V ,", "A same V ,", "A E V after all ,", "A E with F ,", "what A E", "A E V ,",
        seed=7, entities=80, values=50,
    ), about="latents, the sentence again"),
    Kind("qwen3next-one", qwen3next, 45, Wording(
        "A E V .", "A that V .", "now A E V .", "A E from F .", "tell A E", "V", seed=8,
        filler=FILLER,
    ), about="states and rows, the reply is the value"),
    Kind("hunyuan-mid", hunyuan, 14, Wording(
        "E A V .", "it A V .", "E A V by now .", "E A as F .", "say A E", "that E A V , I know",
        seed=9, entities=50, values=70, filler=FILLER,
    ), about="the value amid the reply"),
    Kind("gpt_oss-steps", gpt_oss, 30, Wording(
        "E A V ;", "so A V ;", "E A V from now ;", "E A like F ;", "walk E A", "P end V",
        "E A like F ; F A V ; end V", step="E A V ;", seed=10, entities=50, attributes=5, hops=3,
    ), about="sinks and experts, up to three steps, then the value"),
    Kind("exaone4-why", exaone4, 15, Wording(
        "E A V |", "also A V |", "E A V since |", "E A what F |", "then E A", "V as E A V",
        "V as E A what F", seed=11, entities=45, attributes=8, values=45, filler=FILLER,
    ), about="layers without positions, the value and then where it stands"),
    Kind("llama-prose", llama_prose, 20, rate=2e-3, vocab=1024, about="documentation and source of Python"),
    Kind("qwen3-bytes", qwen3_prose, 12, rate=2e-3, about="the same in bytes"),
)  # fmt: skip

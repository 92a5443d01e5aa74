"""Tiny random models in float64: a runner for the engine and an untouched copy for the twin."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from oracle import DEVICE
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvweave import Runner
from world.twin import Twin

LIMIT = 224  # positions of every model
N_VOCAB = 64
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<system>",
    "<user>",
    "<assistant>",
    "<end>",
    "</think>",
    "<unk>",
]
PAD, BOS, EOS, END, THINK = 0, 1, 2, 6, 7
ROLES = {"system": 3, "user": 4, "assistant": 5}
FIRST_WORD = len(SPECIAL)
CHAT = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (model type, changes of its config, whether its tokenizer puts a BOS token in front)
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", {"head_dim": 8}, True),
    "qwen3": ("qwen3", {"head_dim": 8}, False),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 7, "layer_types": SLIDING},
        True,
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}, False),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}, True),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": 9}, False),
}


def word(token: int) -> str:
    """The text of a token that is no special one."""
    return SPECIAL[token] if token < FIRST_WORD else f"t{token}"


def text(tokens: Sequence[int]) -> str:
    """The text that is tokenised as these tokens."""
    return " ".join(map(word, tokens))


def shown(tokens: Sequence[int]) -> str:
    """The text of an answer, in which the tokens that frame a text do not show."""
    return text([token for token in tokens if token not in (PAD, BOS, EOS)])


def tokenizer(with_bos: bool) -> PreTrainedTokenizerFast:
    """One token a word, ``t9`` to ``t63``; with a chat template."""
    known = {word(token): token for token in range(N_VOCAB)}
    plain = Tokenizer(WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if with_bos:
        plain.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT,
    )


def make(kind: str, changes: dict[str, Any]) -> tuple[Any, Twin]:
    """Draw a model, and a copy for the twin. Weights are wide, norms too, so that mistakes show."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(SHAPE | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.eval().requires_grad_(False).to(DEVICE)
    return model, Twin(copy.deepcopy(model))


@cache
def build(name: str) -> tuple[Runner, Twin]:
    """Make a model of `MODELS`, once a run."""
    kind, changes, with_bos = MODELS[name]
    model, twin = make(kind, changes)
    return Runner(model, tokenizer(with_bos), name=name), twin

"""Models that compute something else are other models; what says nothing of that makes no other one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T

from kvweave.run.fingerprint import fingerprint
from kvweave.run.model import Runner

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 256,
    "initializer_range": 0.4,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "llama": T.LlamaConfig(**SMALL),
    "mistral": T.MistralConfig(**SMALL, sliding_window=None),
    "gemma2": T.Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=8),
    "granite": T.GraniteConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "mixtral": T.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "cohere": T.CohereConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
}
IDS = torch.arange(1, 41)[None]


def made(config: Any) -> Any:
    torch.manual_seed(0)
    # asked for its attentions transformers may compute them otherwise, so they are written out in any case
    return T.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()


def others(name: str, value: Any) -> list[Any]:
    """Return other values that a field may have."""
    if name == "hidden_act" or name == "hidden_activation":
        return ["relu"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if isinstance(value, int):
        return [value + 1, max(1, value - 1), 9]
    return [9, 1.5] if value is None else []


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_field_changes_what_is_computed_changes_the_fingerprint(kind: str) -> None:
    config = KINDS[kind]
    first = made(config)
    known, was, weights = fingerprint(first, None, "m", []), logits(first), first.state_dict()
    changed = set()
    for name, value in config.to_dict().items():
        for other in others(name, value):
            try:
                again = copy.deepcopy(config)
                setattr(again, name, other)
                model = made(again)
                model.load_state_dict(weights)
                now = logits(model)
            except Exception:  # no such model, or other weights
                continue
            if now.shape == was.shape and (now - was).abs().max() > 1e-3 * was.abs().max():
                assert fingerprint(model, None, "m", []) != known, (name, other)
                changed.add(name)
    assert len(changed) >= 2, changed  # of the norm and the activation at least


def test_another_version_of_the_library_or_place_makes_no_other_model() -> None:
    model = made(KINDS["llama"])
    known = fingerprint(model, None, "m", [])
    model.config.transformers_version, model.config._name_or_path = "9.9", "elsewhere"
    model.config.id2label, model.config.architectures = {0: "a"}, ["Other"]
    assert fingerprint(model, None, "m", []) == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_of_any_weight_is_seen(dtype: torch.dtype) -> None:
    model = made(T.LlamaConfig(**SMALL | {"vocab_size": 20_000})).to(dtype)
    known = fingerprint(model, None, "m", [])
    made_by = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        flat = weight.data.view(-1)
        for at in torch.randint(len(flat), (8,), generator=made_by).tolist():
            was = flat[at].clone()
            flat[at] = was + 0.5
            assert fingerprint(model, None, "m", []) != known
            flat[at] = was
    assert fingerprint(model, None, "m", []) == known
    embedding = model.get_input_embeddings().weight.data
    embedding[[11_003, 11_400]] = embedding[[11_400, 11_003]]  # rows change places
    assert fingerprint(model, None, "m", []) != known


def test_an_adapter_is_told_by_its_options() -> None:
    class Options:
        def __init__(self, alpha: int) -> None:
            self.alpha = alpha

        def to_dict(self) -> dict[str, Any]:
            return {"lora_alpha": self.alpha, "target_modules": {"q_proj", "v_proj"}}

    model, found = made(KINDS["llama"]), set()
    for adapters in (None, {"default": Options(8)}, {"default": Options(16)}):
        model.peft_config = adapters
        found.add(fingerprint(model, None, "m", []))
    assert len(found) == 3


@pytest.mark.parametrize("kind", ["Roberta", "Camembert", "XLMRobertaXL", "Data2VecText"])
def test_padding_that_says_where_positions_begin_makes_another_model(kind: str) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 61}
    more: dict[str, Any] = {"num_attention_heads": 2, "is_decoder": True, "initializer_range": 0.4}
    found, told = [], []
    for padding in (1, 1, 5):
        config = getattr(T, f"{kind}Config")(
            **small, **more, pad_token_id=padding, max_position_embeddings=64
        )
        model = made(config)
        told.append(logits(model))
        found.append(Runner(model, name="m").fingerprint)
    assert (told[0] - told[2]).abs().max() > 1e-3, "it computes something else"
    assert found[0] == found[1] != found[2]

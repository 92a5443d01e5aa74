"""Make tests/golden/kvpress: which rows NVIDIA's kvpress keeps of prompts of tiny random models.

No test runs this: kvpress needs another transformers than ours. In an environment of its own::

    python3.11 -m venv .venv-kvpress
    .venv-kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5  # brings transformers 5.2.0
    .venv-kvpress/bin/python bench/golden/kvpress_golden.py tests/golden/kvpress

Of each model: its ``config.json``, its weights in bfloat16, and ``kept.npz`` with ``tokens``; the
tokens of both replay ``prompt``s; ``NAME/scores`` float32 [layer, kv_head, token] as the press
returned them; and ``NAME/RATIO`` bool of the same shape, true for rows that are left.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    ObservedAttentionPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress.presses import kvzip_press
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PRESSES: dict[str, Any] = {
    "streaming": StreamingLLMPress,
    "h2o": ObservedAttentionPress,
    "tova": TOVAPress,
    "snapkv": SnapKVPress,
    "keydiff": KeyDiffPress,
    "knorm": KnormPress,
    "expected_attention": ExpectedAttentionPress,
}
RATIOS = 0.1, 0.5, 0.65, 0.8  # of rows that go
N, SPAN = 203, 128  # tokens of a prompt; of a part that KVzip reads again


class Tokenizer:
    """What KVzip asks of one: fixed tokens for its two prompts, none for a chat's frame."""

    chat_template = None
    name_or_path = ""

    def encode(self, text: str, **options: Any) -> torch.Tensor:
        if not text.strip():
            return torch.zeros(1, 0, dtype=torch.long)
        first = "exactly." in text
        return torch.arange(*((90, 96) if first else (80, 88)))[None]


def build(kind: str) -> Any:
    """Build a tiny random model; weights are drawn wide, norms too, and fit bfloat16."""
    config_of, model_of = MODELS[kind]
    torch.manual_seed(16)
    model = model_of(config_of(**SIZES)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()
    return model


def run(model: Any, tokens: torch.Tensor, press: Any = None) -> DynamicCache:
    """Return the cache of a prompt."""
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=tokens, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=tokens, past_key_values=cache)
    return cache


def kept(full: DynamicCache, left: DynamicCache) -> np.ndarray:
    """Tell [layer, kv_head, token] which keys of ``full`` are in ``left``, by their bits."""
    found = []
    for a, b in zip(full.layers, left.layers, strict=True):
        same = (a.keys[0, :, :, None] == b.keys[0, :, None]).all(-1)
        assert (same.sum(1) == 1).all()
        found.append(same.any(2).numpy())
    return np.stack(found)


def scorer(model: Any, tokens: torch.Tensor, kind: Any, found: dict[str, Any], name: str) -> None:
    """Run a press at each ratio, and note the scores."""
    model.set_attn_implementation("eager")
    full = run(model, tokens)
    for ratio in RATIOS:
        press, scores = kind(compression_ratio=ratio), []
        press.score = partial(noted, press.score, scores)
        found[f"{name}/{ratio}"] = kept(full, run(model, tokens, press))
        found[f"{name}/scores"] = torch.stack(scores).float().numpy()


def noted(score: Any, scores: list[torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """Return what ``score`` returns, and note it."""
    scores.append(score(*args, **options)[0])
    return scores[-1][None]


def kvzip(model: Any, tokens: torch.Tensor, found: dict[str, Any], span: int, name: str) -> None:
    """Run KVzip, each layer keeping as many rows as the others."""
    model.set_attn_implementation("sdpa")
    for ratio in RATIOS:
        press = KVzipPress(compression_ratio=ratio, layerwise=True, chunk_size=span)
        after, scores = press.compress_post, []
        press.compress_post = lambda m, a=after, p=press, s=scores: (a(m), s.append(p.score_val))
        run(model, tokens, press)
        found[f"{name}/scores"] = scores[0][:, 0].float().numpy()
        left = np.ones(found[f"{name}/scores"].shape, bool)
        for each, layer in zip(left, model.model.layers, strict=True):
            _, heads, gone = layer.self_attn.masked_key_indices
            each[heads.numpy(), gone.numpy()] = False
            layer.self_attn.masked_key_indices = None
        found[f"{name}/{ratio}"] = left


@torch.inference_mode()
def main(folder: Path) -> None:
    kvzip_press.AutoTokenizer.from_pretrained = lambda *a, **kw: Tokenizer()
    for kind in MODELS:
        where = folder / kind
        where.mkdir(parents=True, exist_ok=True)
        model = build(kind)
        model.config.to_json_file(where / "config.json", use_diff=True)
        weights = {k: v.bfloat16() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(weights, where / "model.safetensors")
        tokens = torch.randint(3, 80, (1, N), generator=torch.Generator().manual_seed(1))
        found: dict[str, Any] = {"tokens": tokens[0].numpy()}
        for i, text in enumerate(("exactly.", "with")):
            found[f"prompt/{i}"] = Tokenizer().encode(text)[0].numpy()
        for name, press in PRESSES.items():
            scorer(model, tokens, press, found, name)
        kvzip(model, tokens, found, 2048, "kvzip")
        kvzip(model, tokens, found, SPAN, f"kvzip{SPAN}")
        np.savez_compressed(where / "kept.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Models of transformers as GGUF files, in float32, as convert_hf_to_gguf would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from needs import need
from numpy.typing import NDArray

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "gemma3_text": "gemma3"}
NORMAL, CONTROL = 1, 3  # types of tokens


def write(
    model: Any,
    path: Path,
    tokenizer: Any = None,
    kv_heads: list[int] | None = None,
    more: Mapping[str, int | bool] | None = None,
    quantised: bool = False,
) -> Path:
    """Write a model, with a tokenizer of byte-level BPE or none; return where.

    ``kv_heads`` of each layer of a Llama: so many of those that there are, which must be equal, are kept
    (a DeciLM, which is a Llama of which layers differ). ``more`` is said of the model besides.
    ``quantised``: matrices are Q8_0.
    """
    gguf = need("gguf")
    config = model.config
    kind = "deci" if kv_heads else ARCHITECTURES[config.model_type]
    to = gguf.GGUFWriter(path, kind)
    to.add_block_count(config.num_hidden_layers)
    to.add_context_length(config.max_position_embeddings)
    to.add_embedding_length(config.hidden_size)
    to.add_feed_forward_length(config.intermediate_size)
    to.add_head_count(config.num_attention_heads)
    to.add_head_count_kv(kv_heads or config.num_key_value_heads)
    to.add_key_length(config.head_dim)
    to.add_value_length(config.head_dim)
    to.add_layer_norm_rms_eps(config.rms_norm_eps)
    to.add_vocab_size(config.vocab_size)
    to.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    rope = config.rope_parameters
    if kind == "gemma3":
        assert config.query_pre_attn_scalar == config.head_dim, "what llama.cpp goes by"
        to.add_sliding_window(config.sliding_window)
        to.add_float32(f"{kind}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    to.add_rope_freq_base(rope["rope_theta"])
    for key, value in (more or {}).items():
        (to.add_bool if isinstance(value, bool) else to.add_uint32)(key, value)
    _add_words(to, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().cpu().numpy()
        if kind in ("llama", "deci") and ("q_proj" in name or "k_proj" in name):
            values = _in_pairs(values, config.head_dim)
        if kind == "gemma3" and "norm" in name:
            values = values + 1  # transformers adds the 1 when it runs
        if kv_heads and ("k_proj" in name or "v_proj" in name):
            values = values[: kv_heads[int(name.split(".")[2])] * config.head_dim]
        values, raw = np.ascontiguousarray(values), None
        if quantised and values.ndim > 1:
            raw = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, raw)
        to.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=raw)
    to.write_header_to_file()
    to.write_kv_data_to_file()
    to.write_tensors_to_file()
    to.close()
    return path


def _in_pairs(rows: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return rows of a projection so that what turns together, half a head apart, is side by side."""
    return rows.reshape(-1, 2, width // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _add_words(to: Any, tokenizer: Any) -> None:
    if tokenizer is None:
        to.add_tokenizer_model("no_vocab")
        return
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {each["id"] for each in told["added_tokens"]}
    words = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    to.add_tokenizer_model("gpt2")
    to.add_tokenizer_pre("llama-bpe")  # a piece that is a token is taken whole
    to.add_token_list([word for word, _ in words])
    to.add_token_types([CONTROL if at in special else NORMAL for _, at in words])
    to.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    to.add_bos_token_id(tokenizer.bos_token_id)
    to.add_eos_token_id(tokenizer.eos_token_id)
    to.add_add_bos_token(False)

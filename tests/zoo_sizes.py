"""Sizes of the tiny models of `tests/zoo.py`: by field for all, then what some types need besides."""

from __future__ import annotations

from typing import Any

VOCAB = 128
WINDOW = 16  # of windows and of aligned chunks
TOP = 16  # keys that an index picks

_BY_VALUE: list[tuple[Any, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
    (
        64,
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim"
        " input_embedding_size output_embedding_size lru_width attention_hidden_size",
    ),
    (
        96,
        "intermediate_size ffn_dim dff dim_ff d_inner ffn_hidden_size decoder_ffn_dim"
        " encoder_ffn_dim feed_forward_size n_inner intermediate_size_mlp dense_intermediate_size"
        " prefix_dense_intermediate_size",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
        " moe_shared_expert_intermediate_size expert_ffn_hidden_size"
        " shared_experts_intermediate_size router_hidden_size kv_lora_rank index_head_dim",
    ),
    (24, "q_lora_rank v_head_dim"),
    (
        16,
        "head_dim d_head d_kv attention_head_size dim_head attention_head_dim kv_channels"
        " qk_rope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"
        " indexer_head_dim swa_head_dim state_size ssm_state_size mamba_d_state"
        " mamba_d_head mamba_head_dim mamba_chunk_size chunk_size block_size gated_norm_rank",
    ),
    (
        8,
        "qk_nope_head_dim rotary_dim mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank"
        " time_step_rank laurel_rank hidden_size_per_layer_input adapter_rank",
    ),
    (
        4,
        "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers num_blocks"
        " num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads"
        " num_encoder_attention_heads num_decoder_attention_heads attention_heads num_heads"
        " num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads"
        " swa_num_attention_heads patch_size d_rel linear_num_heads",
    ),
    (3, "conv_L_cache"),
    (
        2,
        "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts"
        " encoder_layers num_encoder_layers linear_num_key_heads swa_num_key_value_heads"
        " max_window_layers indexer_kv_heads zero_expert_num type_vocab_size mamba_n_groups"
        " mamba_ngroups n_groups eos_token_id decoder_start_token_id",
    ),
    (
        1,
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts bos_token_id"
        " first_k_dense_replace num_dense_layers",
    ),
    (0, "pad_token_id"),
    (
        WINDOW,
        "sliding_window attention_chunk_size window_size local_attention sliding_window_size"
        " attention_window_size",
    ),
    (TOP, "index_topk indexer_budget index_n_heads indexer_n_heads"),
    (
        2048,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length",
    ),
    (True, "use_sliding_window is_decoder"),
]
SIZES: dict[str, Any] = {name: value for value, names in _BY_VALUE for name in names.split()}

LINEAR, CONV, FULL, SLIDING = "linear_attention", "conv", "full_attention", "sliding_attention"
_STATES = {"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
_CONVS = {"layer_types": [CONV, CONV, FULL, CONV]}
_WINDOWS = {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
_SHARED = {  # the last layers use rows of others
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
}
_GEMMA4 = _SHARED | {"num_global_key_value_heads": 1, "global_head_dim": 32}
_NO_KV_GROUPS = {"num_key_value_heads": 4}

# what some types need besides; `...` leaves a field as transformers has it
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_key_value_heads": 4, "layer_group_size": 3, "num_experts": 4},
    "bamba": {"attn_layer_indices": [2], "layer_types": ...},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "local_attention_window_len": 16,
    },
    "cohere_compass_text": _WINDOWS
    | {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            FULL: None,
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_head_dim": 32,
        "index_topk": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        "mlp_layer_types": ["moe"] * 4,
    },
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {
            "adapter_input_size": 64,
            "adapter_out_dim": 64,
            "downsample_hidden_size": 16,
        },
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", SLIDING, "indexed_attention", SLIDING],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 24,
    },
    "emu3": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 128, "layer_types": ...},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 16}},
    "gemma3n_text": _SHARED
    | {
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": [96] * 5,
    },
    "gemma4_text": _GEMMA4
    | {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None},
    "gemma4_unified_text": _GEMMA4,
    "got_ocr2": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"image_size": 64, "mlp_dim": 96, "output_channels": 16},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _STATES,
    "helium": {"head_dim": 16},
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts_per_tok": 1,
        "layer_types": ...,
    },
    "kimi_linear": _STATES | _NO_KV_GROUPS,
    "laguna": _WINDOWS,
    "lfm2": _CONVS,
    "lfm2_moe": _CONVS,
    "llama4_text": {
        "no_rope_layers": [1, 1, 0, 1],
        "floor_scale": 8,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": _WINDOWS,
    "minimax": _STATES,
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse", FULL, "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "modernbert-decoder": {"local_attention": 32},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "layer_types": ...,
    },
    "phi4_multimodal": {
        "vision_config": {"image_size": 16, "crop_size": 16},
        "audio_config": {
            "nemo_conv_channels": 64,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
        },
    },
    "qwen3_5_moe_text": _STATES,
    "qwen4_exp_text": {
        "layer_types": [LINEAR, LINEAR, "indexed_attention", LINEAR],
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 1,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 8,
        "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 4,
        "heads_per_ngram": 2,
        "split_ngram_parts": 4,
    },
    "reformer": {"hash_seed": 0, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [32, 64]},
    "roc_bert": {
        "shape_vocab_size": 100,
        "pronunciation_vocab_size": 100,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "layer_types": ...,
    },
    "zaya": {"num_experts_per_tok": 1},
}
_COMPOSED = "transformers makes none from its configuration, of an encoder, a codec and a decoder"
_DRAFTS = "takes no tokens by itself: it drafts from the rows of another model"
UNBUILT: dict[str, str] = {
    "gemma3n": "its picture encoder needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _COMPOSED,
    "musicgen_melody": _COMPOSED,
}

"""What kinds of layers a model has: read off its configuration and modules, for `docs/models.md`."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

DummyLayer = getattr(cache_utils, "DummyLayer", None)  # came after transformers 5.21
FULL, WINDOWS = "Full attention", "Windows and aligned chunks"
SINKS, SHARED = "Attention sinks", "Layers that use the rows of others"
LATENTS, INDEXED = "Latents (MLA)", "Indexed and compressed attention"
STATES, POSITIONS = (
    "States: linear attention, state spaces, convolutions",
    "Positions without a rotary module",
)
CODERS, UNBUILT = "Decoders of an encoder", "No tiny model"
CLASSES = (FULL, WINDOWS, SINKS, LATENTS, INDEXED, SHARED, STATES, POSITIONS, CODERS, UNBUILT)

ROTARY = ("rotary", "rotary_emb", "rope", "freqs_cis")  # how modules or tables are called
OWN_STATES = ("rwkv", "xlstm", "recurrent_gemma")  # kept outside of transformers' cache
OTHERS = {
    "rwkv": "recurrence",
    "xlstm": "recurrence",
    "reformer": "local and hashed attention",
    "blt": "attention over bytes and patches",
}  # of which nothing else says so
INDICES = ("indexer", "index_k_proj")
WORDS = {
    "conv": "convolution",
    "moe": "experts alone",
    "mlp": "experts alone",
    "hybrid": "attention beside a state",
    "hybrid_sliding": "sliding attention beside a state",
    "hybrid_full": "attention beside a state",
    "minimax_m3_sparse": "indexed attention",
}


def class_of(model: PreTrainedModel) -> str:
    """Return the class in which a model is listed: that of its most unusual layers."""
    kinds, config = _cached(model), model.config.get_text_config()
    names = [name for name, _ in model.named_modules()]
    tables = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if config.model_type in OWN_STATES or any(
        issubclass(kind, LinearAttentionCacheLayerMixin) for kind in kinds
    ):
        return STATES
    if any(kind not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for kind in kinds):
        return INDEXED
    if any(name.rsplit(".", 1)[-1] in INDICES for name in names):
        return INDEXED
    if getattr(config, "kv_lora_rank", None):
        return LATENTS
    if any("sink" in name.rsplit(".", 1)[-1] for name in tables):
        return SINKS
    if DummyLayer in kinds:
        return SHARED
    if config.is_encoder_decoder or any("encoder_attn" in name for name in names):
        return CODERS
    if not any(word in name.lower() for word in ROTARY for name in (*names, *tables)):
        return POSITIONS
    return (
        FULL if set(words_of(model).split(", ")) <= {"full attention", OTHERS["blt"]} else WINDOWS
    )


def words_of(model: PreTrainedModel) -> str:
    """Return the kinds of a model's layers in words, each once."""
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if named:
        return ", ".join(dict.fromkeys(WORDS.get(each, each.replace("_", " ")) for each in named))
    if config.model_type in OTHERS:
        return OTHERS[config.model_type]
    kinds = dict.fromkeys(_cached(model))
    return ", ".join(_word(kind) for kind in kinds) or "full attention"


def _word(kind: type) -> str:
    return "sliding attention" if kind is DynamicSlidingWindowLayer else "full attention"


def _cached(model: PreTrainedModel) -> list[type]:
    """Return the kinds of layers of the cache that transformers would make for a model."""
    try:
        return [type(layer) for layer in DynamicCache(config=model.config).layers]
    except Exception:  # it has another one, or none
        return []

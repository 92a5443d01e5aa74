"""Call a model once and keep what its layers hand on: through public hooks only.

A cache that keeps what it is given, an attention function that returns the values, so that nothing
after it depends on positions, and a mask function that hands out numbers for the mask functions it
is given, so that each layer's attention shows which one is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvweave.run.masks import MaskFunction
from kvweave.run.pin import pinned
from kvweave.run.trouble import is_resource_error, said
from kvweave.run.widen import widened

PROBE = "kvweave-probe"
FIRST_MASK = 2  # masks are numbered from here on: 0 and 1 are what a bool would become


class Refused(Exception):
    """The model has something that rows cannot say; the message says what."""


@dataclass(slots=True)
class Handed:
    """What one layer's attention was handed."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    query: Tensor


@dataclass(slots=True)
class LookCall:
    """What a probing call shows."""

    functions: list[MaskFunction] = field(default_factory=list)
    layers: dict[int, Handed] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)  # numbers of layers, as they attend
    numbers: bool = True  # whether attention of ours is handed the masks


_call: ContextVar[LookCall] = ContextVar("kvweave_probe")


class KeptLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keeps what one layer caches in a call, whose tokens are at ``offset`` + 0, 1, ..."""

    def __init__(self, offset: Any = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.offset = offset
        self.index_keys: Tensor | None = None
        self.pooled: dict[str, tuple[Tensor, Tensor]] = {}
        self.rate = 0  # rows that are pooled into one

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep them; attention is to see just these."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def update_indexer(self, keys: Tensor) -> Tensor:
        """The same for keys [batch, row, dim] of an index."""
        return self.update_index(keys[:, None])[:, 0]

    def update_index(self, keys: Tensor) -> Tensor:
        """The same for keys [batch, head, row, dim] of an index."""
        self.index_keys = keys
        return keys

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Keep what is pooled, and its weights [batch, row, dim]; return what makes whole pools, and
        where these begin."""
        self.pooled[name] = kv, gate
        usable = kv.shape[1] // self.rate * self.rate if self.rate else 0
        return kv[:, :usable], gate[:, :usable], 0

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Return pools: there are none but those of this call."""
        return compressed

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        """Return what is left of the pools before: there are none."""
        return None, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing has to be made."""
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Return how many keys there are, and what makes their numbers positions."""
        return query_length, self.offset

    def get_seq_length(self) -> Any:
        """Return what makes the queries' numbers positions."""
        return self.offset

    def get_max_length(self) -> int:
        """Return -1: any number of tokens."""
        return -1


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not isinstance(layer, int):
        raise Refused("modules of its attention have no number")
    _call.get().order.append(layer)
    _call.get().layers[layer] = Handed(key, value, attention_mask, options, query)
    out = value[:, :, : query.shape[2]].repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **kw: Any
) -> Tensor:
    functions = _call.get().functions
    functions.append(mask_function)
    shape = batch_size, 1, q_length, kv_length
    number = FIRST_MASK + len(functions) - 1 if _call.get().numbers else 0
    return torch.full(shape, float(number), dtype=kw.get("dtype"), device=kw.get("device"))


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


class SilentLayer(KeptLayer):  # type: ignore[no-untyped-call]
    """Keeps the same, and answers with values of zero: so nothing after any attention depends on
    positions. Tells ``order`` its number."""

    def __init__(self, offset: Any, number: int, order: list[Any], rate: int) -> None:
        super().__init__(offset)
        self.number, self.order, self.rate = number, order, rate

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values."""
        keys, values = super().update(key_states, value_states)
        self.order.append(self.number)
        return keys, torch.zeros_like(values)


def implement(model: PreTrainedModel, name: str) -> None:
    """Have a model use an implementation of attention and masks; where it lets none be set, masks only."""
    text = model.config.get_text_config()
    if text._attn_implementation != name:
        model.set_attn_implementation(name)
    if text._attn_implementation != name:
        for config in {id(each): each for each in (model.config, text)}.values():
            config._attn_implementation_internal = name


def look(
    model: PreTrainedModel,
    layers: Sequence[Any],
    positions: Sequence[int] | None,
    limit: int,
    order: list[Any] | None = None,
) -> LookCall:
    """Call the model once: a row for each position, of two tokens that both stand there; without
    positions one row, whose positions are the model's own. Layers are added to ``order`` as they
    attend."""
    n_vocab = model.config.get_text_config().vocab_size
    ids = torch.full((len(positions or [0]), 2), min(7, n_vocab - 1), device=model.device)
    told: dict[str, Any] = {}
    if positions is not None:
        told["position_ids"] = torch.tensor(positions, device=model.device)[:, None].expand(-1, 2)
    ours = model._can_set_attn_implementation()
    token = _call.set(LookCall(order=[] if order is None else order, numbers=ours))
    try:
        with pinned(model, limit), widened(model.dtype):
            model(
                input_ids=ids,
                past_key_values=Cache(layers=list(layers)),
                use_cache=True,
                **told,
            )
        return _call.get()
    except Refused:
        raise
    except Exception as error:
        if is_resource_error(error):
            raise
        raise Refused(_blame(model, ids[:1], error)) from error
    finally:
        _call.reset(token)


def _blame(model: PreTrainedModel, ids: Tensor, error: Exception) -> str:
    """Say whose fault a failed call is: the model's own, or that it wants more of a cache."""
    implement(model, "eager")
    try:
        with widened(model.dtype):
            model(input_ids=ids, use_cache=False)
    except Exception as own:
        if is_resource_error(own):
            raise
        return f"the model itself fails: {said(own)}"
    if getattr(model.config.get_text_config(decoder=True), "encoder_layers", None):
        return "it is the decoder of an encoder, whose rows its cache keeps besides"
    return f"it asks a cache for more than rows of keys and values ({said(error)})"

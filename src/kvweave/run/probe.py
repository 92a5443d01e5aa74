"""Learn what each layer of a model keeps, how it moves and what its queries see: by looking.

One call of two tokens a row, every row at another position, through public hooks only: a cache
that keeps what it is given, an attention function that returns the values, so that nothing after
it depends on positions, and a mask function that hands out numbers for the mask functions it is
given, so that each layer's attention shows which one is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvweave.run.base import LayerInfo, Mask
from kvweave.run.masks import MaskFunction, UnknownMask, classify
from kvweave.run.pin import inv_freqs, pinned
from kvweave.run.rotary import Rotation, identify
from kvweave.run.trouble import is_resource_error, said
from kvweave.run.widen import widened
from kvweave.store.kv import LayerShape

PROBE = "kvweave-probe"
POSITIONS = (0, 1, 37, 611)  # small ones separate frequencies, large ones confirm them
TOLERANCE = 1e-3  # of keys turned in float32, relative to the largest
FIRST_MASK = 2  # masks are numbered from here on: 0 and 1 are what a bool would become

# attention options that our attention follows, or that say nothing about what a row sees
SCALES = ("scaling", "softcap")
SILENT = (
    "dropout sliding_window position_ids cache_position use_cache training is_causal past_key_values"
).split()  # masks are learned from the mask functions, so a window says nothing more
SAYS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "position biases",
    "indices": "an index that picks keys",
}


class Refused(Exception):
    """The model has something that rows cannot say; the message says what."""


@dataclass(slots=True)
class _Handed:
    """What one layer's attention was handed."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    group: int  # query heads to a kv head


@dataclass(slots=True)
class _Call:
    """What a probing call shows."""

    functions: list[MaskFunction] = field(default_factory=list)
    layers: dict[int, _Handed] = field(default_factory=dict)


_call: ContextVar[_Call] = ContextVar("kvweave_probe")


class KeptLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keeps what one layer caches in a call, whose tokens are at ``offset`` + 0, 1, ..."""

    def __init__(self, offset: Any = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.offset = offset

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep them; attention is to see just these."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states

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
    _call.get().layers[layer] = _Handed(
        key, value, attention_mask, options, query.shape[1] // key.shape[1]
    )
    out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **kw: Any
) -> Tensor:
    functions = _call.get().functions
    functions.append(mask_function)
    shape, number = (batch_size, 1, q_length, kv_length), FIRST_MASK + len(functions) - 1
    return torch.full(shape, float(number), dtype=kw.get("dtype"), device=kw.get("device"))


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


@torch.inference_mode()
def learn(model: PreTrainedModel, limit: int) -> list[LayerInfo]:
    """Return what each layer of ``model`` keeps, on positions ``[0, limit)``.

    ``model`` is left with attention of ours. Raises Refused where rows cannot say it; errors of the
    machine, such as a lack of memory, come through as they are.
    """
    n_layers = _check_kinds(model)
    model.set_attn_implementation(PROBE)
    if model.config._attn_implementation != PROBE:
        raise Refused("the model does not use transformers' attention interface")
    positions = [p for p in POSITIONS if p < limit]
    layers = [KeptLayer() for _ in range(n_layers)]
    call = _look(model, layers, positions, limit)
    frequencies = inv_freqs(model)
    masks = [_classified(each, limit, model.device) for each in call.functions]
    found: list[LayerInfo] = []
    for i, layer in enumerate(layers):
        if i not in call.layers:
            raise Refused(f"layer {i} does not use transformers' attention interface")
        _check_options(i, call.layers[i].options)
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.dim() != 4:
            raise Refused(f"layer {i} caches no rows of its own")
        rotation = _rotation(i, layer, positions, frequencies)
        for known in found:  # share equal rotations: angles are computed once for each
            if known.rotation.key == rotation.key:
                rotation = known.rotation
        _check_handed(i, layer, call.layers[i])
        shape, handed = LayerShape(*keys[0, :, 0].shape, *values[0, :, 0].shape), call.layers[i]
        found.append(LayerInfo(shape, rotation, _mask_of(i, handed.mask, masks), handed.group))
    return found


def _check_kinds(model: PreTrainedModel) -> int:
    """Return the number of layers; refuse what transformers itself would not cache as rows."""
    try:
        kinds = DynamicCache(config=model.config).layers
    except Exception as error:
        raise Refused(f"transformers has no plain cache for it ({said(error)})") from error
    for i, kind in enumerate(kinds):
        if isinstance(kind, LinearAttentionCacheLayerMixin):
            raise Refused(f"layer {i} keeps a state, not rows of positions")
        if type(kind) not in (DynamicLayer, DynamicSlidingWindowLayer):
            name = type(kind).__name__
            raise Refused(f"layer {i} keeps other things than keys and values of its own ({name})")
    return len(kinds) or int(model.config.get_text_config().num_hidden_layers)


def _look(
    model: PreTrainedModel, layers: list[KeptLayer], positions: Sequence[int], limit: int
) -> _Call:
    """Call the model once: a row for each position, of two tokens that both stand there."""
    n_vocab = model.config.get_text_config().vocab_size
    ids = torch.full((len(positions), 2), min(7, n_vocab - 1), device=model.device)
    where = torch.tensor(positions, device=model.device)[:, None].expand(-1, 2)
    token = _call.set(_Call())
    try:
        with pinned(model, limit), widened(model.dtype):
            model(
                input_ids=ids,
                position_ids=where,
                past_key_values=Cache(layers=list(layers)),
                use_cache=True,
            )
        return _call.get()
    except Exception as error:
        if is_resource_error(error):
            raise
        raise Refused(_blame(model, ids[:1], error)) from error
    finally:
        _call.reset(token)


def _blame(model: PreTrainedModel, ids: Tensor, error: Exception) -> str:
    """Say whose fault a failed call is: the model's own, or that it wants more of a cache."""
    model.set_attn_implementation("eager")
    try:
        with widened(model.dtype):
            model(input_ids=ids, use_cache=False)
    except Exception as own:
        if is_resource_error(own):
            raise
        return f"the model itself fails: {said(own)}"
    return f"it asks for more than rows of keys and values: {said(error)}"


def _classified(function: MaskFunction, limit: int, device: torch.device) -> Mask | str:
    try:
        return classify(function, limit, device)
    except UnknownMask as why:
        return str(why)


def _mask_of(layer: int, handed: Tensor | None, masks: Sequence[Mask | str]) -> Mask:
    """Return the mask whose number a layer's attention was handed."""
    if handed is None:
        raise Refused(f"layer {layer} is handed no mask: its queries see every token")
    low, high = float(handed.min()), float(handed.max())
    number = int(low) - FIRST_MASK
    if low != high or low != int(low) or not 0 <= number < len(masks):
        raise Refused(f"layer {layer} changes the mask that transformers made for it")
    mask = masks[number]
    if isinstance(mask, str):
        raise Refused(f"layer {layer}: {mask}")
    return mask


def _check_options(layer: int, options: dict[str, Any]) -> None:
    for name, value in options.items():
        ignored = name in (*SCALES, *SILENT) or name.startswith(("output_", "return_"))
        if value is None or ignored:
            continue
        what = SAYS.get(name, f"an attention option {name!r}")
        raise Refused(f"layer {layer} has {what}, which is not supported yet")


def _rotation(
    layer: int, cached: KeptLayer, positions: Sequence[int], frequencies: Sequence[Tensor]
) -> Rotation:
    assert cached.keys is not None and cached.values is not None
    keys = {p: k[:, 0].cpu() for p, k in zip(positions, cached.keys, strict=True)}
    values = {p: v[:, 0].cpu() for p, v in zip(positions, cached.values, strict=True)}
    found = identify(keys, frequencies, TOLERANCE)
    if found is not None and identify(values, [], TOLERANCE) is None:
        raise Refused(f"layer {layer} caches a latent whose rotary part is in the values")
    if found is None:
        raise Refused(
            f"layer {layer}: keys change with their position in a way that is no rotation"
            " (learned or absolute positions, or a norm after the rotation)"
        )
    return found


def _check_handed(layer: int, cached: KeptLayer, handed: _Handed) -> None:
    for name, kept, given in (
        ("keys", cached.keys, handed.keys),
        ("values", cached.values, handed.values),
    ):
        assert kept is not None
        if kept.shape != given.shape or kept.data_ptr() != given.data_ptr():
            raise Refused(f"layer {layer} changes its {name} between cache and attention")

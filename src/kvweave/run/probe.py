"""Learn what each layer of a model keeps, how it moves and what its queries see: by looking.

One call of two tokens a row, every row at another position, as `run/looking.py` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvweave.run.base import ALL, LayerInfo, Mask
from kvweave.run.expand import expansions
from kvweave.run.fixed import FIXED, as_fixed
from kvweave.run.handed import INDEX
from kvweave.run.handing import As, Handing
from kvweave.run.latent import Latent
from kvweave.run.looking import (
    FIRST_MASK,
    PROBE,
    Handed,
    KeptLayer,
    Refused,
    SilentLayer,
    implement,
    look,
)
from kvweave.run.masks import MaskFunction, UnknownMask, classify
from kvweave.run.pin import inv_freqs
from kvweave.run.rotary import STATIC, Rotation, identify
from kvweave.run.stateful import LayerKind, MixerWatch, SeenMixer, layers_of, learn_mixer
from kvweave.run.trouble import said
from kvweave.store.kv import LayerShape

# small ones separate frequencies, large ones confirm them and show what turns slowly
POSITIONS = (0, 1, 37, 611, 9973)
BASE, WIDEST = 1e4, 256  # of rotations of which no frequencies are kept
TOLERANCE = 1e-3  # of keys turned in float32, relative to the largest

# attention options that our attention follows, or that say nothing about what a row sees
SCALES = ("scaling", "softcap")
SINKS = "s_aux"
# what layers of a cache can that keep more than keys and values: keys of an index, rows that are pooled
MORE = ("update_indexer", "store_compression_weights")
SILENT = (
    "dropout sliding_window position_ids cache_position use_cache training is_causal past_key_values"
    " logits_to_keep"
).split()  # masks are learned from the mask functions, so a window says nothing more
SAYS = {
    "s_aux": "attention sinks that are not one number a head",
    "sinks": "attention sinks of each query",
    "position_bias": "position biases",
    "indices": "an index that picks keys",
}

# the layer that keeps nothing came after transformers 5.19, which vLLM 0.32 has
EMPTY = tuple(c for c in (getattr(cache_utils, "DummyLayer", None),) if c is not None)
IDLE = ("moe", "mlp")  # types of layers that keep nothing, for which it had one of states till then

NOTHING = torch.empty(0)
UNKNOWN = Latent(NOTHING, NOTHING, NOTHING, None)  # until it has been read off


@torch.inference_mode()
def learn(model: PreTrainedModel, limit: int, handed: bool = False) -> list[LayerInfo]:
    """Return what each layer of ``model`` keeps, on positions ``[0, limit)``, for attention of ours or
    of the model's own, which is ``handed`` all rows.

    ``model`` is left with attention of ours. Raises Refused where rows cannot say it; errors of the
    machine, such as a lack of memory, come through as they are.
    """
    kinds = _check_kinds(model, handed)
    implement(model, PROBE) if handed else model.set_attn_implementation(PROBE)
    if model.config.get_text_config()._attn_implementation != PROBE:
        raise Refused("the model does not use transformers' attention interface")
    positions = [p for p in POSITIONS if p < limit]
    watch = MixerWatch()
    order: list[Any] = []  # numbers of layers, and keys of mixers
    make = partial(_silent, kinds) if handed else partial(layers_of, kinds)
    layers = make(0, watch, order)
    with watch.over(model):
        call = look(model, layers, positions, limit, order)
    for i, layer in enumerate(layers):
        if getattr(layer, "keys", None) is not None and i not in call.layers and not handed:
            raise Refused(f"layer {i} does not use transformers' attention interface")
    beyond = [i for i in order if isinstance(i, int) and i >= len(layers)]
    if beyond:
        raise Refused(f"layer {beyond[0]} attends, and its configuration tells of {len(layers)}")
    if not call.layers and not handed:
        raise Refused("no layer uses transformers' attention interface")
    _check_states(kinds, watch)
    frequencies = inv_freqs(model)
    if handed and not frequencies:  # a table of angles instead
        frequencies = [BASE ** (-torch.arange(0, w, 2) / w) for w in range(2, WIDEST + 1, 2)]
    masks = [_classified(each, limit, model.device) for each in call.functions]
    found: list[LayerInfo] = []
    of: dict[int, int] = {}  # number of the tensor of keys -> index of the layer that made it
    for i in dict.fromkeys(order):
        if isinstance(i, tuple):
            found.append(_stateful(watch.found[i], kinds[i[0]].n_states, model.dtype))
            continue
        layer = layers[i]
        if handed:
            found += _handed(i, layer, call.layers.get(i), positions, frequencies, masks)
            continue
        seen = call.layers[i]
        _check_options(i, seen)
        mask = _mask_of(i, seen.mask, masks)
        if getattr(layer, "keys", None) is None:
            found[of.get(id(seen.keys), -1)] = _reader(i, found, of, seen, mask)
            continue
        info = replace(_info(i, layer, seen, positions, frequencies), mask=mask)
        if info.latent is None:
            _check_handed(i, layer, seen)
        of[id(seen.keys)] = len(found)
        found.append(_alike(info, found))
    if not any(info.attends for info in found):
        raise Refused("no layer caches keys and values")
    found = as_fixed(model, found, layers, make, limit)
    if any(info.latent is not None for info in found):
        found = expansions(model, found, layers_of(kinds), limit)
    return found


def _silent(
    kinds: Sequence[LayerKind],
    offset: int = 0,
    watch: MixerWatch | None = None,
    order: list[Any] | None = None,
) -> list[Any]:
    """Return layers of a probing cache as `layers_of` does, whose values are zeros to attention."""
    order = [] if order is None else order
    return [
        SilentLayer(offset, i, order, layer.rate) if type(layer) is KeptLayer else layer
        for i, layer in enumerate(layers_of(kinds, offset, watch, order))
    ]


def _stateful(seen: SeenMixer, n_states: int | None, dtype: torch.dtype) -> LayerInfo:
    """Return what is stored of a module that keeps a state: its input rows."""
    mixer = learn_mixer(seen, n_states or 1, dtype)
    return LayerInfo(mixer.shape, STATIC, mixer=mixer)


def _check_states(kinds: Sequence[LayerKind], watch: MixerWatch) -> None:
    """Refuse states that no module was seen to keep, or one module for several layers."""
    seen = {number for number, _ in watch.found}
    for i, kind in enumerate(kinds):
        if kind.n_states is not None and i not in seen:
            raise Refused(f"layer {i} keeps a state that it does not ask the cache for")
    if len({module for _, module in watch.found}) < len(watch.found):
        raise Refused("a module keeps the states of several layers")


def _info(
    i: int,
    layer: KeptLayer,
    handed: Handed,
    positions: Sequence[int],
    frequencies: Sequence[Tensor],
) -> LayerInfo:
    """Return what is seen of the rows of layer ``i``, but for its mask."""
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.dim() != 4:
        raise Refused(f"layer {i} caches no rows of its own")
    turning = identify(_by_position(keys, positions), frequencies, TOLERANCE) or FIXED
    group = handed.query.shape[1] // keys.shape[1]
    if turning.width == 0 and turning.fixed is None:
        latent = identify(_by_position(values, positions), frequencies, TOLERANCE)
        if latent is None or (latent.width and keys.shape[1] * values.shape[1] != 1):
            turning = FIXED
        elif latent.width:
            shape = LayerShape(1, values.shape[3], 1, keys.shape[3])
            return LayerInfo(shape, latent, group=group, readers=(i,), latent=UNKNOWN)
    query = _query(turning, handed.query, positions, frequencies)
    shape = LayerShape(*keys[0, :, 0].shape, *values[0, :, 0].shape)
    return LayerInfo(shape, turning, group=group, query=query, readers=(i,))


def _handed(
    i: int,
    layer: KeptLayer,
    seen: Handed | None,
    positions: Sequence[int],
    frequencies: Sequence[Tensor],
    masks: Sequence[Mask | str],
) -> list[LayerInfo]:
    """Return what layer ``i`` caches, whatever its attention does with it."""
    unsaid = next((mask for mask in masks if isinstance(mask, str)), None)
    if unsaid is not None:
        raise Refused(f"layer {i}: {unsaid}")
    keys, values, alone = layer.keys, layer.values, seen is None
    if keys is None or values is None:
        raise Refused(f"layer {i} caches no rows of its own")
    if seen is None:
        seen = Handed(keys, values, None, {}, keys)
    try:
        mask = _mask_of(i, seen.mask, masks)
    except Refused:
        mask = ALL  # at most: it is changed behind transformers' own
    if keys is values:
        info = _split(i, Handing(As.ONE, rate=layer.rate), keys, positions, frequencies)
        info = replace(info, group=seen.query.shape[1] // keys.shape[1])
    else:
        info = _info(i, layer, seen, positions, frequencies)
        handing = Handing(As.ROWS if info.latent is None else As.SWAPPED, rate=layer.rate)
        info = replace(info, latent=None, query=None, handed=handing, readers=(i,))
    still = info.rotation.width == 0
    assert info.handed is not None
    handing = replace(info.handed, alone=alone, gapless=layer.rate > 0 or (alone and still))
    found = [replace(info, mask=ALL if layer.rate else mask, handed=handing)]
    if layer.index_keys is not None:
        found.append(
            _split(i, Handing(As.INDEX, name=INDEX), layer.index_keys, positions, frequencies)
        )
    for name, both in layer.pooled.items():
        if any(identify(_by_position(t[:, None], positions), (), TOLERANCE) is None for t in both):
            raise Refused(f"layer {i} pools rows that contain their position")
        shape = LayerShape(1, both[0].shape[-1], 1, both[1].shape[-1])
        handing = Handing(As.POOLED, rate=layer.rate, name=name)
        found.append(LayerInfo(shape, STATIC, readers=(i,), handed=handing))
    return found


def _split(
    i: int,
    handing: Handing,
    keys: Tensor,
    positions: Sequence[int],
    frequencies: Sequence[Tensor],
) -> LayerInfo:
    """Return rows ``keys`` [batch, head, row, dim]: what turns of them, first or last, and the rest."""
    heads, dim = keys.shape[1], keys.shape[3]
    widths = [2 * each.numel() for each in frequencies]
    for roll in (0, *sorted({width for width in widths if width < dim})):
        turning = identify(_by_position(keys.roll(roll, -1), positions), frequencies, TOLERANCE)
        if turning is not None and turning.width < dim:
            width = max(turning.width, dim // 2)
            shape = LayerShape(heads, width, heads, dim - width)
            return LayerInfo(shape, turning, readers=(i,), handed=replace(handing, roll=roll))
    raise Refused(f"layer {i} has rows of which all turns, or not by a known rotation")


def _query(
    turning: Rotation, query: Tensor, positions: Sequence[int], frequencies: Sequence[Tensor]
) -> Rotation | None:
    """Return how queries turn, where that is not as their keys do: each has its own norm."""
    if turning.width == 0:
        return None
    found = identify(_by_position(query, positions), frequencies, TOLERANCE)
    if found is None or (found.ratio is None and turning.ratio is None):
        return None  # scaled by their position, say: as keys turn, or it shows in the comparison
    return None if found.equals(turning) else found


def _alike(info: LayerInfo, found: Sequence[LayerInfo]) -> LayerInfo:
    """Share equal rotations: angles are computed once for each."""
    for known in found:
        if known.rotation.equals(info.rotation):
            info = replace(info, rotation=known.rotation)
        if known.query is not None and info.query is not None and known.query.equals(info.query):
            info = replace(info, query=known.query)
    return info


def _reader(
    i: int, found: Sequence[LayerInfo], of: dict[int, int], handed: Handed, mask: Mask
) -> LayerInfo:
    """Return the layer whose rows layer ``i`` attends to, as it keeps none of its own."""
    if id(handed.keys) not in of:
        raise Refused(f"layer {i} caches no rows of its own")
    info = found[of[id(handed.keys)]]
    if mask != info.mask or handed.query.shape[1] != info.n_queries or info.query is not None:
        raise Refused(f"layer {i} reads rows of layer {info.readers[0]} in another way than that")
    return replace(info, readers=(*info.readers, i))


def _check_kinds(model: PreTrainedModel, handed: bool) -> list[LayerKind]:
    """Return what a plain cache keeps of each layer; refuse what transformers itself would not cache as rows."""
    try:
        kinds = DynamicCache(config=model.config).layers
    except Exception as error:
        raise Refused(f"transformers has no plain cache for it ({said(error)})") from error
    for i, kind in enumerate(kinds):
        plain = (DynamicLayer, DynamicSlidingWindowLayer, *EMPTY)
        if isinstance(kind, LinearAttentionCacheLayerMixin):
            continue
        more = any(hasattr(kind, name) for name in MORE)
        if type(kind) not in plain and not (handed and more and isinstance(kind, DynamicLayer)):
            name = type(kind).__name__
            raise Refused(f"layer {i} keeps other things than keys and values of its own ({name})")
    if not kinds:
        return [LayerKind(None, True)] * int(model.config.get_text_config().num_hidden_layers)
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return [
        LayerKind(
            None if what in IDLE else getattr(kind, "number_of_states", None),
            isinstance(kind, CacheLayerMixin),
            getattr(kind, "compress_rate", 0),
        )
        for kind, what in zip_longest(kinds, types[: len(kinds)])
    ]


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


def _check_options(layer: int, handed: Handed) -> None:
    for name, value in handed.options.items():
        if name == SINKS and isinstance(value, Tensor) and value.shape == handed.query.shape[1:2]:
            continue
        ignored = name in (*SCALES, *SILENT) or name.startswith(("output_", "return_"))
        if value is None or ignored:
            continue
        what = SAYS.get(name, f"an attention option {name!r}")
        raise Refused(f"layer {layer} has {what}, which is not supported yet")


def _by_position(rows: Tensor, positions: Sequence[int]) -> dict[int, Tensor]:
    return {p: each[:, 0].cpu() for p, each in zip(positions, rows, strict=True)}


def _check_handed(layer: int, cached: KeptLayer, handed: Handed) -> None:
    for name, kept, given in (
        ("keys", cached.keys, handed.keys),
        ("values", cached.values, handed.values),
    ):
        assert kept is not None
        if kept.shape != given.shape or kept.data_ptr() != given.data_ptr():
            raise Refused(f"layer {layer} changes its {name} between cache and attention")

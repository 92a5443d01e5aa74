"""Compare our passes with the model's own forward before anybody relies on them.

In float32 at least, whatever dtype runs, and in every layer: one context whose rows stand around
the borders of every mask and at the far end of the positions, and a plain one from position 0,
both in one pass; then some rows of both again, these and all behind them poisoned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvweave.run.base import (
    ALL,
    Backend,
    Ints,
    LayerInfo,
    Mask,
    Observer,
    Work,
    fixed_from,
    gapless,
    n_numbers,
    readers_of,
)
from kvweave.run.handed import numbers_of
from kvweave.run.handing import As
from kvweave.run.looking import KeptLayer, implement
from kvweave.run.mixer import Mixer
from kvweave.run.pin import pinned
from kvweave.run.primed import MixerCall, PrimedLayer, rows_given
from kvweave.run.stateful import StatesBeside
from kvweave.run.trouble import is_resource_error, said
from kvweave.run.widen import widened

# of the largest value compared; transformers rounds angles and softmax to float32 in float64 too
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
SHORT = 24  # rows of the plain context, more where a border of a mask is near
NEAR = 96  # a border up to which the plain context reaches
EVERY = 3  # of so many rows, one is computed again


@dataclass(slots=True)
class _Context:
    """Tokens, and what the model's own forward makes of them."""

    tokens: Ints
    positions: Ints
    plain: bool
    logits: Tensor | None = None  # [token, vocab]
    keys: list[Tensor] = field(default_factory=list)  # of each layer, [token, head, dim]
    values: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def difference(backend: Backend, model: PreTrainedModel, attention: str) -> str | None:
    """Return how passes of ``backend`` differ from ``model``'s own forward; None: they do not.

    ``attention`` is the implementation that ``model`` is left with. Errors of the machine, such as
    a lack of memory, come through as they are.
    """
    contexts = _contexts({layer.mask for layer in backend.layers}, backend.limit, backend.n_vocab)
    if gapless(backend.layers):
        rates = [info.handed.rate for info in backend.layers if info.handed is not None]
        contexts = [_dense(min(2 * max(rates) + SHORT, backend.limit), backend.n_vocab)]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    for context in contexts:  # some models leave padding out when they count positions
        context.tokens[context.tokens == padding] = (padding or 0) + 1
    with widened(backend.dtype):
        try:
            with _plainly(model, attention):
                for context in contexts:
                    _run_natively(model, context, backend)
        except Exception as error:
            if is_resource_error(error):
                raise
            return f"the model's own forward fails: {said(error)}"
        try:
            return _compare(backend, contexts)
        except Exception as error:
            if is_resource_error(error):
                raise
            return f"our pass fails: {said(error)}"


def _contexts(masks: set[Mask], limit: int, n_vocab: int) -> list[_Context]:
    """Return the two contexts: one of rows that stand around borders, one plain."""
    sizes = [size for mask in masks if (size := mask.window or mask.chunk) is not None]
    near = [0, 4, limit // 2, limit - 6]
    for size in sizes:
        near += [size, 2 * size, (limit - 1) // size * size]
    around = np.unique([at + d for at in near for d in range(-3, 6)])
    far = around[(around >= 0) & (around < limit)].astype(np.int64)
    short = max([SHORT, *(2 * size + 3 for size in sizes if size <= NEAR)])
    plain = np.arange(min(short, limit), dtype=np.int64)
    return [
        _Context((np.arange(len(far)) * 7919 + 13) % n_vocab, far, False),
        _dense(len(plain), n_vocab),
    ]


def _dense(n: int, n_vocab: int) -> _Context:
    every = np.arange(n, dtype=np.int64)
    return _Context((every * 6121 + 29) % n_vocab, every, True)


@contextmanager
def _plainly(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Give the model attention, masks and experts as transformers writes them out."""
    experts = getattr(model.config, "_experts_implementation", None)
    implement(model, "eager")
    try:
        if experts is not None:
            model.set_experts_implementation("eager")
        yield
    finally:
        implement(model, attention)
        if experts is not None:
            model.set_experts_implementation(experts)


def _run_natively(model: PreTrainedModel, context: _Context, backend: Backend) -> None:
    """Fill in what the model's own forward makes of a context."""
    ids = torch.as_tensor(context.tokens, device=model.device)[None]
    positions = torch.as_tensor(context.positions, device=model.device)
    readers, mixers = readers_of(backend.layers), _mixers(backend)
    layers: list[Any] = [
        KeptLayer()
        if number not in mixers
        else (StatesBeside if number in readers else PrimedLayer)(mixers[number].n_states)
        for number in range(n_numbers(backend.layers))
    ]
    options: dict[str, Any] = {"past_key_values": Cache(layers=layers), "use_cache": True}
    for number, numbers in numbers_of(backend.layers).items():
        layers[number].rate = numbers.handing.rate
    handed = any(info.handed is not None for info in backend.layers)
    if context.plain:
        cache = DynamicCache(config=model.config) if mixers else DynamicCache()
        cache = Cache(layers=layers) if handed else cache  # type: ignore[assignment]
        options |= {"past_key_values": cache, "attention_mask": torch.ones_like(ids)}
        layers = cache.layers  # and positions are the model's own
    else:
        # transformers numbers the tokens of a call by adding 0, 1, ... to these: with a vector,
        # each token's mask (and scaling, where a model has one) is that of its true position
        for layer in layers:
            layer.offset = positions - torch.arange(len(positions), device=model.device)
        first = fixed_from(backend.layers)
        options["position_ids"] = positions[None] + (first or 0)
        alone = any(info.handed is not None and info.handed.alone for info in backend.layers)
        if alone or (first is not None and all(info.mask == ALL for info in backend.layers)):
            for layer in layers:
                layer.offset = 0  # these models are told all their positions; some want a number
    with pinned(model, backend.limit), _inputs(backend) as inputs:
        context.logits = model(input_ids=ids, **options).logits[0]
    written = {rows: number for number, rows in reversed(readers.items())}
    for i, info in enumerate(backend.layers):
        if info.mixer is not None:
            k, v = torch.split(inputs[i], [info.shape.k_dim, info.shape.v_dim], -1)
            context.keys.append(k[:, None])
            context.values.append(v[:, None])
            continue
        layer = layers[info.readers[0] if info.handed is not None else written[i]]
        both = _kept(info, layer)
        context.keys.append(both[0][0].transpose(0, 1))
        context.values.append(both[1][0].transpose(0, 1))


def _kept(info: LayerInfo, layer: Any) -> tuple[Tensor, Tensor]:
    """Return what a layer of the model's cache was given as keys and values of ours, [1, head, row, dim]."""
    handing = info.handed
    if handing is not None and handing.what is As.POOLED:
        both: tuple[Tensor, Tensor] = layer.pooled[handing.name]
        return both[0][:, None], both[1][:, None]
    if handing is not None and handing.what in (As.ONE, As.INDEX):
        one = layer.keys if handing.what is As.ONE else layer.index_keys
        sizes = [info.shape.k_dim, info.shape.v_dim]
        k, v = torch.split(one.roll(handing.roll, -1), sizes, -1)
        return k, v
    swapped = handing is not None and handing.what is As.SWAPPED
    if swapped or info.latent is not None:
        return layer.values, layer.keys
    return layer.keys, layer.values


def _mixers(backend: Backend) -> dict[int, Mixer]:
    """Return a mixer of each layer of the model's cache that keeps states."""
    return {m.number: m for m in (info.mixer for info in backend.layers) if m is not None}


@contextmanager
def _inputs(backend: Backend) -> Iterator[dict[int, Tensor]]:
    """Keep what each mixer is given, [row, width], by the index of its layer."""
    found: dict[int, Tensor] = {}
    hooks = []

    def kept(i: int, mixer: Mixer) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, args: Any, options: Any) -> None:
            found[i] = rows_given(mixer, MixerCall(args, options))[0]

        return keep

    for i, info in enumerate(backend.layers):
        if info.mixer is not None:
            module: Any = info.mixer.forward.__self__  # type: ignore[attr-defined]
            hooks.append(module.register_forward_pre_hook(kept(i, info.mixer), with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _compare(backend: Backend, contexts: Sequence[_Context]) -> str | None:
    rows = [backend.new_rows() for _ in contexts]
    works = []
    for mine, context in zip(rows, contexts, strict=True):
        n = len(context.tokens)
        mine.reserve(n)
        every = np.arange(n)
        handed = any(info.handed is not None for info in backend.layers)
        watch = Observer() if handed else None  # what cannot be shown is found now
        works.append(
            Work(mine, context.tokens, every, context.positions, want=every, observer=watch)
        )
    for work, context, logits in zip(works, contexts, backend.forward(works), strict=True):
        found = _differs(backend, work, context, logits)
        if found is not None:
            return found
    parts = [_poisoned(backend, work) for work in works]
    for part, context, logits in zip(parts, contexts, backend.forward(parts), strict=True):
        found = _differs(backend, part, context, logits)
        if found is not None:
            return f"rows computed again among others: {found}"
    return None


def _poisoned(backend: Backend, work: Work) -> Work:
    """Return a work for some of its rows, with these and all behind the last of them poisoned."""
    slots = np.arange(1, max(2, work.n - EVERY), EVERY)
    slots = slots[slots < work.n]
    spoilt = np.union1d(slots, np.arange(slots[-1], work.n)) if len(slots) else slots
    kv = backend.new_kv(len(spoilt))
    for tensor in (*kv.k, *kv.v):
        tensor.fill_(float("nan"))
    work.rows.put(spoilt, kv)
    return Work(
        work.rows,
        work.tokens[slots],
        slots,
        work.positions[slots],
        want=np.arange(len(slots)),
    )


def _differs(backend: Backend, work: Work, context: _Context, logits: Tensor) -> str | None:
    """Say where a pass differs: in the first layer that does, or in the logits."""
    assert context.logits is not None
    at = torch.as_tensor(work.slots, device=logits.device)
    tolerance = TOLERANCE.get(logits.dtype, TOLERANCE[torch.float32])
    for i, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
        found = work.rows.read(i, work.slots)
        for what, ours, theirs in (("keys", found[0], keys), ("values", found[1], values)):
            said = _far(ours, theirs[at], work.positions, tolerance)
            if said is not None:
                return f"our pass differs from the model's own {said} in the {what} of layer {i}"
    said = _far(logits, context.logits[at], work.positions, tolerance)
    return None if said is None else f"our pass differs from the model's own {said} in its logits"


def _far(ours: Tensor, theirs: Tensor, positions: Ints, tolerance: float) -> str | None:
    """Say by how much rows differ, and which does most, if by more than ``tolerance``."""
    if not len(ours):
        return None
    rows = (ours - theirs).abs().flatten(1).amax(1) / theirs.abs().max().clamp_min(1e-9)
    worst = int(rows.nan_to_num(nan=torch.inf).argmax())
    if float(rows[worst]) <= tolerance:
        return None
    return f"by {float(rows[worst]):.1e} at position {int(positions[worst])}"

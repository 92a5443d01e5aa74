"""Attention of the model's own, which is handed all rows of a context.

Some models do more between their cache and attention than `run/attention.py` can follow: they pick
keys by an index (DSA, arXiv 2512.02556), change keys, values or masks, or add to scores. Their
passes run at true positions, one context a pass; the cache answers with every row of the context up
to the last of the pass, and the mask function is asked at the positions of these rows. What is
stored is turned back, so that chunks move as those of other models do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from kvweave.errors import CannotMove
from kvweave.run import attention
from kvweave.run.base import LayerInfo
from kvweave.run.batch import Batch, StopPass
from kvweave.run.handing import GAPLESS, As, Handing
from kvweave.run.looking import KeptLayer, Refused
from kvweave.run.masks import MaskFunction

HANDED = "kvweave-handed"
INDEX = "index"
EAGER = "eager_attention_forward"  # what transformers calls it in every file of a model


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Which rows of a context a layer of the model's cache stands for."""

    rows: int
    handing: Handing
    others: Mapping[str, int]  # rows beside these, by name

    @property
    def last(self) -> int:
        """The last of all these."""
        return max(self.rows, *self.others.values(), -1)


def numbers_of(infos: Sequence[LayerInfo]) -> dict[int, LayerNumbers]:
    """Return the rows that each layer of a model stands for, by its number."""
    found: dict[int, LayerNumbers] = {}
    beside: dict[int, dict[str, int]] = {}
    for i, info in enumerate(infos):
        if info.handed is not None:
            others = beside.setdefault(info.readers[0], {})
            if info.handed.attends:
                found[info.readers[0]] = LayerNumbers(i, info.handed, others)
            else:
                others[info.handed.name] = i
    return found


class HandedLayer(KeptLayer):  # type: ignore[no-untyped-call]
    """A layer of the cache of a pass: writes its rows, and answers with all of the context."""

    def __init__(self, numbers: LayerNumbers) -> None:
        super().__init__()
        self.numbers, self.rate = numbers, numbers.handing.rate

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, head, row, dim]; return those of all slots."""
        layer, handing = self.numbers.rows, self.numbers.handing
        batch = attention.current.get()
        if batch.last < layer:
            raise StopPass
        batch.attending = layer
        if handing.what is As.ONE:
            keys = _both(layer, handing, key_states)
            return keys, keys
        if handing.what is As.SWAPPED:
            values, keys = _written(layer, value_states, key_states)
            return keys, values
        return _written(layer, key_states, value_states)

    def update_index(self, keys: Tensor) -> Tensor:
        """The same for keys [1, head, row, dim] of an index."""
        layer = self.numbers.others[INDEX]
        handing = attention.current.get().infos[layer].handed
        assert handing is not None
        return _both(layer, handing, keys)

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """The same for what is pooled, and its weights [1, row, dim]."""
        batch = attention.current.get()
        if not batch.gapless:
            raise CannotMove(GAPLESS)
        both = _written(self.numbers.others[name], kv[:, None], gate[:, None])
        return super().store_compression_weights(name, both[0][:, 0], both[1][:, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many rows are seen; which is up to our mask function."""
        return _part(attention.current.get()).stop, 0

    def get_seq_length(self) -> Any:
        """Return what makes the numbers of rows positions."""
        batch = attention.current.get()
        if self.numbers.handing.alone:  # a number: rows are told their positions, or have none
            return _part(batch).stop - batch.total
        return batch.offsets


def _part(batch: Batch) -> Any:
    (part,) = batch.parts
    return part


def _both(layer: int, handing: Handing, keys: Tensor) -> Tensor:
    """Write keys [1, head, row, dim], the first dims as keys and the rest as values; return all."""
    width = attention.current.get().infos[layer].shape.k_dim
    rolled = keys.roll(handing.roll, -1)
    return torch.cat(_written(layer, rolled[..., :width], rolled[..., width:]), -1).roll(
        -handing.roll, -1
    )


def _written(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Write rows [1, head, row, dim] that stand at their positions; return all, as they are given."""
    batch = attention.current.get()
    part = _part(batch)
    rows = part.rows.layers[layer]
    given = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    dtype = rows.seen(slice(0, 0))[0].dtype
    batch.write_turned(layer, *(t.to(dtype) for t in given))
    found = rows.seen(slice(0, part.stop))
    return found[0][None].to(keys.dtype), found[1][None].to(values.dtype)


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the attention that the file of a module writes out. Raises Refused."""
    homes = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    found = next((home[EAGER] for home in homes if EAGER in home), None)
    if found is None:
        raise Refused("the model does not write out its attention as others of transformers do")
    return found  # type: ignore[no-any-return]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    batch = attention.current.get()
    number: int = module.layer_idx  # type: ignore[assignment]
    numbers = numbers_of(batch.infos)[number]
    if batch.last <= numbers.last:
        raise StopPass
    if attention_mask is None:
        attention_mask = _mask(mask_function=_causal, dtype=query.dtype)
    if indices is not None:
        attention_mask = _picked(attention_mask, indices, key.shape[2])
    out, weights = eager_of(module)(module, query, key, value, attention_mask, **options)
    heads, n, stop = query.shape[1], query.shape[2], _part(batch).stop
    if weights is None or weights.shape != (1, heads, n, key.shape[2]) or key.shape[2] < stop:
        raise Refused(f"layer {number} does not show what its queries see")
    attention.show_all(batch, numbers.rows, _by_row(weights[0], stop, numbers.handing.rate))
    return out, weights


class _Softmaxes(TorchFunctionMode):
    """Shows what a model's own code makes of scores, where it does not come by `_attention`: the first
    softmax over all slots behind each `HandedLayer.update`."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self.left = {
            numbers.rows
            for numbers in numbers_of(batch.infos).values()
            if numbers.handing.alone and numbers.rows < batch.last
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        layer, stop = self.batch.attending, _part(self.batch).stop
        if getattr(func, "__name__", "") == "softmax" and layer in self.left and out.dim() > 2:
            if out.shape[-2:] == (self.batch.total, stop):
                self.left.remove(layer)
                attention.show_all(self.batch, layer, out.reshape(-1, self.batch.total, stop))
        return out


@contextmanager
def shown(batch: Batch) -> Iterator[None]:
    """Give a context in which observers of a pass see attention that is in the model's own code."""
    alone = any(info.handed is not None and info.handed.alone for info in batch.infos)
    if not alone or batch.parts[0].work.observer is None:
        yield
        return
    mode = _Softmaxes(batch)
    with mode:
        yield
    if mode.left:
        raise Refused(f"layer {min(mode.left)} does not show what its queries see")


def _by_row(weights: Tensor, stop: int, rate: int) -> Tensor:
    """Return [head, row, slot] of weights whose last keys are pools: what these get is that of their
    rows, as much of each."""
    pools = weights[..., stop:].repeat_interleave(rate, -1) / max(rate, 1)
    found = weights[..., :stop].clone()
    found[..., : pools.shape[-1]] += pools
    return found


def _picked(mask: Tensor, indices: Tensor, n: int) -> Tensor:
    """Return an additive mask [1, 1, row, slot] that leaves only ``indices`` [1, row, picked]."""
    unpicked = indices.new_ones((*indices.shape[:2], n), dtype=torch.bool)
    unpicked.scatter_(-1, indices.long(), False)
    return mask.masked_fill(unpicked[:, None], torch.finfo(mask.dtype).min)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _mask(
    *_: Any, mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """Return what rows of a pass see of all rows, 0 or the least number [1, 1, row, slot]."""
    batch = attention.current.get()
    queries, keys = batch.positions_seen
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    seen = mask_function(zero, zero, queries[:, None], keys[None])
    seen = seen.expand(len(queries), len(keys))
    mask = torch.zeros(seen.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


AttentionInterface.register(HANDED, _attention)
AttentionMaskInterface.register(HANDED, _mask)

"""The backends there are, and what their suite needs: see `test_backend.py` and beside it.

A backend is compared with itself the long way round, with masks worked out here, and there with
transformers. Nothing here looks inside: rows are changed and read through the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import oracle
import torch
from reference import Reference, Sizes
from torch import Tensor

from kvweave.run.base import Backend, Ints, LayerInfo, Mask, Observer, Rows, Work
from kvweave.run.model import Runner
from kvweave.store.kv import KV

EXACT = 1e-9  # relative error of float64 that went another way round
# the same on another device, which rounds the cosines of float32 angles its own way
ACROSS = EXACT if oracle.DEVICE.type == "cpu" else 1e-6
MOVED = 3e-5  # the same where float32 angles are those of other positions


# name -> (model type of transformers, changes of its configuration)
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "ministral": (
        "ministral",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_key_value_heads": 1,
        },
    ),
}


@cache
def reference(name: str) -> Reference:
    if name == "masks":
        return Reference(Sizes(masks=(Mask(window=5), Mask(), Mask(chunk=8))))
    model = oracle.build(*MODELS[name]).cpu()
    return Reference(Sizes.of(model.config), model.state_dict())


@cache
def transformers(name: str) -> Runner:
    return Runner(oracle.build(*MODELS[name]), name=name)


class Pooled(Runner):
    """The way of GPUs, on a CPU: rows of all contexts in one buffer, one attention for all."""

    pooled = True


@cache
def pooled(name: str) -> Runner:
    return Pooled(oracle.build(*MODELS[name]), name=name)


BACKENDS = {"reference": reference, "transformers": transformers, "pooled": pooled}
NAMES = [(kind, name) for kind in BACKENDS for name in MODELS] + [("reference", "masks")]


def cuts(n: int, *at: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *at, n]))


def ids(n: int, seed: int = 0) -> Ints:
    """Random tokens, none of them special."""
    return np.random.default_rng(seed).integers(3, 101, n)


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error relative to the largest wanted value."""
    found, wanted = found.cpu(), wanted.cpu()
    assert found.shape == wanted.shape, f"{tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    return float((found - wanted).abs().max() / wanted.abs().max()) if wanted.numel() else 0.0


def run(backend: Backend, work: Work) -> Tensor:
    (logits,) = backend.forward([work])
    return logits


def room(backend: Backend, n: int) -> Rows:
    rows = backend.new_rows()
    rows.reserve(n)
    return rows


def whole(rows: Rows, tokens: Ints | Tensor, positions: Ints | None = None, **more: object) -> Work:
    """A work of all tokens from slot 0 on, whose logits are all wanted."""
    slots = np.arange(len(tokens))
    where = slots if positions is None else positions
    return Work(rows, tokens, slots, where, **({"want": slots} | more))  # type: ignore[arg-type]


def some(rows: Rows, tokens: Ints, slots: Sequence[int] | Ints, **more: object) -> Work:
    """A work of some slots of a context without gaps, whose logits are all wanted."""
    at = np.asarray(slots)
    more = {"want": np.arange(len(at)), "positions": at} | more
    return Work(rows, tokens[at], at, **more)  # type: ignore[arg-type]


def prefill(
    backend: Backend, tokens: Ints, positions: Ints | None = None, **more: object
) -> tuple[Rows, Tensor]:
    """Return new rows of ``tokens`` and all their logits, in one piece."""
    rows = room(backend, len(tokens))
    logits = run(backend, whole(rows, tokens, positions, **more))
    rows.check_integrity()
    return rows, logits


def computed(backend: Backend, tokens: Ints, positions: Ints | None = None) -> KV:
    """Return unrotated KV of tokens that saw nothing else."""
    kv = backend.new_kv(len(tokens))
    prefill(backend, tokens, positions, raw=kv)
    return kv


def loud(backend: Backend, n: int, seed: int = 99) -> KV:
    """KV of other tokens, ten times as large: seen by mistake, it shows."""
    kv = computed(backend, ids(n, seed))
    return KV([10 * t for t in kv.k], [10 * t for t in kv.v])


def assert_rows(
    backend: Backend,
    found: Rows,
    wanted: Rows,
    slots: Ints | None = None,
    layers: Sequence[int] | None = None,
    bound: float = EXACT,
) -> None:
    """Rows [slots] of ``found`` are those of ``wanted``; by default all."""
    if slots is None:
        assert found.n == wanted.n
        assert found.positions[: found.n].tolist() == wanted.positions[: wanted.n].tolist()
    for layer in range(len(backend.layers)) if layers is None else layers:
        pairs = zip(found.read(layer, slots), wanted.read(layer, slots), strict=True)
        for name, (a, b) in zip(("keys", "values"), pairs, strict=True):
            assert off(a, b) < bound, f"{name} of layer {layer} are off by {off(a, b):.1e}"


def assert_kv(found: KV, wanted: KV, bound: float = EXACT) -> None:
    for a, b in zip((*found.k, *found.v), (*wanted.k, *wanted.v), strict=True):
        assert off(a, b) < bound


def visible(layer: LayerInfo, queries: Ints, keys: Ints) -> Tensor:
    """Return which keys [query, key] a query sees, one after the other."""

    def sees(q: int, k: int) -> bool:
        near = layer.mask.window is None or q - k < layer.mask.window
        same = layer.mask.chunk is None or q // layer.mask.chunk == k // layer.mask.chunk
        return k <= q and near and same

    return torch.tensor([[sees(int(q), int(k)) for k in keys] for q in queries])


class Recorder(Observer):
    """Keeps the attention it is shown; ``wanted`` says of which rows, by layer."""

    def __init__(self, wanted: dict[int, tuple[int, int]] | None = None) -> None:
        self.wanted, self.ended, self.asked = wanted, 0, set[int]()
        self._kept: list[tuple[int, int, int, Tensor]] = []
        self._new: list[tuple[int, int, int, Tensor]] = []

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        self.asked.add(n)
        return (0, n) if self.wanted is None else self.wanted.get(layer, (0, 0))

    def begin(self) -> None:
        self._new = []

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        assert weights.dtype in (torch.float32, torch.float64)
        self._new.append((layer, first, begin, weights.to("cpu", copy=True)))

    def end(self) -> None:
        self._kept += self._new
        self._new, self.ended = [], self.ended + 1

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, *_ in self._kept})

    def shown(self, layer: int, n_keys: int) -> tuple[list[int], Tensor]:
        """Return the rows shown in a layer, and their weights [head, row, slot]."""
        found: dict[int, Tensor] = {}
        for at, first, begin, weights in self._kept:
            if at == layer:
                for row in range(weights.shape[1]):
                    assert first + row not in found, f"row {first + row} is shown twice"
                    one = weights.new_zeros(len(weights), n_keys)
                    one[:, begin : begin + weights.shape[2]] = weights[:, row]
                    found[first + row] = one
        rows = sorted(found)
        return rows, torch.stack([found[row] for row in rows], 1)

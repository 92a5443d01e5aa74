"""A second engine behind `kvweave.run.base`, in plain torch: to be read and believed, not fast.

A llama-like decoder in float64: RMSNorm, rotary halves, grouped heads, SwiGLU. Nothing is packed,
cut or shared: works run one after the other, a layer's rows are one dense tensor, what a query sees
is a boolean matrix made of positions. Weights go by transformers' names, so that a Llama, Mistral or
Ministral of theirs and this hold the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import CannotMove, CannotRun, ContextTooLong, InvalidArgument
from kvweave.run.base import ALL, Capability, Ints, LayerInfo, Mask, Work
from kvweave.run.rotary import Rotation
from kvweave.store.arriving import Arriving
from kvweave.store.kv import KV, LayerShape

WIDE = torch.float64
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model is like; one of ``masks`` for each layer."""

    masks: tuple[Mask, ...] = (ALL, ALL, ALL)
    vocab: int = 101
    width: int = 48
    inner: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 12
    limit: int = 1024
    theta: float = 10000.0
    eps: float = 1e-6
    ends: frozenset[int] = frozenset({2})

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """Read a configuration of transformers."""
        n, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * n
        masks = (Mask(window=window) if kind == "sliding_attention" else ALL for kind in kinds)
        return cls(
            masks=tuple(masks),
            vocab=config.vocab_size,
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.head_dim,
            limit=config.max_position_embeddings,
            theta=config.rope_parameters["rope_theta"],
            eps=config.rms_norm_eps,
            ends=frozenset({config.eos_token_id}),
        )


def random_weights(sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    """Draw weights wide, so that mistakes show; the embedding is also the head."""
    s, made = sizes, torch.Generator().manual_seed(seed)

    def matrix(n_out: int, n_in: int) -> Tensor:
        return torch.randn(n_out, n_in, generator=made, dtype=WIDE) * n_in**-0.5

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(s.width, generator=made, dtype=WIDE)

    weights = {"model.embed_tokens.weight": matrix(s.vocab, s.width), "model.norm.weight": norm()}
    for i in range(len(s.masks)):
        layer = {
            "self_attn.q_proj": matrix(s.heads * s.dim, s.width),
            "self_attn.k_proj": matrix(s.kv_heads * s.dim, s.width),
            "self_attn.v_proj": matrix(s.kv_heads * s.dim, s.width),
            "self_attn.o_proj": matrix(s.width, s.heads * s.dim),
            "mlp.gate_proj": matrix(s.inner, s.width),
            "mlp.up_proj": matrix(s.inner, s.width),
            "mlp.down_proj": matrix(s.width, s.inner),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return weights


def turned(x: Tensor, positions: Ints, rotation: Rotation) -> Tensor:
    """Rotate halves of ``x`` [row, head, dim]; angles are float32, as transformers makes them."""
    angles = torch.from_numpy(positions).float()[:, None, None] * rotation.inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def visible(mask: Mask, queries: Ints, keys: Ints) -> Tensor:
    """Return which keys each query sees [query, key], by their positions."""
    q, k = queries[:, None], keys[None]
    seen = k <= q
    if mask.window is not None:
        seen = seen & (q - k < mask.window)
    if mask.chunk is not None:
        seen = seen & (q // mask.chunk == k // mask.chunk)
    return torch.from_numpy(seen)


class DenseRows:
    """`kvweave.run.base.Rows`: ``k[layer]`` and ``v[layer]`` [slot, kv head, dim], keys rotated.

    ``live[layer]`` [slot, kv head] tells which of them may be seen; their memory is not given back.
    """

    lossy = False

    def __init__(self, layers: Sequence[LayerInfo], moves: bool = False) -> None:
        self.layers = list(layers)
        self.n = 0
        self.positions: Ints = np.zeros(0, np.int64)
        empty = KV.empty([x.shape for x in layers], 0, WIDE, torch.device("cpu"))
        self.k, self.v = empty.k, empty.v
        self.original = [k.clone() for k in empty.k]  # unrotated
        self.moves = moves
        self.live = [torch.ones(0, x.shape.k_heads, dtype=torch.bool) for x in layers]
        self.bits = [torch.full((0, x.shape.k_heads), 64) for x in layers]  # of keys and values
        # of each layer: slot and KV of chunks that have not been written
        self._waiting: list[list[tuple[int, KV]]] = [[] for _ in layers]

    @property
    def n_bytes(self) -> int:
        return self.bytes_for(0)

    def bytes_for(self, n: int, exact: bool = False) -> int:
        n = max(n, len(self.positions))
        return sum(n * x.shape.width * WIDE.itemsize for x in self.layers)

    def bytes_back(self, stay: int) -> int:
        return 0

    def reserve(self, n: int, exact: bool = False) -> None:
        more = n - len(self.positions)
        if more > 0:
            self.positions = np.pad(self.positions, (0, more))
            kinds = (
                (self.k, 0.0),
                (self.v, 0.0),
                (self.original, 0.0),
                (self.live, True),
                (self.bits, 64),
            )
            for tensors, fill in kinds:
                for i, old in enumerate(tensors):
                    tensors[i] = torch.cat((old, old.new_full((more, *old.shape[1:]), fill)))

    def truncate(self, n: int) -> None:
        self.n = min(self.n, n)
        for layer, waiting in enumerate(self._waiting):
            self.live[layer][n:], self.bits[layer][n:] = True, 64
            kept = [(at, kv.rows(0, min(kv.n_tokens, n - at))) for at, kv in waiting if at < n]
            self._waiting[layer] = kept

    def place(
        self, runs: Sequence[tuple[int, Sequence[KV]]], positions: Ints, exact: int | None = None
    ) -> None:
        for at, kvs in runs:
            for kv in kvs:
                for layer, waiting in enumerate(self._waiting):
                    waiting.append((at, kv))
                    self.live[layer][at : at + kv.n_tokens] = True
                    self.bits[layer][at : at + kv.n_tokens] = 64
                at += kv.n_tokens
            self.n = max(self.n, at)
        known = min(self.n, len(positions))
        self.positions[:known] = positions[:known]
        if not any(isinstance(kv, Arriving) for _, kv in self._all_waiting()):
            self.settle()

    def put(self, slots: Ints, kv: KV) -> None:
        for layer in range(len(self.layers)):
            self.settle(layer)
            self.write(layer, slots, kv.k[layer], kv.v[layer])

    def write(self, layer: int, slots: Ints, keys: Tensor, values: Tensor) -> None:
        """Turn ``keys`` to the slots' positions; write both, [slot, head, dim]."""
        rotation, keys, values = self.layers[layer].rotation, keys.cpu(), values.cpu()
        self.k[layer][slots] = turned(keys, self.positions[slots], rotation)
        self.original[layer][slots], self.v[layer][slots] = keys, values

    def _all_waiting(self) -> list[tuple[int, KV]]:
        return [each for waiting in self._waiting for each in waiting]

    @property
    def pending(self) -> bool:
        return bool(self._all_waiting())

    @property
    def arrived(self) -> bool:
        every = [kv for _, kv in self._all_waiting()]
        return all(kv.load.ended for kv in every if isinstance(kv, Arriving))

    def settle(self, layer: int | None = None) -> None:
        for i in range(len(self.layers)) if layer is None else [layer]:
            for at, kv in self._waiting[i]:
                self.write(i, np.arange(at, at + kv.n_tokens), kv.k[i], kv.v[i])
            self._waiting[i] = []

    def read(self, layer: int, slots: Ints | None = None) -> tuple[Tensor, Tensor]:
        self.settle(layer)
        slots = np.arange(self.n) if slots is None else slots
        return self.k[layer][slots], self.v[layer][slots]  # indexing by an array copies

    def clone(self, layers: int | None = None) -> DenseRows:
        self.settle()
        twin = DenseRows(self.layers, self.moves)
        twin.n, twin.positions = self.n, self.positions.copy()
        for name in ("k", "v", "original", "live", "bits"):
            upto = len(self.layers) if layers is None else layers
            tensors = getattr(self, name)
            setattr(twin, name, [t.clone() for t in tensors[:upto]] + tensors[upto:])
        return twin

    def free(self, layer: int, head: int, slots: Ints) -> None:
        self.live[layer][slots, head] = False

    def kept(self, layer: int) -> list[Ints]:
        return [np.flatnonzero(live.numpy()) for live in self.live[layer][: self.n].T]

    def packed(self, layer: int) -> tuple[Tensor, Tensor]:
        kept, found = self.kept(layer), []
        for tensor in (self.k[layer], self.v[layer]):
            shape = (tensor.shape[1], max(map(len, kept)), tensor.shape[2])
            found.append(tensor.new_zeros(shape))
            for head, slots in enumerate(kept):
                found[-1][head, : len(slots)] = tensor[slots, head]
        return found[0], found[1]

    def keep(self, layer: int, slots: Sequence[Ints], ahead: int = 0) -> None:
        for head, kept in enumerate(slots):
            self.free(layer, head, np.setdiff1d(np.arange(self.n), kept))

    def code(self, layer: int, form: str, slots: Sequence[Ints], ahead: int = 0) -> None:
        if form == "below":
            raise NotImplementedError("there is one tier of memory")
        bits = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4), "k4v2": (4, 2)}[form]
        for head, some in enumerate(slots):
            some = some[(self.bits[layer][some, head] > sum(bits)).numpy()]
            for tensor, n in zip((self.k[layer], self.v[layer]), bits, strict=True):
                for slot in some.tolist():
                    tensor[slot, head] = rounded(tensor[slot, head], n, tensor is self.v[layer])
            self.bits[layer][some, head] = sum(bits)

    def below(self, layer: int) -> list[Ints]:
        return [np.zeros(0, np.int64)] * self.k[layer].shape[1]

    @property
    def forms(self) -> dict[str, int]:
        names, found = {16: "int8", 12: "k8v4", 8: "int4", 6: "k4v2"}, {}
        for bits, live in zip(self.bits, self.live, strict=True):
            for n, name in names.items():
                count = int(((bits == n) & live)[: self.n].sum())
                found.update({name: found.get(name, 0) + count} if count else {})
        return found

    def move(self, kept: Ints, positions: Ints) -> None:
        if not self.moves:
            raise InvalidArgument("rows", "not made to be moved")
        self.settle()
        raw = [(k[kept], v[kept]) for k, v in zip(self.original, self.v, strict=True)]
        self.truncate(len(kept))
        self.positions[: self.n] = positions
        for layer, (keys, values) in enumerate(raw):
            self.write(layer, np.arange(self.n), keys, values)

    def unrotated(self, layer: int) -> Tensor | None:
        return self.original[layer][: self.n].transpose(0, 1) if self.moves else None

    @property
    def n_freed(self) -> int:
        return sum(int((~live).sum()) for live in self.live)

    def gone(self) -> Ints:
        kept = np.any([live.numpy().any(1) for live in self.live], 0)[: self.n]
        return np.flatnonzero(~kept)

    def check_integrity(self) -> None:
        assert self.n <= len(self.positions), f"{self.n} rows in {len(self.positions)} slots"
        assert (np.diff(self.positions[: self.n]) > 0).all(), "positions do not increase"
        for tensor in (*self.k, *self.v, *self.live):
            assert len(tensor) == len(self.positions), "layers of different capacity"


def rounded(row: Tensor, bits: int, values: bool = False) -> Tensor:
    """Return ``row`` [dim] as ``bits`` bits a number give it back, a key, or ``values``: 32 channels on one grid,
    64 of 8 bits."""
    made = row.clone()
    size = 64 if bits == 8 else 32
    step = size if len(row) % size == 0 else len(row)
    for at in range(0, len(row), step):
        some = row[at : at + step]
        if values:
            points = spread(some, bits)
        else:
            middle = ((some.max() + some.min()) / 2).bfloat16().double()
            reach = (some - middle).abs().max()
            scale = (reach * 2 / (2**bits - 1) * (1 + 1 / 256)).clamp_min(2.0**-120)
            half = (2**bits - 1) / 2
            points = middle + scale.bfloat16().double() * (torch.arange(2**bits) - half)
        made[at : at + step] = points[(some[:, None] - points).abs().argmin(1)]
    return made


def spread(some: Tensor, bits: int) -> Tensor:
    """Return the grid of some values: from the lowest up, in numbers of float32, of float16 for less than 8 bits."""
    low, high, most = some.min(), some.max(), 2**bits - 1
    if bits == 8:
        return low.float().double() + ((high - low) / most).float().double() * torch.arange(2**bits)
    first = low.half().double()
    if first > low:
        first = (first - first.abs() / 1024 - 2.0**-24).half().double()
    scale = ((high - first) / most * (1 + 1 / 1024) + 2.0**-24).half().double()
    return first + scale * torch.arange(2**bits)


class Reference:
    """`kvweave.run.base.Backend` over `DenseRows`."""

    def __init__(self, sizes: Sizes, weights: Weights | None = None) -> None:
        self.sizes = sizes
        self.weights = random_weights(sizes) if weights is None else weights
        inv_freq = 1.0 / sizes.theta ** (torch.arange(0, sizes.dim, 2).float() / sizes.dim)
        rotation = Rotation(sizes.dim, False, inv_freq)
        shape = LayerShape(sizes.kv_heads, sizes.dim, sizes.kv_heads, sizes.dim)
        self.layers = [LayerInfo(shape, rotation, mask) for mask in sizes.masks]
        self.limit, self.ends, self.n_vocab = sizes.limit, sizes.ends, sizes.vocab
        self.device, self.dtype = torch.device("cpu"), WIDE
        self.tokenizer: Any = None
        self.can_run = self.can_move = Capability(True, "all layers rotary")
        taken = hashlib.blake2b(digest_size=16)
        for name in sorted(self.weights):
            taken.update(self.weights[name].numpy().tobytes())
        self.fingerprint = ModelFingerprint(
            "reference", taken.hexdigest(), "", "float64", f"{sizes.theta}"
        )

    @property
    def row_bytes(self) -> int:
        return sum(x.shape.width for x in self.layers) * WIDE.itemsize

    def require_run(self) -> None:
        if not self.can_run:
            raise CannotRun(self.can_run.reason)

    def require_move(self) -> None:
        if not self.can_move:
            raise CannotMove(self.can_move.reason)

    def new_rows(self, codec: str = "raw", moves: bool = False) -> DenseRows:
        if codec != "raw":
            raise InvalidArgument("codec", f"rows in memory are no {codec!r}", "raw")
        return DenseRows(self.layers, moves)

    def new_kv(self, n: int) -> KV:
        return KV.empty([x.shape for x in self.layers], n, WIDE, self.device)

    @torch.no_grad()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        furthest = max(int(work.positions[-1]) for work in works)
        if furthest >= self.limit:
            raise ContextTooLong(furthest + 1, self.limit)
        observers = [work.observer for work in works if work.observer is not None]
        for observer in observers:
            observer.begin()
        logits = [self._run(work) for work in works]
        for observer in observers:
            observer.end()
        return logits

    def _run(self, work: Work) -> Tensor:
        rows = work.rows
        rows.positions[work.slots] = work.positions
        rows.n = max(rows.n, int(work.slots[-1]) + 1)
        x = self.weights["model.embed_tokens.weight"][torch.as_tensor(work.tokens)]
        for layer in range(len(self.layers)):
            name = f"model.layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(h, f"{name}.self_attn.{which}_proj").unflatten(
                    -1, (-1, self.sizes.dim)
                )
                for which in "qkv"
            )
            self._write(work, layer, k, v)
            if layer == work.last:
                return x.new_empty(0, self.n_vocab)
            if work.observer is not None and work.observer.asks:
                work.observer.ask(layer, work.at, q)
            out = self._attend(work, layer, turned(q, work.positions, self.layers[layer].rotation))
            x = x + self._linear(out.flatten(-2), f"{name}.self_attn.o_proj")
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(h, f"{name}.mlp.{which}_proj") for which in ("gate", "up"))
            x = x + self._linear(gate * gate.sigmoid() * up, f"{name}.mlp.down_proj")
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self._linear(self._norm(x[work.want], "model.norm"), head)

    def _write(self, work: Work, layer: int, keys: Tensor, values: Tensor) -> None:
        assert isinstance(work.rows, DenseRows)
        work.rows.settle(layer)
        work.rows.write(layer, work.slots, keys, values)
        if work.raw is not None:
            work.raw.k[layer][work.at : work.at + work.n] = keys
            work.raw.v[layer][work.at : work.at + work.n] = values

    def _attend(self, work: Work, layer: int, query: Tensor) -> Tensor:
        """Return what each row [row, head, dim] takes from the values that it sees."""
        assert isinstance(work.rows, DenseRows)
        rows, n = work.rows, int(work.slots[-1]) + 1
        seen = visible(self.layers[layer].mask, work.positions, rows.positions[:n])
        out, weights = torch.empty_like(query), []
        for head in range(self.sizes.heads):
            own = head // (self.sizes.heads // self.sizes.kv_heads)  # the kv head it reads
            scores = query[:, head] @ rows.k[layer][:n, own].T * self.sizes.dim**-0.5
            scores[~(seen & rows.live[layer][:n, own])] = -torch.inf
            weights.append(scores.softmax(-1))
            out[:, head] = weights[-1] @ rows.v[layer][:n, own]
        if work.observer is not None and work.observer.sees:
            first, stop = work.observer.rows(layer, work.at + work.n)
            first, stop = max(first, work.at), min(stop, work.at + work.n)
            if first < stop:
                shown = torch.stack(weights)[:, first - work.at : stop - work.at]
                work.observer.see(layer, first, 0, shown)
        return out

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.pow(2).mean(-1, keepdim=True) + self.sizes.eps).rsqrt()
        return self.weights[f"{name}.weight"] * (wide * scale).to(x.dtype)

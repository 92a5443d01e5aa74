"""The model seam: the only file that imports transformers.

Public hooks only (>= 5.17): a cache layer whose `update` writes rows where the current `Batch` says,
and an attention function under our own name, which therefore gets no mask and masks by position.
Every pass runs with ``position_ids = 0``, where a rotary module is the identity, so keys arrive
unrotated; queries and keys are turned in our attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from kvweave.errors import CannotMove, ContextTooLong, InvalidArgument, ModelUnusable
from kvweave.run import attention
from kvweave.run.base import Capability, LayerInfo, Mask, Work
from kvweave.run.batch import Batch, StopPass
from kvweave.run.fingerprint import fingerprint
from kvweave.run.pin import inv_freqs, pinned
from kvweave.run.quantised import rows_as
from kvweave.run.rotary import identify
from kvweave.run.rows import KVRows
from kvweave.run.sample import end_tokens
from kvweave.store.kv import KV, LayerShape

ATTENTION = "kvweave"
SMALL = 1 << 29  # bytes of weights that load without a progress bar
PROBES = (0, 1, 37, 611)  # positions; small ones separate frequencies, large ones confirm them
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Hands the rows of layer ``index`` to the current batch."""

    def __init__(self, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        attention.current.get().write(self.index, keys, values)
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _ProbeLayer(_SlotLayer):  # type: ignore[no-untyped-call]
    """Keeps what one layer would cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class _Refused(Exception):
    """The model has something rows cannot express; the message says what."""


_seen: dict[int, dict[str, Any]] = {}  # layer -> keyword arguments of the probing call


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    if attention.current.get(None) is None:  # probing: one token attends only to itself
        _seen[layer] = kw
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None
    return attention.attend(layer, query, kw.get("scaling"), kw.get("softcap")), None


AttentionInterface.register(ATTENTION, _attention)


class Runner:
    """A decoder-only model whose passes write rows into contexts.

    Raises:
        ModelUnusable: the directory or the weights cannot be loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "model",
        max_positions: int | None = None,
    ) -> None:
        self.model: Any = model.eval()  # type: ignore[no-untyped-call]
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.device, self.dtype = model.device, model.dtype
        declared = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        stretches = _rope(self.config).get("rope_type") == "dynamic"
        if max_positions is not None and not (0 < max_positions <= declared or stretches):
            raise InvalidArgument(
                "max_positions", f"{max_positions} is not in 1..{declared}, the model's own limit"
            )
        self.ends = end_tokens(model.generation_config)
        self.n_vocab = int(self.config.vocab_size)
        self.limit = int(max_positions or _pinned_limit(self.config) or declared)
        self.layers: list[LayerInfo] = []
        self._wants_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        native = model.config._attn_implementation
        if native == ATTENTION:  # the model was in another runner before
            native = "eager"
        try:
            self._probe()
            self.can_move = Capability(True, _summary(self.layers))
        except _Refused as why:
            self.can_move = Capability(False, str(why))
            model.set_attn_implementation(native)
        self.fingerprint = fingerprint(model, tokenizer, name, [x.rotation for x in self.layers])
        if self.can_move:
            self._verify(native)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_positions: int | None = None,
    ) -> Runner:
        """Load a checkpoint directory or hub id. Raises ModelUnusable, InvalidArgument."""
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        kind: Any = dtype
        if dtype == "auto" and where == "cpu":
            kind = torch.float32  # CPUs without bf16 units are about twice as slow in bf16
        elif dtype != "auto":
            if dtype not in DTYPES:
                raise InvalidArgument("dtype", f"{dtype!r}", f"one of {', '.join(DTYPES)}")
            kind = getattr(torch, dtype)
        small = sum(f.stat().st_size for f in Path(path).glob("*.safetensors")) < SMALL
        shown = logging.is_progress_bar_enabled()
        try:
            if small and Path(path).is_dir():
                logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=kind, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(path)
            model, info = loaded
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelUnusable(path, first) from error
        finally:
            if shown:
                logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        for problem in ("missing_keys", "mismatched_keys"):
            if info.get(problem):
                some = ", ".join(str(k) for k in sorted(info[problem], key=str)[:3])
                raise ModelUnusable(path, f"{problem.replace('_', ' ')} in the weights: {some}")
        return cls(model.to(where), tokenizer, name=path, max_positions=max_positions)

    @property
    def shapes(self) -> list[LayerShape]:
        return [layer.shape for layer in self.layers]

    @property
    def row_bytes(self) -> int:
        """Bytes one token's keys and values take in all layers."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        return size * sum(s.width for s in self.shapes)

    def require_move(self) -> None:
        """Raise CannotMove unless chunks of this model can be placed anywhere."""
        if not self.can_move:
            raise CannotMove(self.can_move.reason)

    def new_rows(self, codec: str = "raw") -> KVRows:
        """Return empty rows for one context, kept as ``codec`` says. Raises InvalidArgument."""
        return rows_as(codec, self.layers, self.dtype, self.device)

    def new_kv(self, n: int) -> KV:
        """Return uninitialised KV for ``n`` tokens."""
        return KV.empty(self.shapes, n, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run works of different contexts in one pass; return each one's logits [want, vocab], in
        the dtype that the model gives them in.

        Raises ContextTooLong before anything is written, LoadFailed when a chunk did not arrive.
        """
        self.require_move()
        last = max(int(work.positions[-1]) for work in works)
        if last >= self.limit:
            raise ContextTooLong(last + 1, self.limit)
        batch = Batch(works, self.layers, self.device)
        token = attention.current.set(batch)
        try:
            batch.begin()
            found = self._call(batch)
            batch.end()
        finally:
            attention.current.reset(token)
        return batch.split(found)

    def _call(self, batch: Batch) -> Tensor:
        """Return the logits [want, vocab] of a batch."""
        n, options = len(batch.want), {}
        if self._wants_rows:
            # an empty selection would mean "all" to some models: compute one row and drop it
            options["logits_to_keep"] = batch.want if n else batch.ids.new_zeros(1)
        try:
            logits: Tensor = self.model(
                input_ids=batch.ids,
                position_ids=torch.zeros_like(batch.ids),
                past_key_values=Cache(layers=[_SlotLayer(i) for i in range(len(self.layers))]),
                use_cache=True,
                **options,
            ).logits[0]
        except StopPass:
            return torch.empty(0, self.n_vocab, dtype=self.dtype, device=self.device)
        return logits[:n] if self._wants_rows else logits[batch.want]

    @torch.inference_mode()
    def _probe(self) -> None:
        """Find every layer's shapes, rotation and window from a few one-token calls."""
        n_layers = int(self.config.num_hidden_layers)
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        odd = kinds - {"full_attention", "sliding_attention"}
        if odd:
            raise _Refused(f"{', '.join(sorted(odd))} layers keep a state, not rows of positions")
        self.model.set_attn_implementation(ATTENTION)
        if self.model.config._attn_implementation != ATTENTION:
            raise _Refused("the model does not use transformers' attention interface")
        _seen.clear()
        positions = [p for p in PROBES if p < self.limit]
        with pinned(self.model, self.limit):
            calls = {p: self._probe_at(p, n_layers) for p in positions}
        self._frequencies = inv_freqs(self.model)
        for layer in range(n_layers):
            if layer not in _seen:
                raise _Refused(f"layer {layer} does not use transformers' attention interface")
            for option, what in (
                ("s_aux", "attention sinks"),
                ("position_bias", "position biases"),
            ):
                if _seen[layer].get(option) is not None:
                    raise _Refused(f"layer {layer} has {what}, which are not supported yet")
            cached = {p: call[layer] for p, call in calls.items()}
            self.layers.append(self._layer(layer, cached))

    def _probe_at(self, position: int, n_layers: int) -> list[tuple[Tensor, Tensor]]:
        layers = [_ProbeLayer(i) for i in range(n_layers)]
        ids = torch.full((1, 1), min(7, self.config.vocab_size - 1), device=self.device)
        try:
            self.model(
                input_ids=ids,
                position_ids=torch.full_like(ids, position),
                past_key_values=Cache(layers=list(layers)),
                use_cache=True,
            )
        except Exception as error:
            raise _Refused(f"its cache is not rows of keys and values: {error}") from error
        for layer in layers:
            if not isinstance(layer.keys, Tensor) or layer.keys.dim() != 4:
                raise _Refused(f"layer {layer.index} caches no rows of its own")
        cached: list[Any] = layers
        return [(x.keys[0, :, 0].cpu(), x.values[0, :, 0].cpu()) for x in cached]

    def _layer(self, layer: int, cached: dict[int, tuple[Tensor, Tensor]]) -> LayerInfo:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        keys = {p: k.to(wide) for p, (k, _) in cached.items()}
        values = {p: v.to(wide) for p, (_, v) in cached.items()}
        tolerance = TOLERANCE[self.dtype]
        found = identify(keys, self._frequencies, tolerance)
        if found is not None and identify(values, [], tolerance) is None:
            raise _Refused(f"layer {layer} caches a latent whose rotary part is in the values")
        if found is None:
            raise _Refused(
                f"layer {layer}: keys change with their position in a way that is no rotation"
                " (learned or absolute positions, or a norm after the rotation)"
            )
        for known in self.layers:  # share equal rotations: angles are computed once for each
            if known.rotation.key == found.key:
                found = known.rotation
        shape = LayerShape(*keys[0].shape, *values[0].shape)
        return LayerInfo(shape, found, Mask(window=_seen[layer].get("sliding_window")))

    @torch.inference_mode()
    def _verify(self, native: str) -> None:
        """Compare with the model's own positions and attention; refuse what differs.

        Once at the start and once at the far end, where scalings by position would show. Positions
        are contiguous, because transformers counts a sliding window in rows.
        """
        n = min(12, self.limit // 2)
        slots = np.arange(n)
        ids = (slots * 7919 + 13) % self.n_vocab
        for start in (0, self.limit - n):
            rows = self.new_rows()
            rows.reserve(n)
            ours = self.forward([Work(rows, ids, slots, start + slots, want=slots)])[0]
            there = torch.from_numpy(np.stack((ids, start + slots))).to(self.device)
            theirs = self._native_logits(native, *there)
            error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-9))
            if not error <= 5 * TOLERANCE[self.dtype]:
                self.can_move = Capability(
                    False,
                    f"our pass differs from the model's own by {error:.1e} (relative logits)"
                    f" at position {start}",
                )
                return

    def _native_logits(self, native: str, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of the model's own forward at these positions."""
        self.model.set_attn_implementation(native)
        try:
            with pinned(self.model, self.limit):
                logits: Tensor = self.model(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    attention_mask=torch.ones_like(ids)[None],
                    past_key_values=DynamicCache(),
                    use_cache=True,
                ).logits[0]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return logits


def _rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return rope


def _pinned_limit(config: Any) -> int | None:
    """Positions a model with length-dependent frequencies keeps its short ones for."""
    rope = _rope(config)
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings")
        return int(original or getattr(config, "original_max_position_embeddings", 0) or 0) or None
    return None


def _summary(layers: Sequence[LayerInfo]) -> str:
    turned = sum(layer.rotation.width > 0 for layer in layers)
    sliding = sum(layer.mask.window is not None for layer in layers)
    return f"{turned} rotary, {len(layers) - turned} position-free, {sliding} sliding layers"

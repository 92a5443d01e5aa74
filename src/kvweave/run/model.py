"""The model seam: an engine over a model of transformers.

Public hooks only (>= 5.17): a cache layer whose `update` writes rows where the current `Batch` says,
and an attention function under our own name, which therefore gets no mask and masks by position.
Every pass runs with ``position_ids = 0``, where a rotary module is the identity, so keys arrive
unrotated; queries and keys are turned in our attention. Models whose rows hold their position in
another way run with their true positions, and nothing is turned.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvweave.errors import CannotMove, CannotRun, ContextTooLong, InvalidArgument
from kvweave.run import attention, products
from kvweave.run.apart import apart
from kvweave.run.base import Capability, LayerInfo, Work, fixed_from, n_numbers, readers_of
from kvweave.run.batch import Batch, StopPass
from kvweave.run.fingerprint import fingerprint
from kvweave.run.handed import HANDED, HandedLayer, numbers_of, shown
from kvweave.run.handing import As
from kvweave.run.kernel import available
from kvweave.run.load import load, twin
from kvweave.run.looking import KeptLayer, Refused, implement
from kvweave.run.mapped import MappedFiles, SharedWeights
from kvweave.run.narrow import agrees, last_layer, narrowed
from kvweave.run.narrow import install as install_narrow
from kvweave.run.passing import one_pass
from kvweave.run.pool import Pools
from kvweave.run.primed import PrimedLayer
from kvweave.run.probe import learn
from kvweave.run.quantised import movable, rows_as
from kvweave.run.replay import install
from kvweave.run.rows import KVRows
from kvweave.run.sample import end_tokens
from kvweave.run.stateful import StatesBeside
from kvweave.run.verify import difference
from kvweave.store.kv import KV, LayerShape

ATTENTION = "kvweave"
FIXED = (
    "its rows contain their position in a way that is no rotation (learned or absolute positions):"
    " chunks stay where they were computed"
)


class _SlotLayer(KeptLayer):  # type: ignore[no-untyped-call]
    """Hands the rows of layer ``index`` to the current batch."""

    def __init__(self, index: int, latent: bool) -> None:
        super().__init__()
        self.index, self.latent = index, latent

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if self.latent:  # handed the other way round
            keys, values = values, keys
        attention.current.get().write(self.index, keys, values)
        return key_states, value_states

    def get_seq_length(self) -> Any:
        # models that number the rows of a call themselves add 0, 1, ... to this
        batch = attention.current.get()
        return batch.offsets if fixed_from(batch.infos) is None else 0  # these are told


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kw: Any,
) -> tuple[Tensor, None]:
    number: int = module.layer_idx  # type: ignore[assignment]
    how = (kw.get(name) for name in ("scaling", "softcap", "s_aux"))
    return attention.attend(number, query, *how), None


AttentionInterface.register(ATTENTION, _attention)


class _StateSlot(PrimedLayer):
    """Stands where a mixer puts its states; each has its own while it runs."""


class _Both(StatesBeside, _SlotLayer):  # type: ignore[no-untyped-call, override]
    """The same beside rows."""

    def __init__(self, index: int, latent: bool, n_states: int) -> None:
        StatesBeside.__init__(self, n_states)
        self.index, self.latent = index, latent

    update = _SlotLayer.update
    get_seq_length = _SlotLayer.get_seq_length


class _PassCache(Cache):
    """The cache of a pass of ours."""


class Runner:
    """A decoder-only model whose passes write rows into contexts.

    Raises:
        ModelUnusable: the directory or the weights cannot be loaded.
    """

    @apart()
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "model",
        max_positions: int | None = None,
    ) -> None:
        model = twin(model, name)
        self._files, self._is_watched = MappedFiles(model), False
        products.install(model)
        self.model: Any = model
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
        # where launches cost, rows of all contexts stand together
        self.pools: Pools | None = None
        self._wants_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        native = model.config._attn_implementation
        self._narrows = False
        self._why: str | None = None  # attention of ours cannot follow the model's
        try:
            self.layers = self._learned()
            self.can_run = Capability(True, _summary(self.layers))
            for i, layer in enumerate(self.layers):
                if layer.mixer is not None:
                    install(i, layer.mixer, _PassCache)
        except Refused as why:
            self.can_run = Capability(False, str(why))
        fixed = fixed_from(self.layers)
        if fixed is not None:
            self.limit = min(self.limit, declared - fixed)
        ours = HANDED if self._handed else ATTENTION
        implement(self.model, ours if self.can_run else native)
        rotations = [layer.rotation for layer in self.layers]
        self.fingerprint = fingerprint(self.model, tokenizer, name, rotations)
        if self.can_run and (found := difference(self, self.model, ours)) is not None:
            self.can_run = Capability(False, found if self._why is None else self._why)
        stays = self.can_run and fixed is not None
        self.can_move = Capability(False, FIXED) if stays else self.can_run
        last = last_layer(self.model, self.layers) if self.can_run else None
        if last is not None:
            hook = install_narrow(last)
            self._narrows = True
            if not agrees(self):
                self._narrows = False
                hook.remove()
        self.pools = None  # verification ran in a wider dtype
        self._weights = SharedWeights(self.model, name)

    def _learned(self) -> list[LayerInfo]:
        """Return what layers keep, for attention of the model's own where ours cannot follow it.
        Raises Refused."""
        try:
            return learn(self.model, self.limit)
        except Refused as why:
            try:
                found = learn(self.model, self.limit, handed=True)
            except Refused:
                raise why from None
            self._why = str(why)
            return found

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
        model, tokenizer = load(path, dtype, device)
        return cls(model, tokenizer, name=path, max_positions=max_positions)

    @property
    def shapes(self) -> list[LayerShape]:
        return [layer.shape for layer in self.layers]

    @property
    def row_bytes(self) -> int:
        """Bytes one token's keys and values take in all layers."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        return size * sum(s.width for s in self.shapes)

    def watch_weights(self) -> None:
        """From now on run with the weights of the fingerprint only. Raises ModelUnusable where they are
        others: a caller's model may be trained, and its runner goes on, but KV is of one model."""
        self._weights.check(time.perf_counter())
        self._is_watched = True

    def require_run(self) -> None:
        """Raise CannotRun unless passes of this model can be run."""
        if not self.can_run:
            raise CannotRun(self.can_run.reason)

    def require_move(self) -> None:
        """Raise CannotMove unless chunks of this model can be placed anywhere."""
        self.require_run()
        if not self.can_move:
            raise CannotMove(self.can_move.reason)

    def new_rows(self, codec: str = "raw", moves: bool = False) -> KVRows:
        """Return empty rows for one context, kept as ``codec`` says; those that can be moved keep
        their unrotated keys besides. Raises InvalidArgument, CannotMove."""
        if moves:
            self.require_move()
            return movable(codec, self.layers, self.dtype, self.device)
        if codec == "raw" and self.pooled:
            if self.pools is None:
                self.pools = Pools(self.layers, self.dtype, self.device)
            return KVRows(self.layers, self.pools.new_rows(), self.device)
        return rows_as(codec, self.layers, self.dtype, self.device)

    @property
    def pooled(self) -> bool:
        """Whether raw rows of all contexts stand in one buffer a layer."""
        plain = all(x.latent is None and x.mixer is None for x in self.layers)
        return plain and not self._handed and available(self.device)

    @property
    def _handed(self) -> bool:
        """Whether attention is the model's own: then one context a pass."""
        return any(layer.handed is not None for layer in self.layers)

    def new_kv(self, n: int) -> KV:
        """Return uninitialised KV for ``n`` tokens."""
        return KV.empty(self.shapes, n, self.dtype, self.device)

    @apart()
    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run works of different contexts in one pass; return each one's logits [want, vocab], in
        the dtype that the model gives them in.

        Raises ContextTooLong before anything is written, LoadFailed when a chunk did not arrive,
        ModelUnusable when its weights were written over, or changed (see `watch_weights`).
        """
        self.require_run()
        begun = time.perf_counter()
        if self._handed and len(works) > 1:
            last = max(int(work.positions[-1]) for work in works)
            if last >= self.limit:
                raise ContextTooLong(last + 1, self.limit)
            return [self.forward([work])[0] for work in works]
        pools = self.pools

        def call(batch: Batch) -> Tensor:
            if pools is None or pools.graphs is None:
                return self._call(batch)
            return pools.graphs.run(batch, self._call, pools.n_moves)

        logits = one_pass(
            works, self.limit, lambda: Batch(works, self.layers, self.device, pools), call
        )
        self._files.check()
        if self._is_watched:
            self._weights.check(begun)
        return logits

    def _cache(self) -> Cache:
        """Return a cache whose layers hand their rows to the current batch."""
        readers = readers_of(self.layers)
        mixers = {m.number: m for m in (info.mixer for info in self.layers) if m is not None}
        made: list[Any] = []
        handed = numbers_of(self.layers)
        for number in range(n_numbers(self.layers)):
            if number in handed:
                made.append(HandedLayer(handed[number]))
                continue
            i, mixer = readers.get(number, -1), mixers.get(number)
            latent = i >= 0 and self.layers[i].latent is not None
            if mixer is None:
                made.append(_SlotLayer(i, latent))
            elif i < 0:
                made.append(_StateSlot(mixer.n_states))
            else:
                made.append(_Both(i, latent, mixer.n_states))
        return _PassCache(layers=made)

    def _call(self, batch: Batch) -> Tensor:
        """Return the logits [want, vocab] of a batch."""
        n, want, options = len(batch.want), batch.want, {}
        if self._narrows:
            batch.narrow = narrowed(batch)
            want = want if batch.narrow is None else batch.narrow.want
        if self._wants_rows:
            # an empty selection would mean "all" to some models: compute one row and drop it
            options["logits_to_keep"] = want if n else batch.ids.new_zeros(1)
        try:
            with shown(batch):
                logits: Tensor = self.model(
                    input_ids=batch.ids,
                    position_ids=batch.position_ids,
                    past_key_values=self._cache(),
                    use_cache=True,
                    **options,
                ).logits[0]
        except StopPass:
            return torch.empty(0, self.n_vocab, dtype=self.dtype, device=self.device)
        return logits[:n] if self._wants_rows else logits[want]


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


OPTIONAL = (
    "fixed",
    "chunked",
    "latent",
    "stateful",
    "handed",
    "pooled",
    "indexed",
)  # kinds that are named where there are some


def _summary(layers: Sequence[LayerInfo]) -> str:
    attend = [layer for layer in layers if layer.attends]
    turned = sum(layer.rotation.width > 0 for layer in attend)
    fixed = sum(layer.rotation.fixed is not None for layer in attend)
    sliding = sum(layer.mask.window is not None for layer in layers)
    chunked = sum(layer.mask.chunk is not None for layer in layers)
    latent = sum(layer.latent is not None for layer in layers)
    states = sum(layer.mixer is not None for layer in layers)
    handed = [layer.handed for layer in layers if layer.handed is not None]
    shared = sum(max(0, len(layer.readers) - 1) for layer in layers)
    kinds = {
        "rotary": turned,
        "fixed": fixed,
        "position-free": len(attend) - turned - fixed,
        "sliding": sliding,
        "chunked": chunked,
        "latent": latent,
        "stateful": states,
        "handed": sum(each.attends for each in handed),
        "indexed": sum(each.what is As.INDEX for each in handed),
        "pooled": sum(each.what is As.POOLED for each in handed),
    }
    some = [f"{n} {kind}" for kind, n in kinds.items() if n or kind not in OPTIONAL]
    text = f"{', '.join(some)} layers"
    return f"{text}; {shared} more attend to rows of others" if shared else text

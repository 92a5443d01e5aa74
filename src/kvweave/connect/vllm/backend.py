"""A model that vLLM has loaded, as an engine of ours: `kvweave.run.base.Backend`.

Passes run vLLM's own modules with all positions 0, where rotary embeddings are the identity, so
that queries and keys arrive unrotated; attention is ours, over rows of our own. What comes of a
weave is written to vLLM's blocks by `paged.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from kvweave.chunk.identity import ModelFingerprint
from kvweave.connect.vllm.lockstep import Lockstep
from kvweave.connect.vllm.look import layer_info, why_not
from kvweave.errors import CannotMove, CannotRun
from kvweave.run import attention
from kvweave.run.base import Capability, LayerInfo, Work
from kvweave.run.batch import Batch, StopPass
from kvweave.run.fingerprint import fingerprint
from kvweave.run.passing import one_pass
from kvweave.run.quantised import movable, rows_as
from kvweave.run.rows import KVRows
from kvweave.store.kv import KV


class VllmBackend:
    """The model of one vLLM worker.

    ``can_run`` is false, with the reason, for what it cannot do exactly: see
    `kvweave.connect.vllm.look`. What it can run it can move.
    """

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        tokenizer: Any = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.lockstep = Lockstep() if lockstep is None else lockstep
        here = config.model_config
        self.dtype: torch.dtype = here.dtype
        self.device = next(model.parameters()).device
        self.limit, self.n_vocab = int(here.max_model_len), int(here.get_vocab_size())
        self.ends = _ends(here.hf_config)
        context = config.compilation_config.static_forward_context
        self.attentions: dict[str, Any] = {n: m for n, m in context.items() if hasattr(m, "impl")}
        self.layers: list[LayerInfo] = []
        reason = why_not(config, self.attentions)
        try:
            if reason is None:
                modules = dict(model.named_modules())
                found = [layer_info(modules, n, m) for n, m in self.attentions.items()]
                self.layers = found
        except CannotMove as error:
            reason = str(error)
        self.can_run = Capability(reason is None, reason or f"{len(self.layers)} layers")
        self.can_move = self.can_run
        mine = fingerprint(
            _Described(model, self.dtype, config.model_config.hf_config),
            tokenizer,
            here.model,
            [x.rotation for x in self.layers],
        )
        self.fingerprint: ModelFingerprint = self.lockstep.fingerprint(mine)

    @property
    def row_bytes(self) -> int:
        """Bytes one token's keys and values take in all layers."""
        return self.dtype.itemsize * sum(layer.shape.width for layer in self.layers)

    def require_run(self) -> None:
        """Raise CannotRun unless passes of this model can be run."""
        if not self.can_run:
            raise CannotRun(self.can_run.reason)

    def require_move(self) -> None:
        """Raise CannotMove unless chunks of this model can be placed anywhere."""
        self.require_run()

    def new_rows(self, codec: str = "raw", moves: bool = False) -> KVRows:
        """Return empty rows for one context; see `Backend.new_rows`."""
        if moves:
            return movable(codec, self.layers, self.dtype, self.device)
        return rows_as(codec, self.layers, self.dtype, self.device)

    def new_kv(self, n: int) -> KV:
        """Return uninitialised KV for ``n`` tokens."""
        return KV.empty([x.shape for x in self.layers], n, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run works of different contexts in one pass; see `Backend.forward`."""
        self.require_run()
        self.lockstep.require_same(works)
        shown = [self.lockstep.shared(work) for work in works]
        return one_pass(
            shown, self.limit, lambda: Batch(shown, self.layers, self.device), self._call
        )

    def _call(self, batch: Batch) -> Tensor:
        ids = batch.ids[0]
        try:
            with (
                self._ours(),
                set_forward_context(None, self.config, num_tokens=len(ids), skip_compiled=True),
            ):
                hidden = self.model(input_ids=ids, positions=torch.zeros_like(ids))
                if not len(batch.want):
                    return torch.empty(0, self.n_vocab, dtype=self.dtype, device=self.device)
                logits: Tensor = self.model.compute_logits(hidden[batch.want])  # type: ignore[operator]
                return logits[:, : self.n_vocab]
        except StopPass:
            return torch.empty(0, self.n_vocab, dtype=self.dtype, device=self.device)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Have the layers' attention be ours; vLLM's own is back afterwards."""
        for i, module in enumerate(self.attentions.values()):
            module.forward = _Attend(i, module)
        try:
            yield
        finally:
            for module in self.attentions.values():
                del module.forward


class _Attend:
    """Stands in for the forward of one attention layer during a pass of ours."""

    def __init__(self, index: int, module: Any) -> None:
        self.index = index
        self.heads, self.kv_heads, self.dim = (
            module.num_heads,
            module.num_kv_heads,
            module.head_size,
        )
        self.v_dim = module.head_size_v
        self.scale: float = module.impl.scale
        self.softcap: float | None = getattr(module.impl, "logits_soft_cap", None) or None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
    ) -> Tensor:
        n = query.shape[0]
        keys = key.view(n, self.kv_heads, self.dim)
        values = value.view(n, self.kv_heads, self.v_dim)
        attention.current.get().write(self.index, keys, values)
        asked = query.view(n, self.heads, self.dim).transpose(0, 1)[None]
        found = attention.attend(self.index, asked, self.scale, self.softcap)
        return found.reshape(n, self.heads * self.v_dim)


class _Described:
    """A model under its own class's name, with its dtype, for a fingerprint."""

    def __new__(cls, model: nn.Module, dtype: torch.dtype, config: Any) -> Any:
        made = type(type(model).__name__, (), {})()
        made.state_dict, made.dtype, made.config = model.state_dict, dtype, config
        return made


def _ends(config: Any) -> frozenset[int]:
    eos = getattr(config, "eos_token_id", None)
    return frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])

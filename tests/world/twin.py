"""What is right: transformers' own forward over the whole list of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from world.rows import Layers


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a pass gave: logits [token, vocab], and the rows of its tokens."""

    logits: Tensor
    rows: Layers

    @property
    def logprobs(self) -> Tensor:
        return self.logits.log_softmax(-1)


class Twin:
    """A model as transformers loads it, which knows no chunks."""

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation("sdpa")  # the eager one rounds to float32
        self.model = model
        self.device: torch.device = model.device
        self.window: int | None = getattr(model.config, "sliding_window", None)
        self.kinds: set[str] = set(getattr(model.config, "layer_types", None) or ())

    def full(self, tokens: Sequence[int], positions: Sequence[int]) -> Prefill:
        """Prefill all of it. Without gaps the mask is transformers' own."""
        first = positions[0]
        is_plain = list(positions) == list(range(first, first + len(positions)))
        mask = None if is_plain else self._mask(positions, positions)
        return self._run(tokens, positions, DynamicCache(), mask, 0)

    def over(
        self, rows: Layers, before: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> Prefill:
        """Run tokens behind given rows, whose positions are ``before``."""
        cache = DynamicCache()
        for layer, (k, v) in enumerate(rows if before else ()):
            n = len(before)
            cache.update(*(x[:n].transpose(0, 1)[None].to(self.device) for x in (k, v)), layer)
        mask = self._mask(positions, [*before, *positions])
        return self._run(tokens, positions, cache, mask, len(before))

    @torch.no_grad()
    def _run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        cache: DynamicCache,
        mask: Any,
        n_before: int,
    ) -> Prefill:
        logits = self.model(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            position_ids=torch.tensor([list(positions)], device=self.device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        found: list[Any] = list(cache.layers)
        rows = [
            (x.keys[0].transpose(0, 1)[n_before:], x.values[0].transpose(0, 1)[n_before:])
            for x in found
        ]
        return Prefill(logits.cpu(), [(k.cpu(), v.cpu()) for k, v in rows])

    def _mask(self, queries: Sequence[int], keys: Sequence[int]) -> Any:
        """Who sees whom, by positions: all up to one's own, of a window the last ones."""
        away = torch.tensor(list(queries))[:, None] - torch.tensor(list(keys))[None]
        seen = {"full_attention": away >= 0}
        seen["sliding_attention"] = seen["full_attention"] & (away < (self.window or 1 << 30))
        if len(self.kinds) > 1:
            return {kind: self._bias(seen[kind]) for kind in self.kinds}
        return self._bias(seen["sliding_attention"])

    def _bias(self, seen: Tensor) -> Tensor:
        lowest = torch.finfo(torch.float64).min
        bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)
        return bias[None, None].to(self.device)


def divergence(wanted: Prefill, found: Prefill, first: int = 0) -> Tensor:
    """KL [token] in nats of what ``found`` predicts to what is right, from token ``first`` on."""
    right, logprobs = wanted.logprobs[first:], found.logprobs
    right = right[: len(logprobs)]
    return (right.exp() * (right - logprobs)).sum(-1).clamp_min(0)


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest error relative to the largest value that is right."""
    found, wanted = found.cpu(), wanted.cpu()
    if not found.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max())

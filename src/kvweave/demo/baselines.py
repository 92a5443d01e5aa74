"""What the demonstration compares with: a full prefill, and plain prefix caching.

Both run the model as transformers runs it, with its own cache and attention. Prefix caching keeps
the KV of the request before, as vLLM and SGLang do for each prefix, and here token by token, while
those share whole blocks: the longest prefix both requests have is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvweave.run.model import Runner

# After a cache, transformers' attention works on the masked half of the scores too, which a pass
# without one skips: below this share of the prompt reuse would make prefix caching look slow.
WORTH_IT = 0.5


@dataclass(frozen=True, slots=True)
class GreedyReply:
    """One greedy answer and what it took; ``details`` holds what only one way knows."""

    tokens: tuple[int, ...]  # the end token included
    ttft: float  # seconds from the change of the context to the first token
    total: float  # seconds to the last token
    n_computed: int  # rows the model ran over before the first token
    details: dict[str, Any] = field(default_factory=dict)


class Plain:
    """A model with attention and cache as transformers has them, decoding greedily."""

    def __init__(self, runner: Runner, eos: Collection[int]) -> None:
        self.model, self.device, self.eos = runner.model, runner.device, frozenset(eos)
        self.model.set_attn_implementation("sdpa")

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """Run ``tokens`` after ``cache`` (None is empty); return last logits [vocab] and cache."""
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1], out.past_key_values

    def greedy(
        self, prompt: Sequence[int], n_cached: int, cache: Any, max_tokens: int
    ) -> tuple[GreedyReply, Any]:
        """Answer ``prompt``, of which ``cache`` holds the first ``n_cached`` tokens."""
        started = time.perf_counter()
        logits, cache = self.forward(prompt[n_cached:], cache)
        out = [int(logits.argmax())]
        ttft = time.perf_counter() - started
        while len(out) < max_tokens and out[-1] not in self.eos:
            logits, cache = self.forward(out[-1:], cache)
            out.append(int(logits.argmax()))
        total = time.perf_counter() - started
        return GreedyReply(tuple(out), ttft, total, len(prompt) - n_cached), cache


class FullPrefill(Plain):
    """Computes every prompt from its first token on."""

    def answer(self, prompt: Sequence[int], max_tokens: int) -> GreedyReply:
        """Return the greedy answer."""
        return self.greedy(prompt, 0, None, max_tokens)[0]


class PrefixCache(Plain):
    """Computes what stands behind the longest prefix shared with the request before."""

    def __init__(self, runner: Runner, eos: Collection[int]) -> None:
        super().__init__(runner, eos)
        self._tokens: list[int] = []  # those whose KV is in the cache
        self._cache: Any = None

    def answer(self, prompt: Sequence[int], max_tokens: int) -> GreedyReply:
        """Return the greedy answer."""
        started = time.perf_counter()
        n_cached = self.crop(prompt)
        looking = time.perf_counter() - started
        reply, self._cache = self.greedy(prompt, n_cached, self._cache, max_tokens)
        self._tokens = [*prompt, *reply.tokens[:-1]]
        details = {"exact": n_cached, "prefilled": reply.n_computed}
        return GreedyReply(
            reply.tokens, reply.ttft + looking, reply.total + looking, reply.n_computed, details
        )

    def crop(self, prompt: Sequence[int]) -> int:
        """Cut the cache to what it shares with ``prompt``; return the tokens left in it."""
        n = 0
        # the last token's logits are wanted, so at least that one is computed
        for mine, yours in zip(self._tokens, prompt[:-1], strict=False):
            if mine != yours:
                break
            n += 1
        if n < WORTH_IT * len(prompt):
            n = 0
        elif self._cache is not None:
            try:
                self._cache.crop(n - len(self._tokens))
            except ValueError:  # a sliding window has dropped rows that would be needed
                n = 0
        if n == 0:
            self._cache = None
        return n

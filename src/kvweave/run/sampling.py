"""What is asked of sampling and what came of one step; plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvweave.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop; raises InvalidArgument for what makes no sense."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # smallest set of tokens with this much probability
    top_k: int = 0  # likeliest tokens to choose from; 0: all
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int = 0  # likeliest tokens to report per step
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _refuse(self, "max_tokens", self.max_tokens < 1, "is below 1")
        wrong = not (math.isfinite(self.temperature) and self.temperature >= 0)
        _refuse(self, "temperature", wrong, "is not a number from 0 up")
        _refuse(self, "top_p", not 0 < self.top_p <= 1, "is not in (0, 1]")
        _refuse(self, "top_k", self.top_k < 0, "is below 0 (0 means all tokens)")
        wrong = self.seed is not None and not 0 <= self.seed < 2**63
        _refuse(self, "seed", wrong, "is not in 0..2**63-1")
        _refuse(self, "stop", not isinstance(self.stop, tuple), "is not a tuple of strings")
        _refuse(self, "stop", "" in self.stop, "has an empty string")
        wrong = not isinstance(self.stop_tokens, tuple)
        _refuse(self, "stop_tokens", wrong, "is not a tuple of token ids")
        _refuse(self, "logprobs", self.logprobs < 0, "is below 0")


def _refuse(sampling: Sampling, argument: str, wrong: bool, reason: str) -> None:
    if wrong:
        raise InvalidArgument(argument, f"{getattr(sampling, argument)!r} {reason}")


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token; log-probabilities are the model's own, before any filter, in nats."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first, none impossible

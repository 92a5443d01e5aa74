"""What is asked of sampling and what came of one step; plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.verbs import checked

MAX_BIASED = 4096  # tokens that a request may bias


class Follower(Protocol):
    """Where one answer stands in its grammar."""

    @property
    def fault(self) -> str:
        """Why it cannot be followed any further; empty where it can."""

    def allowed(self) -> NDArray[np.int32] | None:
        """Return which tokens may come next, 32 a word, the lowest bit first; None: all."""

    def took(self, token: int) -> None:
        """Go on by a token that was chosen."""


class Constraint(Protocol):
    """A grammar that an answer keeps to; see `kvweave.run.grammar`."""

    def begin(self) -> Follower:
        """Return the follower of one more answer."""


@checked
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
    min_p: float = 0.0  # tokens with less than this part of the likeliest one's probability go
    frequency_penalty: float = 0.0  # taken from a token's logit for each time it was written
    presence_penalty: float = 0.0  # taken once from those that were written
    repetition_penalty: float = 1.0  # divides (a negative logit: multiplies) those written or read
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits of tokens
    min_tokens: int = 0  # so many come before an end token or one of `stop_tokens`
    shown: tuple[int, ...] = ()  # special tokens that are part of the text
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _refuse(self, "max_tokens", self.max_tokens < 1, "is below 1")
        wrong = not (math.isfinite(self.temperature) and self.temperature >= 0)
        _refuse(self, "temperature", wrong, "is not a number from 0 up")
        _refuse(self, "top_p", not 0 < self.top_p <= 1, "is not in (0, 1]")
        _refuse(self, "top_k", self.top_k < 0, "is below 0 (0 means all tokens)")
        wrong = self.seed is not None and not 0 <= self.seed < 2**63
        _refuse(self, "seed", wrong, "is not in 0..2**63-1")
        _refuse(self, "stop", "" in self.stop, "has an empty string")
        _refuse(self, "logprobs", self.logprobs < 0, "is below 0")
        _refuse(self, "min_p", not 0 <= self.min_p <= 1, "is not in 0..1")
        for name in ("frequency_penalty", "presence_penalty"):
            _refuse(self, name, not -2 <= getattr(self, name) <= 2, "is not in -2..2")
        wrong = not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0)
        _refuse(self, "repetition_penalty", wrong, "is not a number above 0")
        wrong = len(self.logit_bias) > MAX_BIASED
        _refuse(self, "logit_bias", wrong, f"has more than {MAX_BIASED:,} tokens")
        wrong = not all(-100 <= bias <= 100 for bias in self.logit_bias.values())
        _refuse(self, "logit_bias", wrong, "has a bias that is not in -100..100")
        _refuse(self, "min_tokens", self.min_tokens < 0, "is below 0")
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument("min_tokens", f"{self.min_tokens} are more than max_tokens")

    def require_known(self, n_vocab: int | None) -> None:
        """Raise InvalidArgument for a biased token that there is not."""
        most = math.inf if n_vocab is None else n_vocab
        if not all(0 <= token < most for token in self.logit_bias):
            raise InvalidArgument("logit_bias", f"it names a token that is not in 0..{most - 1}")

    @property
    def shapes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1
        return bool(any(penalties) or self.logit_bias or self.min_tokens or self.constraint)


def _refuse(sampling: Sampling, argument: str, wrong: bool, reason: str) -> None:
    if wrong:
        raise InvalidArgument(argument, f"{getattr(sampling, argument)!r} {reason}")


@dataclass(frozen=True, slots=True)
class Choice:
    """One chosen token; log-probabilities are the model's own, before any filter, in nats."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first, none impossible

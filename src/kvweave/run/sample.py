"""From logits to text: choose a token, turn tokens into text, notice stop strings.

::

    logits [V] -- Sampler --> token -- Detokenizer --> complete text -- StopScanner --> output

All three are streams with a state of their own, one of each per request, so that what a request
gets never depends on what else is in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.sampling import Choice as Choice
from kvweave.run.sampling import Sampling as Sampling

BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character (yet)
_PARTIAL = 3  # the longest incomplete UTF-8 sequence, bytes
_COLD = 1e-6  # below this temperature float32 would divide by zero
_CONTEXT = 8  # tokens; enough for any character, after that broken bytes are broken for good


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return what may be drawn, likeliest first when filtered: token ids [n], probabilities [n].

    Temperature first, then top_k, then top_p of what is left. ``logits`` is [V], temperature > 0.
    """
    scaled = logits.float()
    scaled = (scaled - scaled.max()) / sampling.temperature  # never overflows: the top is 0
    n_vocab = scaled.shape[0]
    if sampling.top_k and sampling.top_k < n_vocab:
        scaled, ids = torch.topk(scaled, sampling.top_k)
    elif sampling.top_p < 1:
        scaled, ids = torch.sort(scaled, descending=True, stable=True)
    else:
        ids = torch.arange(n_vocab, device=logits.device)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        kept = before < sampling.top_p
        kept[0] = True  # a smaller top_p than float32 has still leaves the likeliest
        ids, probabilities = ids[kept], probabilities[kept]
        probabilities = probabilities / probabilities.sum()
    return ids, probabilities


class Sampler:
    """Chooses one request's tokens; with a seed, from a generator nothing else draws from."""

    def __init__(self, sampling: Sampling, device: torch.device | str = "cpu") -> None:
        self.sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.seed is not None:
            self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Choice:
        """Choose a token from ``logits`` [V].

        Equal logits go to the lower id. Raises InvalidArgument for NaN, +inf or nothing but -inf.
        """
        if logits.ndim != 1 or not logits.shape[0]:
            raise InvalidArgument("logits", f"shape {tuple(logits.shape)} is not [V]")
        logits = logits.float()
        highest = logits.max()  # NaN when any logit is
        if not torch.isfinite(highest):
            raise InvalidArgument(
                "logits",
                f"the highest is {highest.item()}",
                "the model overflowed or its KV is damaged; try float32, or check() the context",
            )
        logprobs = logits.log_softmax(-1)
        token = self._draw(logits, highest)
        return Choice(token, float(logprobs[token]), self._top(logprobs))

    def _draw(self, logits: Tensor, highest: Tensor) -> int:
        if self.sampling.temperature < _COLD:
            return int((logits == highest).nonzero()[0, 0])
        ids, probabilities = candidates(logits, self.sampling)
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(ids[drawn])

    def _top(self, logprobs: Tensor) -> tuple[tuple[int, float], ...]:
        n = min(self.sampling.logprobs, logprobs.shape[0])
        if not n:
            return ()
        values, ids = torch.topk(logprobs, n)
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        return tuple((token, logprob) for token, logprob in pairs if math.isfinite(logprob))


class StopScanner:
    """Ends a stream of text before the stop string that is complete first.

    Where two are complete at once the longer one counts, so that the output is the same however
    the text was cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.matched: str | None = None
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Return the text that is safe to emit, and whether a stop string has ended it.

        Held back is only what may be the beginning of a stop string; after a stop, everything.
        """
        if self.matched is not None:
            return "", True
        text = self._held + piece
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self.stop if stop in text
        ]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end - len(self.matched)], True
        n_held = self._n_held(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """Return what is held back, when the stream has ended by itself."""
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        longest = max(map(len, self.stop), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stop):
                return n
        return 0


class Detokenizer:
    """Turns a stream of tokens into text, whole characters only.

    ``decode`` must only ever extend its text by what a token adds (no clean-up of spaces). It is
    given the tokens of the piece before as context and never more than about 16 tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._n_context = 0  # tokens of the window whose text has been emitted
        self._n_emitted = 0  # characters of the window's text that have been emitted

    def feed(self, token: int) -> str:
        """Return the text this token completes; empty while a character's bytes are missing."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(BROKEN):
            return self._complete(text)
        if not self._decode([token]):  # a special token amid a character's bytes
            self._window.pop()
            return ""
        if len(self._window) - self._n_context <= _CONTEXT:
            return ""
        return self._give_up(text)

    def flush(self) -> str:
        """Return what is held back, broken characters included, and start afresh."""
        piece = self._decode(self._window)[self._n_emitted :] if self._window else ""
        self._window, self._n_context, self._n_emitted = [], 0, 0
        return piece

    def _complete(self, text: str) -> str:
        piece = text[self._n_emitted :]
        if not piece:
            if len(self._window) > 2 * _CONTEXT:  # a run of special tokens, which have no text
                self._window.pop()
            return ""
        self._slide(self._window[self._n_context :])
        return piece

    def _slide(self, window: list[int]) -> None:
        self._window = window
        self._n_context = len(window)
        self._n_emitted = len(self._decode(window))

    def _give_up(self, text: str) -> str:
        """Emit bytes that will never be a character, but not a possible beginning of one."""
        n_open = min(_PARTIAL, len(text) - len(text.rstrip(BROKEN)))
        piece = text[self._n_emitted : len(text) - n_open]
        self._window = self._window[-_CONTEXT:]
        self._n_context = _CONTEXT - _PARTIAL
        self._n_emitted = len(self._decode(self._window)) - n_open
        return piece


def end_tokens(generation_config: Any) -> frozenset[int]:
    """Return the tokens that end a reply, by a model's generation config; none without one."""
    found = getattr(generation_config, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else () if found is None else (found,))

"""From logits to text: choose a token, turn tokens into text, notice stop strings.

::

    logits [V] -- sample --> token -- Detokenizer --> complete text -- StopScanner --> output

A `Sampler`, a Detokenizer and a StopScanner are streams with a state of their own, one of each per
request, so that what a request gets never depends on what else is in its batch. What a batch shares
is the one copy to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.sampling import Choice as Choice
from kvweave.run.sampling import Sampling as Sampling

BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character (yet)
_PARTIAL = 3  # the longest incomplete UTF-8 sequence, bytes
_COLD = 1e-6  # below this temperature float32 would divide by zero
_PREFIX = 256  # likeliest tokens top_p looks at first: most nuclei are smaller
_GROWTH = 8  # times as many when it needs more
_CONTEXT = 8  # tokens; enough for any character, after that broken bytes are broken for good


def candidates(
    logits: Tensor, sampling: Sampling, n_sorted: int = _PREFIX
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what may be drawn, likeliest first when filtered: token ids [n], probabilities [n].

    Temperature first, then top_k, then top_p of what is left: its probabilities are 0 from where it
    cuts, and third comes how many it keeps, else None. It looks at no more than ``n_sorted`` tokens,
    where there is no top_k: it keeps 0 if that may have been too few. ``logits`` is [V],
    temperature > 0.
    """
    scaled = logits.float()
    scaled = (scaled - scaled.max()) / sampling.temperature  # never overflows: the top is 0
    n_vocab = scaled.shape[0]
    n_out = 0  # tokens that were not looked at
    if sampling.top_k and sampling.top_k < n_vocab:
        scaled, ids = torch.topk(scaled, sampling.top_k)
        probabilities = scaled.softmax(-1)
    elif sampling.top_p < 1:
        n_out = max(0, n_vocab - n_sorted)
        ids = _likeliest(scaled, n_sorted)
        probabilities = scaled.softmax(-1)[ids]
        scaled = scaled[ids]
    else:
        return torch.arange(n_vocab, device=logits.device), scaled.softmax(-1), None
    if sampling.top_p == 1:
        return ids, probabilities, None
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    kept[0] = True  # a smaller top_p than float32 has still leaves the likeliest
    n_kept = kept.sum()
    if n_out:  # a token as likely as the last may be among them, and have a lower id
        n_kept = n_kept * (kept & (scaled == scaled[-1])).any().logical_not()
    probabilities = probabilities * kept
    return ids, probabilities / probabilities.sum(), n_kept


def _likeliest(scaled: Tensor, n: int) -> Tensor:
    """Return the ids of the ``n`` highest of ``scaled`` [V], in order, the lower of equals first."""
    if n >= scaled.shape[0]:
        return scaled.sort(descending=True, stable=True).indices
    ids = scaled.topk(n, sorted=False).indices.sort().values
    return ids[scaled[ids].sort(descending=True, stable=True).indices]


class Sampler:
    """Chooses one request's tokens; with a seed, from a generator nothing else draws from."""

    def __init__(self, sampling: Sampling, device: torch.device | str = "cpu") -> None:
        self.sampling = sampling
        self._n_sorted = _PREFIX
        self._before: Tensor | None = None  # the generator's state before the last draw
        self._generator: torch.Generator | None = None
        if sampling.seed is not None:
            self._generator = torch.Generator(device).manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token."""
        return self.sampling.temperature < _COLD

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw from ``logits`` [V]: a token [], and what `keep` is to be told, if anything.

        Both stay on the device.
        """
        ids, probabilities, n_kept = candidates(logits, self.sampling, self._n_sorted)
        if n_kept is not None and self._generator is not None:
            self._before = self._generator.get_state()
        drawn = (probabilities / self._noise(probabilities)).argmax(-1)
        return ids.take(drawn), n_kept  # indexing by a tensor [] would wait for it

    def keep(self, n_kept: int) -> bool:
        """Return whether the last draw stands: it does unless top_p looked at too few tokens.

        Leaves the generator where noise for the ``n_kept`` tokens of top_p leaves it, so that what
        a seed gives does not depend on how many were looked at.
        """
        if self._generator is not None and self._before is not None:
            self._generator.set_state(self._before)
            if n_kept:
                self._noise(torch.empty(n_kept, device=self._generator.device))
        if not n_kept:
            self._n_sorted *= _GROWTH
        return n_kept > 0

    def _noise(self, like: Tensor) -> Tensor:
        """Return noise by which the highest of probabilities / noise is a draw: as
        torch.multinomial does it, which waits for the device."""
        noise = torch.empty_like(like).exponential_(generator=self._generator)
        return noise.clamp_min_(torch.finfo(noise.dtype).tiny)  # 0 / 0 would be drawn


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception]:
    """Choose a token from each row of ``logits`` [row, V], with one copy to the host for all.

    Equal logits go to the lower id. A row of NaN, +inf or nothing but -inf is InvalidArgument. A
    top_p that keeps very many tokens may take another copy.
    """
    if logits.ndim != 2 or not logits.shape[1]:
        raise InvalidArgument("logits", f"shape {tuple(logits.shape)} is not [row, V]")
    logits = logits.float()
    highest, tokens = logits.max(-1)  # NaN when any logit is; the first of equals
    n_kept: dict[int, Tensor] = {}
    for row, sampler in enumerate(samplers):
        if not sampler.greedy:
            tokens[row], kept = sampler.draw(logits[row])
            n_kept |= {} if kept is None else {row: kept}
    logprobs = logits.log_softmax(-1)
    found = _Found(highest, tokens, logprobs, n_kept, [s.sampling.logprobs for s in samplers])
    choices: list[Choice | Exception] = []
    again = []
    for row, sampler in enumerate(samplers):
        choices.append(found.choice(row))
        finite = isinstance(choices[row], Choice)
        if finite and row in n_kept and not sampler.keep(found.n_kept[row]):
            again.append(row)
    if again:
        rest = sample(logits[again], [samplers[row] for row in again])
        for row, choice in zip(again, rest, strict=True):
            choices[row] = choice
    return choices


class _Found:
    """What was computed for the rows of one step, copied to the host as one run of 32-bit words.

    ::

        tokens [row] | highest [row] | logprob [row] | n_kept [some] | ids [k], logprobs [k] of a row, ...
    """

    def __init__(
        self,
        highest: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        n_kept: Mapping[int, Tensor],
        n_top: Sequence[int],
    ) -> None:
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        parts = [tokens.int(), highest.view(torch.int32), chosen.view(torch.int32)]
        parts += [kept.int()[None] for kept in n_kept.values()]
        sizes = [min(k, logprobs.shape[1]) for k in n_top]
        for row, k in enumerate(sizes):
            if k:
                best = logprobs[row].topk(k)
                parts += [best.indices.int(), best.values.view(torch.int32)]
        words = torch.cat(parts).cpu().numpy()
        floats, n, at = words.view(np.float32), len(tokens), 3 * len(tokens) + len(n_kept)
        self.tokens: list[int] = words[:n].tolist()
        self.highest: list[float] = floats[n : 2 * n].tolist()
        self.logprobs: list[float] = floats[2 * n : 3 * n].tolist()
        self.n_kept: dict[int, int] = dict(zip(n_kept, words[3 * n : at].tolist(), strict=True))
        self.top: list[list[tuple[int, float]]] = []
        for k in sizes:
            ids, values = words[at : at + k].tolist(), floats[at + k : at + 2 * k].tolist()
            self.top.append(list(zip(ids, values, strict=True)))
            at += 2 * k

    def choice(self, row: int) -> Choice | Exception:
        """Return the row's choice, or what is wrong with its logits."""
        highest = self.highest[row]
        if not math.isfinite(highest):
            return InvalidArgument(
                "logits",
                f"the highest is {highest}",
                "the model overflowed or its KV is damaged; try float32, or check() the context",
            )
        top = tuple((token, logprob) for token, logprob in self.top[row] if math.isfinite(logprob))
        return Choice(self.tokens[row], self.logprobs[row], top)


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

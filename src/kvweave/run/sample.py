"""From logits to text: choose a token, turn tokens into text, notice stop strings.

::

    logits [V] -- sample --> token -- Detokenizer --> complete text -- StopScanner --> output

A Sampler (`run/draw.py`), a Detokenizer and a StopScanner are streams with a state of their own,
one of each per request, so that what a request gets never depends on what else is in its batch.
What a batch shares is the launches and the one copy to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.draw import Manner, draw
from kvweave.run.draw import Sampler as Sampler
from kvweave.run.sampling import Choice as Choice
from kvweave.run.sampling import Sampling as Sampling
from kvweave.run.shape import shape

BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character (yet)
_PARTIAL = 3  # the longest incomplete UTF-8 sequence, bytes
_CONTEXT = 8  # tokens; enough for any character, after that broken bytes are broken for good


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception]:
    """Choose a token from each row of ``logits`` [row, V], with one copy to the host for all.

    Equal logits go to the lower id. A row of NaN, +inf or nothing but -inf is InvalidArgument. A
    top_p that keeps very many tokens may take another copy.
    """
    if logits.ndim != 2 or not logits.shape[1]:
        raise InvalidArgument("logits", f"shape {tuple(logits.shape)} is not [row, V]")
    order = _by_kind(samplers)
    if order != sorted(order):  # of rows, not by index: that would have to go up
        logits = torch.stack([logits[row] for row in order])
    found = _sample(logits.float(), [samplers[row] for row in order])
    by_row = dict(zip(order, found, strict=True))
    return [by_row[row] for row in range(len(samplers))]


def _by_kind(samplers: Sequence[Sampler]) -> list[int]:
    """Return the rows such that those follow each other that are drawn together."""
    first: dict[Manner | None, int] = {}
    places = [first.setdefault(_kind(s), row) for row, s in enumerate(samplers)]
    return sorted(range(len(samplers)), key=places.__getitem__)


def _kind(sampler: Sampler) -> Manner | None:
    return None if sampler.greedy else sampler.kind


def _sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception]:
    """Choose for rows that stand by kind."""
    highest, tokens = logits.max(-1)  # NaN when any logit is; the first of equals
    own = logits
    if any(sampler.shaping is not None for sampler in samplers):
        logits = shape(own, [sampler.shaping for sampler in samplers])
        left, tokens = logits.max(-1)
        highest = torch.where(highest.isfinite(), left, highest)
    n_kept: list[tuple[range, Tensor]] = []
    stop = 0
    for kind, alike in groupby(samplers, _kind):
        mine = list(alike)
        start, stop = stop, stop + len(mine)
        if kind is not None:
            tokens[start:stop], kept = draw(logits[start:stop], mine)
            n_kept += [] if kept is None else [(range(start, stop), kept)]
    logprobs = own.log_softmax(-1)
    found = _Found(highest, tokens, logprobs, n_kept, [s.sampling.logprobs for s in samplers])
    choices = [found.choice(row) for row in range(len(samplers))]
    again = [
        row
        for row, n in found.n_kept.items()
        if isinstance(choices[row], Choice) and not samplers[row].keep(n)
    ]
    for row, choice in enumerate(choices):
        shaping = samplers[row].shaping
        if shaping is not None and isinstance(choice, Choice) and row not in again:
            shaping.took(choice.token)
            choices[row] = shaping.fault or choice
    if again:
        rest = sample(torch.stack([own[i] for i in again]), [samplers[i] for i in again])
        for row, choice in zip(again, rest, strict=True):
            choices[row] = choice
    return choices


class _Found:
    """What was computed for the rows of one step, copied to the host as one run of 32-bit words.

    ::

        tokens [row] | highest [row] | logprob [row] | n_kept [some] | ids [row, k] | logprobs [row, k] ...
    """

    def __init__(
        self,
        highest: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        n_kept: Sequence[tuple[range, Tensor]],
        n_top: Sequence[int],
    ) -> None:
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        parts = [tokens.int(), highest.view(torch.int32), chosen.view(torch.int32)]
        parts += [kept.int() for _, kept in n_kept]
        sizes = [min(k, logprobs.shape[1]) for k in n_top]
        asked = sorted({*sizes} - {0})
        for k in asked:
            best = logprobs.topk(k)
            parts += [best.indices.int().flatten(), best.values.view(torch.int32).flatten()]
        words = torch.cat(parts).cpu().numpy()
        floats, n = words.view(np.float32), len(tokens)
        self.tokens: list[int] = words[:n].tolist()
        self.highest: list[float] = floats[n : 2 * n].tolist()
        self.logprobs: list[float] = floats[2 * n : 3 * n].tolist()
        drawn, at = [row for rows, _ in n_kept for row in rows], 3 * n
        self.n_kept = dict(zip(drawn, words[at : at + len(drawn)].tolist(), strict=True))
        at += len(drawn)
        self.top: list[list[tuple[int, float]]] = [[] for _ in sizes]
        for k in asked:
            ids, values = words[at : at + n * k], floats[at + n * k : at + 2 * n * k]
            for row in (row for row, size in enumerate(sizes) if size == k):
                mine = slice(row * k, row * k + k)
                self.top[row] = list(zip(ids[mine].tolist(), values[mine].tolist(), strict=True))
            at += 2 * n * k

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


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of tokens, without special ones and as it was spaced."""
    made = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(made)


def decoder(tokenizer: Any, shown: Iterable[int] = ()) -> Callable[[list[int]], str]:
    """Return what makes text of tokens, as `text_of`, but with these special ones."""
    seen = frozenset(shown)
    if not seen:
        return partial(text_of, tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    hidden = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)} - seen

    def decode(ids: list[int]) -> str:
        left = [id for id in ids if id not in hidden]
        return str(tokenizer.decode(left, clean_up_tokenization_spaces=False))

    return decode


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

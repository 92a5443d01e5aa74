"""Draws from rows of logits: those that ask for the same are drawn together.

What a row gets does not depend on who is drawn with it: every operation is by row, and a request
with a seed has a generator that nothing else draws from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.sampling import Sampling
from kvweave.run.shape import Shaping

_COLD = 1e-6  # below this temperature float32 would divide by zero
_PREFIX = 256  # likeliest tokens top_p looks at first: most nuclei are smaller
_GROWTH = 8  # times as many when it needs more

Manner = tuple[float, int, float, float, int]


class Sampler:
    """How one request's tokens are chosen, and what is left of its seed."""

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device | str = "cpu",
        ends: Iterable[int] = (),
        prompt: Ints | None = None,
        n_vocab: int | None = None,
    ) -> None:
        """``ends`` are the tokens that end an answer, ``prompt`` what is read before it. Raises
        InvalidArgument for a bias of a token that is not below ``n_vocab``."""
        self.sampling = sampling
        self.shaping = Shaping(sampling, ends, prompt, n_vocab) if sampling.shapes else None
        self._n_sorted = _PREFIX
        self._before: Tensor | None = None  # the generator's state before the last draw
        self._generator: torch.Generator | None = None
        if sampling.seed is not None:
            self._generator = torch.Generator(device).manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token."""
        return self.sampling.temperature < _COLD

    @property
    def kind(self) -> Manner:
        """What has to be equal for rows to be drawn together."""
        asked = self.sampling
        return asked.temperature, asked.top_k, asked.top_p, asked.min_p, self._n_sorted

    @property
    def seeded(self) -> bool:
        """Whether it has a generator of its own."""
        return self._generator is not None

    def noise(self, out: Tensor, again: bool) -> None:
        """Fill ``out`` with noise by which the highest of probabilities / noise is a draw: as
        torch.multinomial does it, which waits for the device. ``again``: `keep` will be called."""
        if again and self._generator is not None:
            self._before = self._generator.get_state()
        out.exponential_(generator=self._generator)

    def keep(self, n_kept: int) -> bool:
        """Return whether the last draw stands: it does unless top_p looked at too few tokens.

        Leaves the generator where noise for the ``n_kept`` tokens of top_p leaves it, so that what
        a seed gives does not depend on how many were looked at.
        """
        if self._generator is not None and self._before is not None:
            self._generator.set_state(self._before)
            if n_kept:
                self.noise(torch.empty(n_kept, device=self._generator.device), False)
        if not n_kept:
            self._n_sorted *= _GROWTH
        return n_kept > 0


def draw(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[Tensor, Tensor | None]:
    """Draw from ``logits`` [row, V] for samplers of one kind: tokens [row], and [row] what
    `Sampler.keep` is to be told, if anything. Both stay on the device."""
    *_, n_sorted = samplers[0].kind
    ids, probabilities, n_kept = candidates(logits, samplers[0].sampling, n_sorted)
    noise = torch.empty_like(probabilities)
    if any(sampler.seeded for sampler in samplers):
        for sampler, out in zip(samplers, noise, strict=True):
            sampler.noise(out, n_kept is not None)
    else:
        noise.exponential_()
    noise.clamp_min_(torch.finfo(noise.dtype).tiny)  # 0 / 0 would be drawn
    drawn = (probabilities / noise).argmax(-1, keepdim=True)
    return ids.gather(-1, drawn)[:, 0], n_kept


def candidates(
    logits: Tensor, sampling: Sampling, n_sorted: int = _PREFIX
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what may be drawn from each row, likeliest first when filtered: token ids [row, n] and
    probabilities [row, n].

    Temperature first, then top_k, then top_p of what is left, then min_p: probabilities are 0 from
    where these cut, and third comes how many top_p keeps [row], else None. It looks at no more than ``n_sorted``
    tokens, where there is no top_k: it keeps 0 if that may have been too few. ``logits`` is
    [row, V], temperature > 0.
    """
    scaled = logits.float()
    # never overflows: the top is 0
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    n_vocab = scaled.shape[1]
    n_out = 0  # tokens that were not looked at
    if sampling.top_k and sampling.top_k < n_vocab:
        scaled, ids = torch.topk(scaled, sampling.top_k)
        probabilities = scaled.softmax(-1)
    elif sampling.top_p < 1:
        n_out = max(0, n_vocab - n_sorted)
        ids = _likeliest(scaled, n_sorted)
        probabilities = scaled.softmax(-1).gather(-1, ids)
        scaled = scaled.gather(-1, ids)
    else:
        every = torch.arange(n_vocab, device=logits.device)
        return every.expand_as(scaled), _likely(scaled.softmax(-1), sampling.min_p), None
    if sampling.top_p == 1:
        return ids, _likely(probabilities, sampling.min_p), None
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    kept[:, 0] = True  # a smaller top_p than float32 has still leaves the likeliest
    n_kept = kept.sum(-1)
    if n_out:  # a token as likely as the last may be among them, and have a lower id
        n_kept = n_kept * (kept & (scaled == scaled[:, -1:])).any(-1).logical_not()
    probabilities = probabilities * kept
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return ids, _likely(probabilities, sampling.min_p), n_kept


def _likely(probabilities: Tensor, min_p: float) -> Tensor:
    """Return probabilities [row, n] of those that have ``min_p`` times the highest one."""
    if not min_p:
        return probabilities
    highest = probabilities.amax(-1, keepdim=True)
    probabilities = probabilities * (probabilities >= min_p * highest)
    return probabilities / probabilities.sum(-1, keepdim=True)


def _likeliest(scaled: Tensor, n: int) -> Tensor:
    """Return the ids of the ``n`` highest of each row [V], in order, the lower of equals first."""
    if n >= scaled.shape[1]:
        return scaled.sort(descending=True, stable=True).indices
    ids = scaled.topk(n, sorted=False).indices.sort().values
    order = scaled.gather(-1, ids).sort(descending=True, stable=True).indices
    return ids.gather(-1, order)

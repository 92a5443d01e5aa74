"""Changes logits before a token is chosen: penalties, biases, what may not come yet, a grammar.

::

    logits [row, V] -> (repetition) - frequency, presence + bias -> not before min_tokens -> grammar

What changes is a few tokens of a row, and all of a batch goes up in one copy. Rows that ask for
nothing of it are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints
from kvweave.run.sampling import Sampling
from kvweave.run.upload import up


class Shaping:
    """What one request changes, and what of it depends on the tokens that came."""

    def __init__(
        self,
        sampling: Sampling,
        ends: Iterable[int] = (),
        prompt: Ints | None = None,
        n_vocab: int | None = None,
    ) -> None:
        """See `Sampler`. Raises InvalidArgument for a biased token that there is not."""
        sampling.require_known(n_vocab)
        self.sampling = sampling
        self.follower = None if sampling.constraint is None else sampling.constraint.begin()
        self.n = 0
        read = np.unique(prompt) if prompt is not None and sampling.repetition_penalty != 1 else ()
        late = {*ends, *sampling.stop_tokens} if sampling.min_tokens else set()
        known = dict.fromkeys([*map(int, read), *sampling.logit_bias, *sorted(late)])
        self._at = {token: i for i, token in enumerate(known)}
        room = max(64, 2 * len(known))
        self._tokens = np.zeros(room, np.int32)
        self._tokens[: len(known)] = list(known)
        self._counts, self._bias = np.zeros(room, np.float32), np.zeros(room, np.float32)
        self._read = np.zeros(room, bool)
        self._read[: len(read)] = True
        for token, bias in sampling.logit_bias.items():
            self._bias[self._at[token]] = bias
        self._late = np.array([self._at[token] for token in sorted(late)], np.int64)

    @property
    def fault(self) -> InvalidArgument | None:
        """What ends the answer: its grammar cannot be followed any further."""
        why = "" if self.follower is None else self.follower.fault
        return InvalidArgument("grammar", why, "take a simpler one") if why else None

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens came."""
        asked = self.sampling
        return bool(asked.frequency_penalty or asked.presence_penalty) or (
            asked.repetition_penalty != 1
        )

    def took(self, token: int) -> None:
        """Take in a token that was chosen."""
        self.n += 1
        if self.follower is not None:
            self.follower.took(token)
        if not self.counts:
            return
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = len(self._at)
            if at == len(self._tokens):
                self._grow()
            self._tokens[at] = token
        self._counts[at] += 1

    def changes(
        self, words: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Return tokens, what divides their logits, and what is taken from them then.

        ``words``: what the grammar allows; where that is only what may not come yet, it may.
        """
        n, asked = len(self._at), self.sampling
        tokens, counts = self._tokens[:n], self._counts[:n]
        came = counts > 0
        repeated = np.where(came | self._read[:n], asked.repetition_penalty, 1.0)
        taken = asked.frequency_penalty * counts + asked.presence_penalty * came - self._bias[:n]
        if self.n < asked.min_tokens and not self._only_late(words):
            taken[self._late] = np.inf
        return tokens, repeated.astype(np.float32), taken.astype(np.float32)

    def _only_late(self, words: NDArray[np.int32] | None) -> bool:
        if words is None:
            return False
        left = words.view(np.uint32).copy()
        for token in self._tokens[self._late]:
            left[token // 32] &= ~np.uint32(1 << (token % 32))
        return not left.any()

    def _grow(self) -> None:
        for name in ("_tokens", "_counts", "_bias", "_read"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))


def shape(logits: Tensor, shapings: Sequence[Shaping | None]) -> Tensor:
    """Return ``logits`` [row, V] as these want them; None leaves a row as it is."""
    n_vocab = logits.shape[1]
    asking = [(row, shaping) for row, shaping in enumerate(shapings) if shaping is not None]
    masks = [None if s.follower is None else s.follower.allowed() for _, s in asking]
    changes = [(row, *s.changes(words)) for (row, s), words in zip(asking, masks, strict=True)]
    bound = [
        (row, words) for (row, _), words in zip(asking, masks, strict=True) if words is not None
    ]
    places = [tokens.astype(np.int64) + row * n_vocab for row, tokens, _, _ in changes]
    host = np.concatenate([*places, np.array([row for row, _ in bound], np.int64)])
    n, n_host = sum(map(len, places)), len(host)
    if not n_host:
        return logits
    floats = [factor for *_, factor, _ in changes] + [less for *_, less in changes]
    words = [words.view(np.int32) for _, words in bound]
    packed = [host.view(np.int32), *(each.view(np.int32) for each in floats), *words]
    there = up(np.concatenate(packed), logits.device)
    index, rest = there[: 2 * n_host].view(torch.int64), there[2 * n_host :]
    shaped = logits.clone()
    if n:
        factors, less = rest[: 2 * n].view(torch.float32).view(2, n)
        flat = shaped.view(-1)
        was = flat[index[:n]]
        flat[index[:n]] = torch.where(was < 0, was * factors, was / factors) - less
    if bound:
        rows = index[n:]
        shaped[rows] = _only(shaped[rows], rest[2 * n :].view(len(bound), -1))
    return shaped


def _only(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits [row, V] that are -inf where ``bits`` [row, words] has no bit."""
    each = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> each) & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, -torch.inf)

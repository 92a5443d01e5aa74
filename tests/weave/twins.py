"""A prompt and a reply under a token policy, driven by hand: one token at a time, on the reference engine
in plain torch: no packing, no pieces, statistics as whole attention matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from reference import DenseRows
from run.backend import Recorder, reference

from kvweave.run.base import Ints, Work

EVERY, N_NEW = 8, 45


class Twin:
    """A prompt and a greedy reply on the reference engine, with a choice behind the prompt and then
    behind every `EVERY` decoded rows."""

    def __init__(self, name: str, moves: bool) -> None:
        self.model = reference(name)
        self.rows = DenseRows(self.model.layers, moves)
        self.logits = torch.empty(0)
        self.said: list[int] = []
        self.total: list[torch.Tensor] = []  # [layer] attention [kv head, slot] over all rows

    def run(self, tokens: Ints) -> None:
        self.said += tokens.tolist()
        seen = self._ran(tokens)
        n = self.rows.n
        heads = self.model.sizes.kv_heads
        found = [
            seen.shown(layer, n)[1].sum(1).view(heads, -1, n).mean(1)
            for layer in range(len(self.model.layers))
        ]
        old = self.total or [f[:, :0] for f in found]
        self.total = [
            torch.nn.functional.pad(a, (0, b.shape[1] - a.shape[1])) + b
            for a, b in zip(old, found, strict=True)
        ]

    def read_again(self, start: int) -> list[torch.Tensor]:
        """Return, by layer, the weights [kv head, group, row, slot] of the tokens from slot ``start`` on
        that are read behind the rows, and of up to 8 before them; the rows are as before."""
        n, logits, heads = self.rows.n, self.logits, self.model.sizes.kv_heads
        tokens = np.array(self.said[max(0, start - 8) :])
        seen = self._ran(tokens)
        self.rows.truncate(n)
        self.logits = logits
        weights = [seen.shown(i, n + len(tokens))[1] for i in range(len(self.model.layers))]
        return [w.view(heads, -1, *w.shape[1:]) for w in weights]

    def _ran(self, tokens: Ints) -> Recorder:
        n = self.rows.n
        self.rows.reserve(n + len(tokens))
        slots = np.arange(n, n + len(tokens))
        where = slots - n + (int(self.rows.positions[n - 1]) + 1 if n else 0)
        seen, want = Recorder(), np.array([len(tokens) - 1])
        (logits,) = self.model.forward([Work(self.rows, tokens, slots, where, want, observer=seen)])
        self.logits = logits[-1]
        return seen

    def reply(self, prompt: Ints, choose: Callable[[Twin], None]) -> list[int]:
        self.run(prompt)
        choose(self)
        out = [int(self.logits.argmax())]
        for i in range(1, N_NEW):
            self.run(np.array(out[-1:]))
            if i % EVERY == 0:
                choose(self)
            out.append(int(self.logits.argmax()))
        return out

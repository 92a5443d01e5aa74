"""Heads that carry a value from one statement to another, set from what the layers below hold.

"from Anna's river same Omar's river also ." needs three steps, and gradient descent found none of them
in 1,600 steps (docs/LOG.md). So the deepened model begins with them, in layers between the first
two, where words are still legible:

    layer 1    "Anna's river|" finds the row behind an earlier "Anna's river" and takes its word
    layer 2    "also|" takes from four rows back what that one found
    layer 3    as layer 1, for a question about "Omar's river": it finds "also" and takes the value

Readouts (what word stands here, one before, two before) are ridge regressions over documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvweave.demo.vocabulary import ATTRIBUTES, VALUES

SLOW = 12  # rotary pairs of slow rotation: they compare at any distance
BACK, FAST = 4, 7  # rows from "also" to what it repeats; rotary pairs that find a distance
SHARP = 2.5  # query and key norms

Document = Sequence[int]


class Relay:
    """Sets the heads of a model's new layers, one layer after the other."""

    def __init__(
        self, model: Any, documents: Sequence[Document], word: dict[str, int], ends: set[int]
    ) -> None:
        self.model, self.documents = model, documents
        self.name, self.ends = {i: w for w, i in word.items()}, ends | {word["same"]}
        self.embed = model.model.embed_tokens.weight
        self.ids = torch.cat([torch.tensor(d) for d in documents])
        self.mean = self.embed[torch.tensor(list(word.values()))].mean(0)
        config = model.config
        self.dim, self.half, self.width = config.head_dim, config.head_dim // 2, config.hidden_size
        self.theta = config.rope_parameters["rope_theta"]
        self.generator = torch.Generator().manual_seed(5)
        random = torch.randn(self.width, self.width, generator=self.generator)
        self.basis = torch.linalg.qr(random)[0]
        self.found, self.repeated = self._values(word)

    def set(self) -> None:
        """Set the layers 1, 2 and 3."""
        self._match(1, lambda x: ridge(x, self.embed[self.ids]))
        self._repeat(2)
        self._match(3, lambda x: self._read(x, self.repeated))

    def _values(self, word: dict[str, int]) -> tuple[Tensor, Tensor]:
        """What should be known where: [row, hidden], the value's embedding or 0."""
        found, repeated = [], []
        for document in self.documents:
            words = [self.name.get(i, "") for i in document]
            facts: dict[tuple[str, str], str] = {}
            here, again = torch.zeros(2, len(words), self.width)
            for i in range(2, len(words)):
                if words[i] in VALUES and words[i - 1] in ATTRIBUTES:
                    facts[words[i - 2], words[i - 1]] = words[i]
                value = facts.get((words[i - 1], words[i]))
                if value is not None:
                    here[i] = self.embed[word[value]]
                value = facts.get((words[i - 5], words[i - 4])) if i > 5 else None
                if words[i] == "also" and value is not None:
                    again[i] = self.embed[word[value]]
            found.append(here)
            repeated.append(again)
        return torch.cat(found), torch.cat(repeated)

    def _input(self, layer: int) -> Tensor:
        """A new layer's normalised input [row, hidden]."""
        found = []
        for document in self.documents:
            states = self.model.model(torch.tensor([document]), output_hidden_states=True)
            x = states.hidden_states[layer][0]
            found.append(x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt())
        return torch.cat(found)

    def _read(self, x: Tensor, target: Tensor) -> Tensor:
        there = target.abs().sum(1) > 0
        return ridge(x, target, torch.where(there, 8.0, 1.0))

    def _match(self, layer: int, value: Callable[[Tensor], Tensor]) -> None:
        """Heads that compare (before, here) with (two before, before) and copy `value`."""
        x = self._input(layer)
        here, before, two = (ridge(x, self.embed[torch.roll(self.ids, n)]) for n in (0, 1, 2))
        any_row = ridge(x, torch.ones(len(x), 1))[0]
        bad = torch.tensor([float(int(i) in self.ends) for i in self.ids])[:, None]
        avoid = ridge(x, bad, torch.where(bad[:, 0] > 0, 8.0, 1.0))[0]
        here_, before_, two_ = (w - self.mean[:, None] * any_row for w in (here, before, two))
        heads, copied = self.model.model.layers[layer].self_attn, value(x)
        slow = torch.arange(self.half - SLOW, self.half)
        for kv in range(self.model.config.num_key_value_heads):
            one, other = torch.randn(2, SLOW, self.width, generator=self.generator)
            key, query = kv * self.dim, 2 * kv * self.dim
            heads.k_proj.weight[key + slow] = one @ two_
            heads.k_proj.weight[key + self.half + slow] = other @ before_
            heads.k_proj.weight[key + self.half - SLOW - 1] = 3 * avoid
            heads.q_proj.weight[query + slow] = one @ before_
            heads.q_proj.weight[query + self.half + slow] = other @ here_
            heads.q_proj.weight[query + self.half - SLOW - 1] = -2 * any_row
            self._copy(heads, kv, copied)

    def _repeat(self, layer: int) -> None:
        """Heads that attend `BACK` rows back and copy the value found there."""
        x = self._input(layer)
        any_row, value = ridge(x, torch.ones(len(x), 1))[0], self._read(x, self.found)
        phase = BACK * self.theta ** (-torch.arange(FAST) / self.half)
        heads = self.model.model.layers[layer].self_attn
        for kv in range(self.model.config.num_key_value_heads):
            key, query = kv * self.dim, 2 * kv * self.dim
            heads.k_proj.weight[key : key + FAST] = 0.5 * any_row
            heads.q_proj.weight[query : query + FAST] = 0.5 * torch.cos(phase)[:, None] * any_row
            at = query + self.half
            heads.q_proj.weight[at : at + FAST] = -0.5 * torch.sin(phase)[:, None] * any_row
            self._copy(heads, kv, value)

    def _copy(self, heads: Any, kv: int, value: Tensor) -> None:
        """Let the first head of a group copy its third of `value`."""
        part = self.basis[kv * self.dim : (kv + 1) * self.dim]
        heads.v_proj.weight[kv * self.dim : (kv + 1) * self.dim] = part @ value
        at = 2 * kv * self.dim
        heads.o_proj.weight[:, at : at + self.dim] = part.T
        heads.q_norm.weight.fill_(SHARP)
        heads.k_norm.weight.fill_(SHARP)


def ridge(x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """The linear map [out, in] from rows `x` to rows `target`, by weighted ridge regression."""
    weight = torch.ones(len(x)) if weight is None else weight
    gram = (weight[:, None] * x).T @ x
    gram += 0.003 * gram.trace() / len(gram) * torch.eye(len(gram))
    return torch.linalg.solve(gram, (weight[:, None] * x).T @ target).T

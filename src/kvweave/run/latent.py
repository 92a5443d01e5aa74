"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): rows that all heads share.

A layer keeps two things of a token: a latent, the same wherever it stands, and a short part that
turns with its position. Each head makes its own key and value of them by two matrices. Here the
part that turns is the row's key and the latent its value, so that rows of such layers are stored,
moved, coded and placed like any others.

Few rows attend *absorbed*: a query meets latents through its head's matrix, and what it reads is a
mix of latents, so that nothing is expanded. Many rows expand the latents they see once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MANY = 256  # rows that attend expanded whatever it costs: their scores would take much memory


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """What heads make of a row: learned by `run/probe.py`, never read from a model's code."""

    dims: Tensor  # [rope + plain] dims of a query: those that meet a row's key, then the others
    keys: Tensor  # [head, rank, plain] what a latent is to the others
    values: Tensor  # [head, rank, v_dim]
    bias: Tensor | None  # [head, v_dim] that every value has besides
    _wide: list[Tensor] = field(default_factory=list, repr=False)  # keys and values in float32

    @property
    def pays(self) -> int:
        """Rows from which on it is less work to expand latents than to attend to them."""
        rank, plain = self.keys.shape[1:]
        wide = plain + self.values.shape[2]
        saved = 2 * rank - wide
        return MANY if saved <= 0 else min(MANY, rank * wide // saved + 1)

    def sorted(self, query: Tensor) -> Tensor:
        """Return unrotated ``query`` [row, head, dim], its dims those that meet keys first."""
        return query[..., self.dims]

    def wide(self, rows: Tensor) -> Tensor:
        """Return ``rows`` in float32 at least. What is between a query and latents has no place in the
        model: rounded to half precision it would be as far off again as the model is."""
        return rows if rows.dtype == torch.float64 else rows.float()

    def _matrices(self) -> list[Tensor]:
        if not self._wide:
            self._wide.extend((self.wide(self.keys), self.wide(self.values)))
        return self._wide

    def absorbed(self, query: Tensor) -> Tensor:
        """Return `sorted` ``query`` [row, head, rope + rank] as it meets keys and latents, `wide`."""
        plain, query = self.keys.shape[2], self.wide(query)
        met = query[..., -plain:].transpose(0, 1) @ self._matrices()[0].transpose(1, 2)
        return torch.cat((query[..., :-plain], met.transpose(0, 1)), -1)

    def read(self, mixed: Tensor) -> Tensor:
        """Return [row, head, v_dim] of mixed latents [row, head, rank], `wide`."""
        out = (mixed.transpose(0, 1) @ self._matrices()[1]).transpose(0, 1)
        return out if self.bias is None else out + self.bias

    def expanded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [head, slot, rope + plain] and values [head, slot, v_dim] of each head, of
        rows' keys [1, slot, rope] and latents [1, slot, rank]."""
        every = keys.expand(len(self.keys), -1, -1)
        heads = values @ self.values
        if self.bias is not None:
            heads = heads + self.bias[:, None]
        return torch.cat((every, values @ self.keys), -1), heads

"""What counts as read: from attention by row to attention by page, and to sets of pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidArgument, nearest

KINDS = ("cover", "top", "over")


@dataclass(frozen=True, slots=True)
class Rule:
    """Pages that a head reads in a step: the fewest that hold ``amount`` of its mass (``cover``), the
    ``amount`` with most (``top``), or those with more than ``amount`` (``over``)."""

    kind: str = "cover"
    amount: float = 0.95

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = nearest(self.kind, list(KINDS), 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(KINDS)}"
            raise InvalidArgument("rule", f"no rule {self.kind!r}", hint)
        whole = self.kind != "top" or (self.amount >= 1 and self.amount == int(self.amount))
        if not whole or not 0 < self.amount or (self.kind != "top" and self.amount > 1):
            raise InvalidArgument(
                "rule",
                f"{self.kind}:{self.amount:g} is no share or number",
                "give top a number of pages from 1 up, cover and over a share up to 1",
            )

    @staticmethod
    def parse(text: str) -> Rule:
        """Read ``cover:0.95``, ``top:8``, ``over:0.01``. Raises InvalidArgument."""
        kind, _, amount = text.partition(":")
        try:
            return Rule(kind, float(amount)) if amount else Rule(kind)
        except ValueError:
            raise InvalidArgument("rule", f"{amount!r} is no number", "cover:0.95") from None

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}"

    def read(self, mass: Tensor) -> Tensor:
        """Return bool [..., page] of ``mass`` [..., page]. Of equal pages the first is read first;
        a page without mass is not."""
        there = mass > 0
        if self.kind == "over":
            return mass > self.amount
        if self.kind == "cover" and mass.is_cpu and mass.numel():
            found = self._covered(mass)
            if found is not None:
                return found & there
        best, order = mass.sort(dim=-1, descending=True, stable=True)
        if self.kind == "top":
            taken = torch.arange(mass.shape[-1], device=mass.device) < int(self.amount)
            taken = taken.expand_as(mass)
        else:  # those before which less than the amount was covered
            before = best.cumsum(-1) - best
            taken = before < self.amount * mass.sum(-1, keepdim=True)
        return torch.zeros_like(there).scatter(-1, order, taken) & there

    def _covered(self, mass: Tensor) -> Tensor | None:
        """Return what `read` finds, pages without mass besides; None where equal pages are divided. It sorts
        values alone, a tenth of the time."""
        best = torch.from_numpy(np.sort(mass.numpy(), axis=-1)).flip(-1)
        before = best.cumsum(-1) - best
        taken = before < self.amount * mass.sum(-1, keepdim=True)
        several = taken.sum(-1, keepdim=True)
        found = mass >= best.gather(-1, (several - 1).clamp(min=0))
        found &= several > 0
        in_front = torch.arange(mass.shape[-1]) < several
        plain = torch.equal(taken, in_front) and torch.equal(found.sum(-1, keepdim=True), several)
        return found if plain else None


def by_page(weights: Tensor, begin: int, page: int) -> Tensor:
    """Return ``weights`` [..., key] of the slots from ``begin`` on added up [..., page], from page 0 on."""
    n = weights.shape[-1]
    n_pages, lead = -(-(begin + n) // page), begin % page
    behind = n_pages * page - begin - n
    padded = torch.nn.functional.pad(weights, (lead, behind))
    sums = padded.view(*weights.shape[:-1], -1, page).sum(-1)
    return torch.nn.functional.pad(sums, (begin // page, 0)) if begin >= page else sums

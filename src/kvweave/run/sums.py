"""Attention that observers only add up, summed where it is computed.

To show each row's weights to an observer takes some twenty launches a layer, of sizes that differ
by context, so such a pass cannot be recorded. Who says what it adds up (`AddedUp`) gets one launch a
layer that is the same for all contexts up to a power of two, and the sums when the pass is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import AddedUp
from kvweave.run.kernel import attention_sums
from kvweave.run.part import BatchPart
from kvweave.run.pool import LayerPool, PooledRows
from kvweave.run.upload import Upload

LEAST = 1024  # slots that sums are made for, at least


def power_of_two(n: int) -> int:
    """Return the lowest that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def only_sums(parts: Sequence[BatchPart]) -> bool:
    """Tell whether all observers of a pass only add up."""
    observers = [part.work.observer for part in parts if part.work.observer is not None]
    return all(each.sums is not None for each in observers)


@dataclass(slots=True)
class _Added:
    """What one part's observer adds up, and where its numbers are in the upload."""

    part: BatchPart
    sums: AddedUp
    rows: slice  # [wanted] of the pass, filled up to a power of two
    weights: slice  # [wanted] as bits of float64, 0 for those that fill up
    starts: list[slice]  # by layer: [1] the pool's slot that is the context's first
    size: int  # slots

    @property
    def form(self) -> tuple[int, ...]:
        sums, starts = self.sums, (each.start for each in self.starts)
        where = self.rows.start, self.weights.start, *starts
        return sums.first_layer, sums.squared, self.part.last, self.size, *where


class PassSums:
    """What all observers of a pass add up."""

    def __init__(self, parts: Sequence[BatchPart], upload: Upload) -> None:
        self._upload = upload
        self._each: list[_Added] = []
        for part in parts:
            observer = part.work.observer
            if observer is None or observer.sums is None:
                continue
            weights = observer.sums.weights[part.work.at : part.work.at + part.n]
            counted = np.flatnonzero(weights)
            if not len(counted):
                continue
            fill = power_of_two(len(counted)) - len(counted)
            rows = np.pad(counted + part.span.start, (0, fill))
            bits = np.pad(weights[counted].astype(np.float64), (0, fill)).view(np.int64)
            at = upload.add(rows), upload.add(bits)
            starts = [rows.start for rows in part.rows.layers if isinstance(rows, PooledRows)]
            made = {start: upload.add(np.array([start])) for start in dict.fromkeys(starts)}
            size = max(LEAST, power_of_two(part.stop))
            self._each.append(_Added(part, observer.sums, *at, [made[s] for s in starts], size))

    @property
    def form(self) -> tuple[int, ...]:
        """What passes have in common that launch the same for it."""
        return tuple(number for each in self._each for number in each.form)

    def add(
        self, layer: int, query: Tensor, lse: Tensor, pool: LayerPool, seen: Tensor,
        how: tuple[float, float], totals: dict[int, Tensor],
    ) -> None:  # fmt: skip
        """Add to ``totals`` [observer] of [slot] what a layer's rotated ``query`` [row, head, dim] pay;
        ``lse`` [row, head] is of all that they pay to, sinks included, ``how`` scale and softcap."""
        for i, each in enumerate(self._each):
            if each.sums.first_layer <= layer < each.part.last:
                if i not in totals:
                    totals[i] = torch.zeros(each.size, dtype=lse.dtype, device=lse.device)
                rows, start = self._upload[each.rows], self._upload[each.starts[layer]]
                weights = self._upload[each.weights].view(torch.float64)
                power = 2.0 if each.sums.squared else 1.0
                paid = query, pool.k, seen, lse
                attention_sums(paid, (rows, weights, start), totals[i], (*how, power))

    def hand_on(self, totals: dict[int, Tensor]) -> None:
        """Give observers what was added up, by this pass or by the recorded one that was played."""
        for i, total in totals.items():
            observer = self._each[i].part.work.observer
            assert observer is not None
            observer.add(total)

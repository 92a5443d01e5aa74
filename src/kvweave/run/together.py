"""A pass whose rows all stand in pools: one write and one attention a layer for all contexts.

A pass is filled up to a power of two, and so are its tiles and the logits that are wanted of it, so
that few shapes occur: launches can be recorded for each (`run/graphs.py`). The rows that fill it
are written to slot 0 of the pools, which is nobody's, and see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints, LayerInfo, Mask
from kvweave.run.kernel import TILE, interval_attention, write_rows
from kvweave.run.part import BatchPart
from kvweave.run.pool import LayerPool, PooledRows
from kvweave.run.sums import PassSums, only_sums, power_of_two
from kvweave.run.upload import Upload

SHAPED = 512  # rows of a pass up to which it is filled up: more take longer than their launches
FEW = 16  # wanted logits up to which they are
# of each part: where its rows of a layer start in the pool, -1: not run there
Key = tuple[int, ...]


def pooled(parts: Sequence[BatchPart], infos: Sequence[LayerInfo]) -> bool:
    """Tell whether all rows of all layers stand in pools that the kernels can serve."""
    plain = [info.latent is None and info.shape.k_heads == info.shape.v_heads for info in infos]
    return all(plain) and all(
        isinstance(rows, PooledRows) for part in parts for rows in part.rows.layers
    )


def filled(n: int, contexts: int) -> int:
    """Return how many rows a pass of ``n`` rows has, those that fill it up included."""
    if n > SHAPED:
        return n
    return power_of_two(n) if n == contexts else max(TILE, power_of_two(n))


class Together:
    """Where the rows of each layer are written, and which slots they see; on the device after the
    upload."""

    def __init__(
        self, parts: Sequence[BatchPart], infos: Sequence[LayerInfo], n: int, upload: Upload
    ) -> None:
        self._parts, self._infos, self._n, self._upload = parts, infos, n, upload
        self._pools: list[LayerPool] = []
        self._to: list[slice] = []  # by layer
        self._seen: list[slice] = []
        runs: dict[Key, slice] = {}
        seen: dict[tuple[Key, Mask], slice] = {}
        for layer, info in enumerate(infos):
            rows = [part.rows.layers[layer] for part in parts]
            pooled = [each for each in rows if isinstance(each, PooledRows)]
            self._pools.append(pooled[0].pool)
            pairs = list(zip(pooled, parts, strict=True))
            writes = tuple(r.start if layer <= p.last else -1 for r, p in pairs)
            reads = tuple(r.start if layer < p.last else -1 for r, p in pairs)
            if writes not in runs:
                runs[writes] = upload.add(self._slots(writes))
            if (reads, info.mask) not in seen:
                seen[reads, info.mask] = upload.add(self._intervals(reads, info.mask))
            self._to.append(runs[writes])
            self._seen.append(seen[reads, info.mask])
        self._tiles = upload.add(self._cut())
        self.sums = PassSums(parts, upload) if only_sums(parts) else None

    def _slots(self, starts: Key) -> Ints:
        """Return the slot of each row [row], 0 where it is not written."""
        slots = np.zeros(self._n, np.int64)
        for part, start in zip(self._parts, starts, strict=True):
            if start >= 0:
                slots[part.span] = part.work.slots + start
        return slots

    def _intervals(self, starts: Key, mask: Mask) -> Ints:
        """Return where each row's interval begins and ends [2, row], 0 and 0 where it is not run."""
        found = np.zeros((2, self._n), np.int64)
        for part, start in zip(self._parts, starts, strict=True):
            if start >= 0:
                begins = part.begins[mask]
                found[0, part.span] = start if begins is None else begins + start
                found[1, part.span] = part.work.slots + (start + 1)
        return found

    def _cut(self) -> Ints:
        """Return the rows [tile, 2] that are taken together: never of two contexts."""
        n = sum(part.n for part in self._parts)
        one_each = n == len(self._parts)
        firsts = [i for part in self._parts for i in range(part.span.start, part.span.stop, TILE)]
        firsts += range(n, self._n, 1 if one_each else TILE)
        stops = {part.span.stop for part in self._parts}
        ends = [*firsts[1:], self._n]
        assert stops <= {*ends}, "a tile of two contexts"
        tiles = np.stack((np.array(firsts), np.array(ends)), 1)
        if one_each or self._n > SHAPED:
            return tiles
        fills = power_of_two(len(tiles)) - len(tiles)
        if len(tiles) + fills == self._n:  # as many tiles as rows: all would be of one row
            fills += 1
        return np.concatenate((tiles, np.full((fills, 2), self._n)))

    @property
    def layout(self) -> tuple[int, ...]:
        """Where in the upload each layer finds its numbers: passes of one layout differ in numbers
        only."""
        starts = (run.start for run in (*self._to, *self._seen, self._tiles))
        sums = () if self.sums is None else self.sums.form
        return *starts, self._tiles.stop, *sums

    def write(self, layer: int, keys: Tensor, values: Tensor, angles: Tensor) -> None:
        """Write unrotated rows [row, head, dim] of a layer; ``angles`` are [2, row, width]."""
        pool, slots = self._pools[layer], self._upload[self._to[layer]]
        interleaved = self._infos[layer].rotation.interleaved
        write_rows(keys, values, pool.k, pool.v, slots, angles, interleaved)

    def attend(
        self, layer: int, query: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return attention [row, head, v_dim] and its log-sum-exp [row, head] of rotated ``query``."""
        pool = self._pools[layer]
        seen = self._upload[self._seen[layer]].view(2, -1)
        tiles = self._upload[self._tiles].view(-1, 2)
        found: tuple[Tensor, Tensor] = interval_attention(
            query, pool.k, pool.v, seen, tiles, scale, softcap or 0.0
        )
        return found

    def add_up(
        self, layer: int, query: Tensor, sums: Tensor, how: tuple[float, float], found: Beside
    ) -> None:
        """Add up what observers want of a layer, if all of them only add up; ``sums`` [row, head] is
        the log-sum-exp, with what goes to nothing, ``how`` scale and softcap."""
        if self.sums is not None:
            seen = self._upload[self._seen[layer]].view(2, -1)
            self.sums.add(layer, query, sums, self._pools[layer], seen, how, found.totals)

    def end(self, found: Beside) -> None:
        """Hand on what was found beside logits, by this pass or by one recorded."""
        found.write(self._parts)
        if self.sums is not None:
            self.sums.hand_on(found.totals)


class Beside:
    """What a pass finds beside logits: unrotated rows, and ``totals`` of attention; they are handed on
    all at once, at its end."""

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}
        self._layers: list[tuple[int, Tensor, Tensor]] = []

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's rows [row, head, dim]."""
        self._layers.append((layer, keys, values))

    def write(self, parts: Sequence[BatchPart]) -> None:
        """Copy the rows to the works' `raw`."""
        to: list[Tensor] = []
        rows: list[Tensor] = []
        for layer, keys, values in self._layers:
            for part in parts:
                raw, span = part.work.raw, slice(part.work.at, part.work.at + part.n)
                if raw is not None and layer <= part.last:
                    to += [raw.k[layer][span], raw.v[layer][span]]
                    rows += [keys[part.span], values[part.span]]
        if to:
            torch._foreach_copy_(to, rows)

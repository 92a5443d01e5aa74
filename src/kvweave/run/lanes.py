"""Where scores of coded rows stand: heads keep more or fewer of them than each other, and one operation
makes those of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.packed import CodedLevel

TILE = 256  # rows whose scores are one bag
BLOCK = 1 << 14  # rows at once, of all heads: what is unpacked stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Where scores of coded rows stand: in tiles of `TILE` rows of each level, once for each head that
    has rows there. ``where`` [head, tile] is the number of such a pair, that behind all others: none."""

    starts: tuple[int, ...]  # the first tile of each level, and the end
    tiles: Tensor  # [pair] int64, increasing
    heads: Tensor  # [pair] int64
    beyond: Tensor  # [pair, 1, row of the tile] bool: not the head's
    where: Tensor
    back: Tensor  # [pair] where it is in ``where``
    blocks: tuple[tuple[slice, slice], ...]  # tiles, and pairs, that are done at once

    @property
    def n(self) -> int:
        """Lanes of a head."""
        return self.where.shape[1] * TILE

    def within(self, block: int) -> Tensor:
        """Return [pair] which of a block's tiles each of its pairs is of."""
        tiles, pairs = self.blocks[block]
        found: Tensor = self.tiles[pairs] - tiles.start
        return found

    def numbers(
        self, block: int, n: int, groups: int, size: int, bag: int
    ) -> tuple[Tensor, Tensor]:
        """Return int32 numbers of rows, for each pair of a block, ``n`` queries and ``groups``, of a table
        whose tiles have ``size`` rows of each group, row by row, and where each bag of ``bag`` begins."""
        return _numbers(self, block, n, groups, size, bag)

    def slots(self, levels: Sequence[CodedLevel]) -> Ints:
        """Return [head, lane] the slots of the levels' rows; 0 for lanes of none."""
        every = np.zeros((self.starts[-1] + 1, TILE), np.int64)
        flat = every.reshape(-1)
        for level, start in zip(levels, self.starts, strict=False):
            flat[start * TILE : start * TILE + level.n] = np.concatenate(level.slots)
        tiles = np.append(self.tiles.numpy(), self.starts[-1])
        found: Ints = every[tiles[self.where.numpy()]].reshape(len(self.where), -1)
        return found


@lru_cache(maxsize=32)  # of a block 1 MB or two at most: they are in no account
def _numbers(
    lanes: Lanes, block: int, n: int, groups: int, size: int, bag: int
) -> tuple[Tensor, Tensor]:
    of = lanes.within(block).to(torch.int32) * (size * groups)
    rows = torch.arange(size * groups, dtype=torch.int32).view(size, groups).t()
    every = (of[:, None, None, None] + rows).expand(-1, n, -1, -1).reshape(-1)
    return every, torch.arange(0, len(every), bag, dtype=torch.int32)


def lanes_of(levels: Sequence[CodedLevel]) -> Lanes:
    """Return where scores of the rows of ``levels`` stand."""
    return _lanes(tuple(tuple(map(len, level.slots)) for level in levels))


@lru_cache(maxsize=64)
def _lanes(sizes: tuple[tuple[int, ...], ...]) -> Lanes:
    starts, tiles, heads, beyond = [0], [], [], []
    for each in sizes:
        first = 0
        for head, n in enumerate(each):
            there = np.arange(first // TILE, -(-(first + n) // TILE)) if n else np.arange(0)
            rows = there[:, None] * TILE + np.arange(TILE)
            tiles.append(there + starts[-1])
            heads.append(np.full(len(there), head))
            beyond.append((rows < first) | (rows >= first + n))
            first += n
        starts.append(starts[-1] + -(-first // TILE))
    of, mine = np.concatenate(tiles), np.concatenate(heads)
    pairs = [np.flatnonzero(mine == head) for head in range(len(sizes[0]))]
    where = np.full((len(pairs), max(map(len, pairs))), len(of))
    for to, numbers in zip(where, pairs, strict=True):
        to[: len(numbers)] = numbers
    back = np.empty(len(of), np.int64)
    back[where[where < len(of)]] = np.flatnonzero(where < len(of))
    cuts = [*range(0, starts[-1], BLOCK // TILE), starts[-1]]
    ends = np.searchsorted(of, cuts)
    blocks = zip(pairwise(cuts), pairwise(ends.tolist()), strict=True)
    both = tuple((slice(*a), slice(*b)) for a, b in blocks)
    arrays = (of, mine, np.concatenate(beyond)[:, None], where, back)
    own, owner, unseen, at, home = [torch.from_numpy(each) for each in arrays]
    return Lanes(tuple(starts), own, owner, unseen, at, home, both)

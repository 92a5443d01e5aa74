"""Where scores of coded rows stand: heads keep more or fewer of them than each other, and one operation
makes those of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.packed import TILE, CodedLevel

BLOCK = 1 << 14  # rows at once, of all heads: what is unpacked stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class LaneBlock:
    """Tiles of one level that are done at once: ``pairs`` are first those of each tile with the first head
    that has rows there, in their order, and then those with further heads."""

    level: int
    tiles: slice  # of the level
    pairs: slice  # of all pairs
    of: Tensor  # [pair] int64 which of these tiles each is of
    ragged: Tensor  # [pair] those of a tile that is not full: the last of the level's, at most

    @property
    def n(self) -> int:
        """Tiles."""
        return len(range(self.tiles.start, self.tiles.stop))


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Where scores of coded rows stand: in tiles of `TILE` rows of each level, once for each head that
    has rows there. ``where`` [head, tile] is the number of such a pair, that behind all others: none."""

    starts: tuple[int, ...]  # the first tile of each level, and the end
    tiles: Tensor  # [pair] int64, of all tiles
    heads: Tensor  # [pair] int64
    edges: Tensor  # [edge] pairs in whose tile some rows are not the head's, and that of none
    beyond: Tensor  # [edge, 1, row of the tile] bool: these
    where: Tensor
    back: Tensor  # [pair] where it is in ``where``
    blocks: tuple[LaneBlock, ...]

    @property
    def n(self) -> int:
        """Lanes of a head."""
        return self.where.shape[1] * TILE

    def slots(self, levels: Sequence[CodedLevel]) -> Ints:
        """Return [head, lane] the slots of the levels' rows; 0 for lanes of none."""
        every = np.zeros((self.starts[-1] + 1, TILE), np.int64)
        flat = every.reshape(-1)
        for level, start in zip(levels, self.starts, strict=False):
            flat[start * TILE : start * TILE + level.n] = np.concatenate(level.slots)
        tiles = np.append(self.tiles.numpy(), self.starts[-1])
        found: Ints = every[tiles[self.where.numpy()]].reshape(len(self.where), -1)
        return found


@lru_cache(maxsize=64)  # of a block 1 MB or two at most: they are in no account
def numbers(
    block: LaneBlock,
    n: int,
    groups: int,
    size: int,
    bag: int,
    full: int | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return int32 numbers of rows, for each pair of a block, ``n`` queries and ``groups``, of a table whose
    tiles have ``size`` rows of each group, row by row, and where each bag of ``bag`` begins. With ``full`` the
    table has so many tiles only: pairs of others have its first; with 0 it has the ragged one alone. Of
    ``rows`` that a table has the last stands for those behind it."""
    of = block.of if full != 0 else torch.zeros_like(block.ragged)
    of = of.masked_fill(of >= full, 0) if full else of
    first = of.to(torch.int32) * (size * groups)
    own = torch.arange(size * groups, dtype=torch.int32).view(size, groups).t()
    every = (first[:, None, None, None] + own).expand(-1, n, -1, -1).reshape(-1)
    every = every if rows is None else every.clamp_(max=rows * groups - 1)
    return every, torch.arange(0, len(every), bag, dtype=torch.int32)


def lanes_of(levels: Sequence[CodedLevel]) -> Lanes:
    """Return where scores of the rows of ``levels`` stand."""
    return _lanes(tuple(tuple(map(len, level.slots)) for level in levels))


@lru_cache(maxsize=64)
def _lanes(sizes: tuple[tuple[int, ...], ...]) -> Lanes:
    starts, tiles, heads, beyond, blocks, n = [0], [], [], [], [], 0
    for level, each in enumerate(sizes):
        own, mine, unseen = _pairs(each)
        last, step, whole = -(-sum(each) // TILE), max(1, BLOCK // TILE), sum(each) // TILE
        for begin in range(0, last, step):
            some = np.flatnonzero((own >= begin) & (own < begin + step))
            again = np.append(False, own[some][1:] == own[some][:-1])  # with a further head
            some = some[np.argsort(again, kind="stable")]
            of, stop = own[some], min(begin + step, last)
            ragged = torch.from_numpy(np.flatnonzero(of == whole))
            at = slice(n, n + len(some))
            blocks.append(
                LaneBlock(level, slice(begin, stop), at, torch.from_numpy(of - begin), ragged)
            )
            tiles.append(of + starts[-1])
            heads.append(mine[some])
            beyond.append(unseen[some])
            n += len(some)
        starts.append(starts[-1] + last)
    of, mine, unseen = np.concatenate(tiles), np.concatenate(heads), np.concatenate(beyond)
    pairs = [np.flatnonzero(mine == head) for head in range(len(sizes[0]))]
    pairs = [own[np.argsort(of[own])] for own in pairs]
    where = np.full((len(pairs), max(map(len, pairs))), n)
    for to, some in zip(where, pairs, strict=True):
        to[: len(some)] = some
    back = np.empty(n, np.int64)
    back[where[where < n]] = np.flatnonzero(where < n)
    unseen = np.concatenate((unseen, np.ones((1, TILE), bool)))  # the pair behind all others
    edges = np.flatnonzero(unseen.any(1))
    arrays = (of, mine, edges, unseen[edges][:, None], where, back)
    pair, head, edge, hidden, lane, home = [torch.from_numpy(each) for each in arrays]
    return Lanes(tuple(starts), pair, head, edge, hidden, lane, home, tuple(blocks))


def _pairs(each: tuple[int, ...]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return tile and head of each pair of a level whose heads have so many rows, by tile and then by head,
    and which rows of the tile are not the head's [pair, row]."""
    tiles, heads, beyond, first = [], [], [], 0
    for head, n in enumerate(each):
        there = np.arange(first // TILE, -(-(first + n) // TILE)) if n else np.arange(0)
        rows = there[:, None] * TILE + np.arange(TILE)
        tiles.append(there)
        heads.append(np.full(len(there), head))
        beyond.append((rows < first) | (rows >= first + n))
        first += n
    return np.concatenate(tiles), np.concatenate(heads), np.concatenate(beyond)

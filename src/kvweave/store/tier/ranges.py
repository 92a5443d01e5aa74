"""What to ask of a server for a batch of reads: large ranges in pieces, neighbours of a key together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvweave.store.tier.base import PAGE, Get
from kvweave.store.tier.buffers import copy_out
from kvweave.store.tier.keys import n_bytes_of

PIECE = 1 << 20  # bytes of one range at most
GAP = PAGE  # bytes between two ranges that are rather read than asked for apart


class RangePart(NamedTuple):
    """A piece of what the get with number ``i`` wants."""

    i: int
    offset: int
    into: list[memoryview]

    @property
    def end(self) -> int:
        return self.offset + n_bytes_of(self.into)


class Range(NamedTuple):
    """Bytes to ask for, and the parts that lie in them, which are in order."""

    key: str
    parts: list[RangePart]

    @property
    def start(self) -> int:
        return self.parts[0].offset

    @property
    def end(self) -> int:
        return self.parts[-1].end

    def fill(self, part: RangePart, reply: bytes) -> bool:
        """Copy what came for one part to where it is wanted; say whether all of it did."""
        data = np.frombuffer(reply, np.uint8)[part.offset - self.start : part.end - self.start]
        whole = data.size == part.end - part.offset
        if whole:
            copy_out(data, part.into)
        return whole


def ranges(gets: Sequence[Get]) -> list[Range]:
    """Return what to ask for, in order; gets before the beginning of a value have no range."""
    found: list[Range] = []
    for i, get in enumerate(gets):
        for part in _cut(i, get) if get.offset >= 0 else ():
            if found and _belongs(part, get.key, found[-1]):
                found[-1].parts.append(part)
            else:
                found.append(Range(get.key, [part]))
    return found


def _cut(i: int, get: Get) -> Iterator[RangePart]:
    at, into, left = get.offset, list[memoryview](), PIECE
    for buffer in get.into:
        view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        while view.nbytes:
            into.append(view[:left])
            left -= into[-1].nbytes
            view = view[into[-1].nbytes :]
            if not left:
                yield RangePart(i, at, into)
                at, into, left = at + PIECE, [], PIECE
    if into:
        yield RangePart(i, at, into)


def _belongs(part: RangePart, key: str, last: Range) -> bool:
    near = 0 <= part.offset - last.end <= GAP
    return last.key == key and near and part.end - last.start <= PIECE

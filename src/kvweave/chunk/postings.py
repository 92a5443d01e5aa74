"""A table from hashes to chunks that is asked about many hashes at once, few of which it has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.rolling import Hashes

TRIED = 4
"""Chunks that ``get`` gives where more have the same hash: the two oldest and the two newest."""

_OFFSET_BITS = 32
_OFFSET = (1 << _OFFSET_BITS) - 1
_SLOTS_PER_KEY = 32  # to 64; two are used: 0.1 to 0.4 % of unknown hashes pass
_MANY = 255


class Postings:
    """Hash -> the chunks entered under it, each with one offset; and which hashes are surely not in.

    A counting Bloom filter with two slots for each hash, found in its high and in its low bits.
    """

    def __init__(self) -> None:
        # Most hashes have one chunk: 32 bytes for it (id and offset in one int) and not a dict.
        self._first: dict[int, int] = {}
        self._more: dict[int, dict[ChunkId, int]] = {}
        self._make_counts()

    def __len__(self) -> int:
        return len(self._first)

    def add(self, id: ChunkId, entries: dict[int, int]) -> None:
        """Enter a chunk that is not in."""
        for key, offset in entries.items():
            if key in self._first:
                self._more.setdefault(key, {})[id] = offset
                continue
            self._first[key] = id << _OFFSET_BITS | offset
            self._count(key, 1)
        if len(self._first) * _SLOTS_PER_KEY > len(self._counts):
            self._make_counts()

    def remove(self, id: ChunkId, entries: Iterable[int]) -> None:
        """Take out a chunk that is in, with the hashes it was entered under."""
        for key in entries:
            more = self._more.get(key, {})
            if self._first[key] >> _OFFSET_BITS != id:
                del more[id]
            elif more:
                second = next(iter(more))
                self._first[key] = second << _OFFSET_BITS | more.pop(second)
            else:
                del self._first[key]
                self._count(key, -1)
            if not more:
                self._more.pop(key, None)

    def passing(self, hashes: Hashes) -> NDArray[np.intp]:
        """Return where in ``hashes`` those stand that may be in the table; most others do not."""
        return np.flatnonzero(self._flags(hashes))

    def known(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Tell for each hash whether it is in the table; for few hashes."""
        return np.fromiter(map(self._first.__contains__, hashes.tolist()), bool, len(hashes))

    def flags(self, hashes: Hashes) -> bytes:
        """Return 1 for each hash that may be in the table, else 0: `bytes.find` tells the next."""
        return self._flags(hashes).tobytes()

    def get(self, key: int, also: ChunkId | None = None) -> list[tuple[ChunkId, int]]:
        """Return (id, offset) of up to TRIED chunks with this hash; of ``also`` first if it has it."""
        first = self._first.get(key)
        if first is None:
            return []
        found = [(ChunkId(first >> _OFFSET_BITS), first & _OFFSET)]
        more = self._more.get(key)
        if more is None:
            return found
        if len(more) < TRIED:
            found += more.items()
        else:
            found += islice(more.items(), TRIED // 2 - 1)
            found += islice(reversed(more.items()), TRIED // 2)
        if also in more:
            found.insert(0, (also, more[also]))
        return found

    def check_integrity(self, entered: dict[int, dict[ChunkId, int]]) -> None:
        """Raise AssertionError when it does not hold exactly this."""
        assert self._first.keys() == entered.keys()
        for key, first in self._first.items():
            more = self._more.get(key, {})
            id = ChunkId(first >> _OFFSET_BITS)
            assert id not in more and {id: first & _OFFSET, **more} == entered[key], key
        assert all(self._more.values()) and self._more.keys() <= self._first.keys()
        counts = np.zeros(len(self._counts), np.int64)
        for key in self._first:
            for slot in self._slots(key):
                counts[slot] += 1
        assert ((self._view == _MANY) | (self._view == counts)).all()

    def _flags(self, hashes: Hashes) -> NDArray[np.bool_]:
        if not self._first:
            return np.zeros(len(hashes), bool)
        high = (hashes >> np.uint64(self._shift)).view(np.int64)
        # All slots exist; of the modes "wrap" checks that fastest.
        found: NDArray[np.bool_] = self._view.take(high, mode="wrap") != 0
        at = found.nonzero()[0]  # few: the other slot is looked up for these only
        low = (hashes[at] & np.uint64(len(self._counts) - 1)).view(np.int64)
        found[at] = self._view.take(low, mode="wrap") != 0
        return found

    def _slots(self, key: int) -> tuple[int, int]:
        return key >> self._shift, key & len(self._counts) - 1

    def _count(self, key: int, change: int) -> None:
        for slot in self._slots(key):
            if self._counts[slot] < _MANY:  # once that many, nobody knows how many: it stays
                self._counts[slot] += change

    def _make_counts(self) -> None:
        n_bits = max(10, (2 * len(self._first) * _SLOTS_PER_KEY - 1).bit_length())
        self._shift = 64 - n_bits
        # Single bytes are read and written twice as fast in a bytearray as in an array.
        self._counts = bytearray(1 << n_bits)
        self._view = np.frombuffer(self._counts, np.uint8)
        keys = np.fromiter(self._first, np.uint64, len(self._first))
        both = np.concatenate((keys >> np.uint64(self._shift), keys & np.uint64((1 << n_bits) - 1)))
        slots, n = np.unique(both.view(np.int64), return_counts=True)
        self._view[slots] = np.minimum(n, _MANY)

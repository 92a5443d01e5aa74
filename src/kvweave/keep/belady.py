"""Belady's oracle, for traces: who is not asked for for the longest time goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from math import inf

from kvweave.keep.base import UNKNOWN, Deaf, Facts
from kvweave.keep.ranks import Ranks


class Future:
    """The uses still to come of a sequence known beforehand."""

    def __init__(self, keys: Sequence[int]) -> None:
        self.now = -1
        self._keys = keys
        self._next: list[float] = [inf] * len(keys)
        self._after: dict[int, float] = {}
        seen: dict[int, int] = {}
        for at in range(len(keys) - 1, -1, -1):
            self._next[at] = seen.get(keys[at], inf)
            seen[keys[at]] = at

    def step(self) -> None:
        """Go on to the next use."""
        self.now += 1
        self._after[self._keys[self.now]] = self._next[self.now]

    def after(self, key: int) -> float:
        """Return when ``key`` is used next, in uses from the beginning; infinity for never."""
        return self._after.get(key, inf)


class Belady(Deaf):
    """Let go first what is never used again, then by uses until the next one x bytes.

    With chunks of one size no policy has more hits. With several it is a strong bound, not the
    optimum, which is NP-hard. Sizes of one power of two count as equal.
    """

    name = "belady"

    def __init__(self, future: Future) -> None:
        self._future = future
        self._by_size: dict[int, Ranks] = {}  # by bits of the size, latest next use first
        self._sizes: dict[int, int] = {}

    def used(self, key: int, n_bytes: int, facts: Facts = UNKNOWN) -> None:
        """Look up when ``key`` is used next."""
        self._sizes[key] = n_bytes
        ranks = self._by_size.setdefault(n_bytes.bit_length(), Ranks())
        ranks.set(key, -self._future.after(key))

    def dropped(self, key: int) -> None:
        """Forget ``key``."""
        if key in self._sizes:
            self._by_size[self._sizes.pop(key).bit_length()].pop(key)

    def evicted(self, key: int) -> None:
        """Forget ``key``: nothing is learnt from its going."""
        self.dropped(key)

    def victims(self) -> Iterator[int]:
        """Yield keys, the longest unused times the largest first."""
        classes = [self._of_size(bits, ranks) for bits, ranks in self._by_size.items()]
        for _, key in merge(*classes):
            yield key

    def _of_size(self, bits: int, ranks: Ranks) -> Iterator[tuple[float, int]]:
        for key in ranks:
            yield (ranks[key] + self._future.now) * 2.0**bits, key

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is not where its size says."""
        for ranks in self._by_size.values():
            ranks.check_integrity()
        held = {key: bits for bits, ranks in self._by_size.items() for key in ranks}
        assert held == {k: n.bit_length() for k, n in self._sizes.items()}, "keys by size"

"""Fingerprints of text, by which a router without a tokenizer knows what a worker has.

A sample of the text's windows: of every `WIDTH` characters that stand together the hash, kept where it is
low. So the same text has the same prints wherever it stands, and text that was changed loses those near
the change only. Each print stands for the text from its window to the next one's.

::

    text    system: be brief ...   user: <page about Oslo> ... which is rainier?
    prints  |--- a ---|-- b --|-- c --|------ d ------|-- e --|----- f -----|
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.rolling import Hashes, rolling

WIDTH = 32  # characters of a window: about 8 tokens
EVERY = 64  # characters between two prints, on average
_TEXT = 0xA24BAED4963EE407
"""What is hashed with. Workers and routers compare their prints, so it stays as it is."""


class Prints(NamedTuple):
    """Prints in the order of the text, and the characters each stands for; both (n,)."""

    hashes: Hashes
    sizes: NDArray[np.int64]

    @property
    def n_chars(self) -> int:
        """Characters of the text."""
        return int(self.sizes.sum())


def prints(text: str) -> Prints:
    """Return the prints of a text: one at least, but for an empty one; sizes add up to its length.

    Takes time linear in the text, about 50 ns a character.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)
    if not len(letters):
        return Prints(np.empty(0, np.uint64), np.empty(0, np.int64))
    hashes = rolling(letters, min(WIDTH, len(letters)), _TEXT)
    at = np.flatnonzero(hashes < np.uint64((1 << 64) // EVERY))
    if not len(at):
        at = np.array([hashes.argmin()])
    else:  # padding is one print, not one for each character
        at = at[np.flatnonzero(np.diff(hashes[at], prepend=~hashes[at[:1]]))]
    return Prints(hashes[at], _sizes(at, len(letters)))


def thinned(found: Prints, most: int) -> Prints:
    """Return at most ``most`` of the prints, the same ones of the same text; sizes add up as before."""
    if len(found.hashes) <= most:
        return found
    order = np.argsort(found.hashes, kind="stable")[:most]
    at = np.sort(order)
    ends = np.cumsum(found.sizes)
    starts = ends - found.sizes
    return Prints(found.hashes[at], _sizes(starts[at], int(ends[-1])))


def _sizes(at: NDArray[np.intp], n: int) -> NDArray[np.int64]:
    """Return how far it is from each place to the next; the first has what stands before it too."""
    edges = np.append(at, n)
    edges[0] = 0
    return np.diff(edges).astype(np.int64)

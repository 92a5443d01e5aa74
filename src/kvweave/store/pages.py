"""Memory that KV is read to: from a page on, and used again instead of given back to the system.

Memory that is fresh costs more than the read into it: a fault for each page, which is zeroed first.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvweave.store.tier.base import PAGE

IDLE = 64 << 20  # bytes that are kept for those who come next
LARGE = 1 << 18  # bytes from which on it is worth it
WASTE = 1.25  # times what is wanted, that a used piece may have

# of the three below; what comes back never waits for it, since the collector runs anywhere
_lock = threading.Lock()
_idle: list[tuple[int, int]] = []  # (bytes, address) of pieces nobody uses, sorted
_pieces: dict[int, NDArray[np.uint8]] = {}  # address -> piece
_n_idle = 0
_returned: deque[NDArray[np.uint8]] = deque()  # and not sorted in yet


def buffer(n: int) -> memoryview:
    """Return ``n`` bytes that begin at a page, as direct reads want them, with anything in them.

    They are used again when the last view of them is gone.
    """
    if n < LARGE:
        return _aligned(np.empty(n + PAGE, np.uint8), n)
    piece = _take(n)
    if piece is None:
        piece = np.empty(n + PAGE, np.uint8)
    lent = piece.view()  # an object of its own: all that is made of it keeps it alive
    weakref.finalize(lent, _back, piece).atexit = False
    return _aligned(lent, n)


def _aligned(room: NDArray[np.uint8], n: int) -> memoryview:
    start = -room.ctypes.data % PAGE
    return memoryview(room)[start : start + n]  # type: ignore[arg-type]


def _take(n: int) -> NDArray[np.uint8] | None:
    global _n_idle
    try:
        with _lock:
            at = bisect_left(_idle, (n + PAGE, 0))
            if at == len(_idle) or _idle[at][0] > WASTE * n + PAGE:
                return None
            size, address = _idle.pop(at)
            _n_idle -= size
            return _pieces.pop(address)
    finally:
        _sort_in()


def _back(piece: NDArray[np.uint8]) -> None:
    _returned.append(piece)
    _sort_in()


def _sort_in() -> None:
    """Keep what has come back, unless somebody is at it, who does so afterwards."""
    global _n_idle
    while _returned and _lock.acquire(blocking=False):
        try:
            piece = _returned.popleft() if _returned else None
            if piece is not None and _n_idle + piece.size <= IDLE:
                _pieces[piece.ctypes.data] = piece
                insort(_idle, (piece.size, piece.ctypes.data))
                _n_idle += piece.size
        finally:
            _lock.release()

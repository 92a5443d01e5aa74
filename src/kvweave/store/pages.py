"""Memory that KV is read to: private, from a page on, in huge pages where it is large."""

from __future__ import annotations

import mmap

import numpy as np

from kvweave.store.tier.base import PAGE

HUGE = 2 << 20  # bytes of a huge page; below, the heap reuses what was freed without a system call


def buffer(n: int) -> memoryview:
    """Return ``n`` bytes that begin at a page, as direct reads want them; zeroed or not.

    A fault for each 4 KiB of a fresh mapping costs more than the read into it.
    """
    if n >= HUGE:
        try:
            made = mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                made.madvise(mmap.MADV_HUGEPAGE)
            return memoryview(made)
        except OSError:
            pass  # too many mappings, or no such advice: the heap has another way
    room = np.empty(n + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    return memoryview(room[start : start + n])  # type: ignore[arg-type]

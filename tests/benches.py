"""The benches on the path: they import each other as scripts do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench"


@contextmanager
def on_path() -> Iterator[None]:
    """Have them on the path. How fast this machine is they ask once a process: that takes half a second."""
    sys.path.insert(0, str(BENCH))
    try:
        import common

        if not hasattr(common.peaks, "cache_info"):
            common.peaks = cache(common.peaks)
        yield
    finally:
        sys.path.remove(str(BENCH))

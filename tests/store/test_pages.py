"""Pieces of memory that are used again, also where the collector gives one back amid another's taking."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from kvweave.store import pages


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is idle before or after."""
    gc.collect()
    for name, empty in (("_idle", []), ("_pieces", {}), ("_n_idle", 0)):
        monkeypatch.setattr(pages, name, empty)
    yield
    assert pages._n_idle == sum(n for n, _ in pages._idle) and len(pages._pieces) == len(
        pages._idle
    )
    assert not pages._returned and not pages._lock.locked()


def test_what_comes_back_while_one_is_taken_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = 2 * pages.LARGE
    large, small = pages.buffer(n), [pages.buffer(pages.LARGE)]
    del large
    real = pages.bisect_left

    def found(*args: Any) -> int:
        at = real(*args)
        small.clear()  # behind it the index is another one's
        return at

    monkeypatch.setattr(pages, "bisect_left", found)
    taken = pages.buffer(n)
    assert len(taken) == n
    assert len(pages._idle) == 1, "the small one is there for the next"

"""Who writes behind outlives what nobody foresaw: nobody else writes."""

from __future__ import annotations

import time

import pytest
from store.test_mover import Held, about, key, kv, level

from kvweave.chunk.background import NoThread
from kvweave.store.mover import Mover


@pytest.mark.parametrize("error", [MemoryError(), NoThread("no more")])
@pytest.mark.parametrize("verb", ["put", "discard"])
def test_a_write_behind_one_that_failed(
    verb: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Held(1 << 20)
    mover = Mover([level(tier)], about)
    as_it_is, failed = getattr(tier, verb), []

    def fails(*args: object, **words: object) -> object:
        if failed:
            return as_it_is(*args, **words)
        failed.append(verb)
        if verb == "put":
            tier.begun = True
            tier.open.wait()
        raise error

    monkeypatch.setattr(tier, verb, fails)
    assert mover.clean(1, kv(10, 1))
    while not tier.begun:
        time.sleep(0.001)
    mover._behind.unwanted(1)  # `mover.drop`, without its own discard
    assert mover.clean(2, kv(10, 2))
    tier.open.set()
    assert mover._behind.over(2, time.monotonic() + 5) and failed
    assert list(tier.keys()) == [key(2)] or (verb == "discard" and key(2) in set(tier.keys()))
    mover.close()

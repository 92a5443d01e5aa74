"""Tiers against counts by hand, and against a cache that is played page by page."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from probe import synthetic

from kvweave.errors import InvalidArgument
from kvweave.probe.recalling import PageBudget
from kvweave.probe.tiers import Setting, SlowTier, play
from kvweave.probe.trace import PageTrace

ALL = PageBudget(1.0, sinks=0, newest=0)


def in_turn(path: Path, n_pages: int = 6, n: int = 60) -> PageTrace:
    """One head that reads one page a step, all in turn; pages never grow."""
    mass = np.zeros((1, n_pages, n))
    mass[0, np.arange(n) % n_pages, np.arange(n)] = 1
    return synthetic.trace(path, synthetic.steps(mass), page=1000, prompt=1)


def one_by_one(reads: list[list[int]], room: int) -> int:
    """Misses of an LRU cache, played read by read; the pages of a step come together."""
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for step in reads:
        misses += sum(page not in held for page in step)
        for page in sorted(step):
            held.pop(page, None)
            held[page] = None
        while len(held) > room:
            held.popitem(last=False)
    return misses


@pytest.mark.parametrize("seed", range(5))
def test_lru_is_lru(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    n_pages, n = 10, 50
    mass = (rng.random((1, n_pages, n)) < 0.15) * rng.random((1, n_pages, n))
    some = synthetic.steps(mass)
    # all ten pages are there from the beginning: one slot a page, ten in front
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=9001)
    budget = PageBudget(0.4, sinks=0, newest=0)
    reads = [np.flatnonzero(some.access[0, :, t]).tolist() for t in range(n)]
    assert play(trace, "recent", None, Setting(budget=budget)).misses.sum() == one_by_one(reads, 4)


def test_stalls_are_bytes_over_bandwidth(tmp_path: Path) -> None:
    mass = np.zeros((2, 4, 8))
    mass[0, np.arange(8) % 4, np.arange(8)] = 1
    mass[1, 0] = 1
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(mass), page=1000, prompt=3001)
    tier = SlowTier("ssd", 1e6, 0.5)
    how = Setting(page_bytes=[1000, 500], decode=1, budget=PageBudget(0.25, 0, 0))
    found = play(trace, "recent", tier, how)
    # head 0 misses at each step; head 1 once, at the first
    assert found.misses.tolist() == [2] + [1] * 7
    assert np.allclose(found.fetched, [1500] + [1000] * 7)
    assert np.allclose(found.stalls, [0.5015] + [0.501] * 7)
    hidden = play(
        trace, "recent", tier, Setting([1000, 500], 1, 0.501, budget=PageBudget(0.25, 0, 0))
    )
    assert np.allclose(hidden.stalls, [0.0005] + [0] * 7)


def test_with_room_for_all_each_page_comes_once(tmp_path: Path) -> None:
    mass = np.random.default_rng(1).random((3, 5, 30))
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(mass), page=1000, prompt=4001)
    assert play(trace, "cumulative", None, Setting(budget=ALL)).misses.sum() == 15


def test_the_oracle_misses_least(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    mass = rng.random((2, 12, 60)) ** 6
    some = synthetic.steps(mass, over=0.5)
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=11001)
    found = {
        name: play(trace, name, None, Setting(ahead=True, budget=PageBudget(0.25, 0, 0))).miss_rate
        for name in ("oracle", "recent", "cumulative", "random")
    }
    assert found["oracle"] == min(found.values()) < found["random"]


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        SlowTier(bandwidth=0)
    with pytest.raises(InvalidArgument, match="did you mean recent"):
        play(in_turn(tmp_path / "a.kvt"), "recnet")

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


def by_hand(
    scores: list[dict[tuple[int, int], float]],
    reads: list[set[tuple[int, int]]],
    keep: int,
    fit: int,
) -> tuple[list[int], list[int]]:
    """Pages brought and missed at each step: ``fit`` at most, the best first, ``keep`` a head."""
    there: set[tuple[int, int]] = set()
    brought, missed = [], []

    def best(some: set[tuple[int, int]], by: dict[tuple[int, int], float]) -> set[tuple[int, int]]:
        heads = {head for head, _ in some}
        order = sorted(some, key=lambda at: (-by[at], -at[1]))
        return {at for h in heads for at in [x for x in order if x[0] == h][:keep]}

    for t, step in enumerate(reads):
        wanted = best(set(scores[t]), scores[t]) - there
        comes = set(sorted(sorted(wanted), key=lambda at: -scores[t][at])[:fit])
        there = best(there | comes, scores[t])
        brought.append(len(comes))
        missed.append(len(step - there))
        there = best(there | step, scores[t + 1])
    return brought, missed


@pytest.mark.parametrize("fit", [0, 1, 3, 100])
def test_what_is_brought_ahead_comes_by_the_deadline_the_most_wanted_first(
    fit: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(fit)
    heads, n_pages, n = 3, 10, 40
    mass = rng.random((heads, n_pages, n)) ** 4
    some = synthetic.steps(mass, over=0.3)
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=9001)
    tier, size, each = SlowTier("ssd", 1e6, 0.5, 0.25), 1000.0, 0.25 + 0.001
    deadline = 0.5 + (fit + 0.5) * each
    how = Setting(size, 1e9, 0.0, True, deadline, PageBudget(0.3, 0, 0))
    found = play(trace, "ema", tier, how)
    totals, scores = np.zeros((heads, n_pages)), []
    for t in range(n + 1):
        scores.append({(h, p): totals[h, p] for h in range(heads) for p in range(n_pages)})
        if t < n:
            totals = totals * 0.5 ** (1 / 16) + some.mass[..., t]
    reads = [{(int(h), int(p)) for h, p in np.argwhere(some.access[..., t])} for t in range(n)]
    brought, missed = by_hand(scores, reads, 3, fit)
    assert found.misses.tolist() == missed
    assert np.allclose(
        found.fetched, [size * (a + b) for a, b in zip(brought, missed, strict=True)]
    )
    assert np.allclose(found.stalls, [m and 0.5 + m * each for m in missed])  # nothing else waits
    if fit == 100:
        whole = play(trace, "ema", tier, Setting(size, 1e9, 0.0, True, None, PageBudget(0.3, 0, 0)))
        assert np.array_equal(found.fetched, whole.fetched)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        SlowTier(bandwidth=0)
    for wrong in (Setting, lambda **k: Setting(ahead=True, **(k | {"deadline": 0.0}))):
        with pytest.raises(InvalidArgument, match="deadline"):
            wrong(deadline=1.0)
    with pytest.raises(InvalidArgument, match="did you mean recent"):
        play(in_turn(tmp_path / "a.kvt"), "recnet")

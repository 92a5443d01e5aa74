"""Tiers against counts by hand, and against a cache that is played page by page."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from probe import synthetic

from kvweave.errors import InvalidArgument
from kvweave.probe.places import POLICIES, Places
from kvweave.probe.recalling import PageBudget
from kvweave.probe.tiers import Setting, SlowTier, play
from kvweave.probe.trace import PageTrace, TraceSteps

ALL = PageBudget(1.0, sinks=0, newest=0)


def in_turn(path: Path, n_pages: int = 6, n: int = 60) -> PageTrace:
    """One head that reads one page a step, all in turn; pages never grow."""
    mass = np.zeros((1, n_pages, n))
    mass[0, np.arange(n) % n_pages, np.arange(n)] = 1
    return synthetic.trace(path, synthetic.steps(mass), page=1000, prompt=1)


def sparse(seed: int, n_pages: int, n: int, share: float) -> TraceSteps:
    """One head that reads this share of its pages."""
    rng = np.random.default_rng(seed)
    mass = (rng.random((1, n_pages, n)) < share) * rng.random((1, n_pages, n))
    return synthetic.steps(mass)


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
    some = sparse(seed, 10, 50, 0.15)
    # all ten pages are there from the beginning: one slot a page, ten in front
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=9001)
    budget = PageBudget(0.4, sinks=0, newest=0)
    reads = [np.flatnonzero(some.access[0, :, t]).tolist() for t in range(some.n)]
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


def levels_by_hand(
    reads: list[set[int]], n_pages: int, keep: int, rooms: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Misses at each tier and pages that sank, step by step: one head, LRU, page by page."""
    fast: set[int] = set()
    below, last = dict.fromkeys(range(n_pages), 0), dict.fromkeys(range(n_pages), -1)
    misses, sunk = [], []
    for t, step in enumerate(reads):
        counts = [0] * (len(rooms) + 1)
        for page in step - fast:
            counts[below[page]] += 1
        misses.append(counts)
        for page in step:
            last[page] = t
        fast = set(sorted(fast | step, key=lambda p: (last[p], p))[-keep:])
        for page in fast:
            below[page] = 0
        moved = 0
        for i, room in enumerate(rooms):
            own = sorted(
                (p for p in below if p not in fast and below[p] == i), key=lambda p: (last[p], p)
            )
            for page in own[: max(0, len(own) - room)]:
                below[page] = i + 1
                moved += 1
        sunk.append(moved)
    return misses, sunk


@pytest.mark.parametrize("seed", range(6))
def test_pages_sink_where_there_is_no_room(seed: int, tmp_path: Path) -> None:
    n_pages, n = 20, 60
    some = sparse(seed, n_pages, n, 0.12)
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=19001)
    tiers = [
        SlowTier("dram", 1e9, 0.001, share=0.15),
        SlowTier("ssd", 1e6, 0.5, share=0.3),
        SlowTier("remote", 1e5, 3.0),
    ]
    how = Setting(page_bytes=1000, budget=PageBudget(0.2, 0, 0))
    found = play(trace, "recent", tiers, how)
    reads = [set(np.flatnonzero(some.access[0, :, t]).tolist()) for t in range(n)]
    misses, sunk = levels_by_hand(reads, n_pages, 4, [3, 6])
    assert found.misses.tolist() == [sum(m) for m in misses]
    assert [*found.by_tier.values()] == np.sum(misses, 0).tolist()
    assert all(found.by_tier.values())  # each tier is asked
    assert found.sunk.tolist() == [1000 * m for m in sunk]
    slowest = [
        max(t.seconds(1000 * m, m) for t, m in zip(tiers, each, strict=True)) for each in misses
    ]
    assert np.allclose(found.stalls, slowest)


def test_what_is_brought_ahead_comes_from_where_it_rests(tmp_path: Path) -> None:
    trace = in_turn(tmp_path / "a.kvt")  # one of six pages a step, in turn
    trace = synthetic.trace(tmp_path / "b.kvt", trace.whole(), page=1000, prompt=5001)
    tiers = [SlowTier("dram", 1e9, 0.001, share=0.34), SlowTier("ssd", 1e6, 0.5)]
    how = Setting(1000, 1e-9, 0.0, True, None, PageBudget(0.1, 0, 0))
    found = play(trace, "oracle", tiers, how)
    below, stalls, last = dict.fromkeys(range(6), 0), [], None
    for step in range(trace.n_steps):
        page = step % 6
        stalls.append(tiers[below[page]].seconds(1000, 1))
        if last is not None:
            below[last] = 0
        last = page
        own = [p for p in below if p != page and below[p] == 0]
        for gone in own[: max(0, len(own) - 2)]:  # nothing is known of them: the oldest pages go
            below[gone] = 1
    assert not found.misses.any() and {round(s) for s in stalls} == {0, 1}
    assert np.allclose(found.stalls, stalls, atol=1e-8)


def test_pages_of_each_form_take_what_a_budget_has(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    heads, n = 4, 42
    scores, budget = rng.random((heads, n)), PageBudget(0.25, 1, 1)
    held = {name: POLICIES[name](budget, heads) for name in POLICIES}
    plain = Places(budget, heads).holds(scores, n)[:, 1:-1]
    assert (plain.sum(1) == 10).all()
    bits = held["diffkv"].holds(scores, n)[:, 1:-1].sum(1)
    assert (bits == 40).all()  # 13 of 6 bits and 27 of 3 in the bytes of ten of 16
    by_head = held["flexicache"]
    reads = np.zeros((heads, n), bool)
    for t in range(5):  # heads 0 and 1 read the same again, the others never
        reads[:2, 3] = True
        reads[2:] = np.arange(n) == t + 4
        by_head.see(reads)
    found = by_head.holds(scores, n)[:, 1:-1]
    assert found.sum(1).tolist() == [5, 5, 15, 15] and found.sum() == plain.sum()
    for head, row in enumerate(found):
        inner = scores[head, 1:-1]
        assert inner[row].min() > inner[~row].max()


def test_policies_of_papers_are_played(tmp_path: Path) -> None:
    mass = np.random.default_rng(4).random((4, 24, 50)) ** 5
    some = synthetic.steps(mass, over=0.4)
    trace = synthetic.trace(tmp_path / "a.kvt", some, page=1000, prompt=23001)
    how = Setting(1000, budget=PageBudget(0.25, 0, 0))
    found = {name: play(trace, name, None, how) for name in ("newest", *POLICIES)}
    assert np.array_equal(found["ttkv"].misses, found["newest"].misses)
    assert np.allclose(found["ttkv"].fetched, found["newest"].fetched / 2)
    assert 0 < found["diffkv"].miss_rate < found["newest"].miss_rate
    assert np.allclose(found["diffkv"].fetched, found["diffkv"].misses * 187.5)
    assert found["flexicache"].misses.sum() > 0


def test_tiers_that_make_no_sense(tmp_path: Path) -> None:
    assert SlowTier.parse("ssd:0.5:3e9:1e-4") == SlowTier("ssd", 3e9, 1e-4, 0.0, 0.5)
    assert SlowTier.parse("ssd:1:3e9:1e-4:2e-6").each == 2e-6
    for text in (
        "ssd",
        "ssd:1:3e9",
        "ssd:a:1:1",
        ":1:1:1",
        "ssd:1:1:1:1:1",
        "ssd:0:1:1",
        "ssd:1:0:1",
    ):
        with pytest.raises(InvalidArgument):
            SlowTier.parse(text)
    trace = in_turn(tmp_path / "a.kvt")
    with pytest.raises(InvalidArgument, match="two have one name"):
        play(trace, "recent", [SlowTier("a"), SlowTier("a")])
    with pytest.raises(InvalidArgument, match="nan"):
        SlowTier(bandwidth=float("nan"))

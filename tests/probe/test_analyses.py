"""Analyses against traces with known answers, and against the definition written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from probe import synthetic

from kvweave.errors import InvalidArgument
from kvweave.probe import heads, recalling
from kvweave.probe.distance import DECILES, Distances, ReuseDistances
from kvweave.probe.predict import RANKINGS
from kvweave.probe.shares import gini, top_share
from kvweave.probe.trace import TraceSteps


def distances(some: TraceSteps, size: int) -> Distances:
    counter = ReuseDistances(*some.mass.shape[:2], some.n)
    for block in synthetic.blocks(some, size):
        counter.add(block)
    return counter.found()


def slowly(access: np.ndarray) -> tuple[dict[int, int], dict[int, int], int]:
    """Both distances of every access, by looking at every step between."""
    stack: dict[int, int] = {}
    waits: dict[int, int] = {}
    first = 0
    n_heads, n_pages, n = access.shape
    for h in range(n_heads):
        for p in range(n_pages):
            before = None
            for t in range(n):
                if not access[h, p, t]:
                    continue
                if before is None:
                    first += 1
                else:
                    between = access[h, :, before + 1 : t].any(1)
                    between[p] = False
                    d = int(between.sum())
                    stack[d] = stack.get(d, 0) + 1
                    waits[t - before] = waits.get(t - before, 0) + 1
                before = t
    return stack, waits, first


@pytest.mark.parametrize("seed", range(6))
def test_distances_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_heads, n_pages, n = rng.integers(1, 4), rng.integers(1, 12), rng.integers(1, 40)
    some = synthetic.steps(
        rng.random((n_heads, n_pages, n)) * (rng.random((n_heads, n_pages, n)) < 0.3)
    )
    found = distances(some, int(rng.integers(1, 9)))
    stack, waits, first = slowly(some.access)
    assert {d: int(c) for d, c in enumerate(found.stack.sum(0)) if c} == stack
    assert {d: int(c) for d, c in enumerate(found.steps.sum(0)) if c} == waits
    assert found.first.sum() == first
    assert found.stack.sum() + first == some.access.sum()


def test_pages_read_in_turn_are_as_far_as_there_are_others() -> None:
    n_pages, n = 7, 70
    mass = np.zeros((2, n_pages, n))
    for t in range(n):
        mass[:, t % n_pages, t] = 1
    found = distances(synthetic.steps(mass), 16)
    assert found.median() == n_pages - 1 and found.median("steps") == n_pages
    assert found.cdf()[n_pages - 2] == 0 and found.cdf()[n_pages - 1] == 1
    assert found.first.tolist() == [14] + [0] * (DECILES - 1)


def test_shares_of_equal_and_of_one() -> None:
    equal, one = np.ones((3, 10)), np.eye(10)[:3]
    assert np.allclose(top_share(equal), 0.2) and np.allclose(gini(equal), 0)
    assert np.allclose(top_share(one), 1) and np.allclose(gini(one), 0.9)
    assert np.isnan(top_share(np.zeros(5))) and np.isnan(gini(np.zeros(5)))
    zipf = 1 / np.arange(1, 101)
    assert np.isclose(top_share(zipf), zipf[:20].sum() / zipf.sum())


def grown(n: int = 60, page: int = 4) -> np.ndarray:
    """Decoding from 40 slots on: 2 heads, one that reads the newest pages, one the same old page."""
    n_pages = (40 + n - 1) // page + 1
    mass = np.zeros((2, n_pages, n))
    for t in range(n):
        there = (40 + t) // page + 1
        mass[0, there - 1, t], mass[0, there - 4, t] = 0.5, 0.5
        mass[1, 0, t], mass[1, 3, t] = 0.7, 0.3
    return mass


def test_recall_knows_who_is_right_for_which_head(tmp_path: Path) -> None:
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(grown()), prompt=40)
    recent = recalling.recall(trace, recalling.PageBudget(0.1, sinks=1, newest=3))
    # the page that is fourth from the end is always the newest that counts, page 3 never
    assert recent.mean("newest") == pytest.approx(0.5)
    assert recent.mean("oracle") == 1 == recent.mean("oracle", "reads")
    # a page slides into place every fourth step, and no ranking but `newest` knows it before
    assert 0.8 < recent.mean("recent") < 1
    assert recent.mean("cumulative") > 0.5 > recent.mean("random")
    assert all(recent.mean(name) <= 1 for name in RANKINGS)


def test_nothing_counts_where_all_pages_stand_apart(tmp_path: Path) -> None:
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(np.ones((1, 3, 3))))
    assert np.isnan(recalling.recall(trace, recalling.PageBudget(0.5, 1, 2)).mean("recent"))


@pytest.mark.parametrize("seed", range(4))
def test_resident_pages_are_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (3, 20)).astype(float)
    budget = recalling.PageBudget(0.3, sinks=2, newest=3)
    there = recalling.resident(scores, 18, budget)
    for h in range(3):
        counted = sorted(range(2, 15), key=lambda p: (scores[h, p], p))[-4:]
        assert sorted(np.flatnonzero(there[h])) == sorted([0, 1, *counted, 15, 16, 17])


def test_a_break_is_found_where_it_is() -> None:
    x = np.arange(100.0)
    values = np.where(x < 60, 0.9, 0.9 - 0.01 * (x - 59))
    at, change = recalling.inflection(values)
    assert abs(at - 60) <= 1 and change == pytest.approx(-0.01, abs=1e-3)
    assert abs(recalling.inflection(0.5 + 0.001 * x)[1]) < 1e-9
    with pytest.raises(InvalidArgument):
        recalling.inflection(np.full(40, np.nan))


def test_a_head_that_reads_the_same_is_stable() -> None:
    mass = np.zeros((2, 6, 12))
    mass[0, :2] = 0.5
    mass[1, np.arange(12) % 6, np.arange(12)] = 1
    assert heads.stability(synthetic.steps(mass)).tolist() == [1, 0]


def test_ranks_of_heads() -> None:
    one = np.arange(8.0)
    assert heads.rank_overlap(one, 2 * one + 1) == (1, pytest.approx(1))
    assert heads.rank_overlap(one, -one) == (0, pytest.approx(-1))
    assert heads.rank_overlap(one, np.ones(8))[1] != heads.rank_overlap(one, np.ones(8))[1]  # NaN


@pytest.mark.parametrize("looked_at", [True, False])
def test_milestones_that_are_looked_at_are_found(looked_at: bool, tmp_path: Path) -> None:
    n, page, prompt = 160, 4, 8
    milestones = [17, 60, 101]
    pages = [(prompt + step) // page for step in milestones]
    mass = np.zeros((2, (prompt + n - 1) // page + 1, n))
    for t in range(n):
        there = (prompt + t) // page + 1
        mass[:, :there, t] = 0.1 / there
        for at in pages:
            if at < there - 2 and looked_at:
                mass[:, at, t] += 0.3
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(mass), milestones=milestones)
    found = heads.milestone_overlap(trace, trace.notes["milestones"])
    assert found.n_milestones == 3
    assert found.recall == (1 if looked_at else 0) or (not looked_at and found.recall < 0.7)
    with pytest.raises(InvalidArgument):
        heads.milestone_overlap(trace, [159])

"""The bench of waits: what it fits, what it moves, and how it compares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benches import on_path
from probe import synthetic

from kvweave.probe.recalling import PageBudget
from kvweave.probe.tiers import Setting, SlowTier, play


@pytest.fixture(scope="module")
def stalls() -> Iterator[ModuleType]:
    with on_path():
        yield importlib.import_module("stalls")


@pytest.mark.parametrize(
    ("latency", "each", "bandwidth"), [(1e-3, 1e-4, 1e9), (0, 2e-4, 5e8), (2e-3, 0, 2e9)]
)
def test_a_fit_finds_the_tier(
    stalls: ModuleType, latency: float, each: float, bandwidth: float
) -> None:
    """The median fetch counts, so one that was held up for long does not; and nothing is below 0."""
    cells = {}
    for size in stalls.SIZES:
        for n in stalls.COUNTS:
            took = latency + n * each + n * size * 1024 / bandwidth
            cells[size * 1024, n] = [took, took * 0.99, took * 1.01, took, took * 50]
    found = stalls.fitted(cells)
    assert found.seconds(8 * 65536, 8) == pytest.approx(
        SlowTier("x", bandwidth, latency, each).seconds(8 * 65536, 8), rel=1e-3
    )
    assert found.latency == pytest.approx(latency, abs=1e-6)
    assert found.each == pytest.approx(each, abs=1e-7)
    assert stalls.fitted(cells, False).each == 0


class Counted:
    """Pages that are there at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def fetch(self, ids: list[int]) -> Callable[[], None]:
        self.asked.append(ids)
        return lambda: None

    def seconds(self, ids: list[int]) -> float:
        self.fetch(ids)
        return float(len(ids))


@pytest.mark.parametrize("name", ["recent", "milestone"])
@pytest.mark.parametrize("deadline", [None, 0.025])
def test_what_is_moved_is_what_the_simulator_counts(
    stalls: ModuleType, name: str, deadline: float | None, tmp_path: Path
) -> None:
    mass = np.random.default_rng(4).random((3, 12, 50)) ** 5
    trace = synthetic.trace(tmp_path / "a.kvt", synthetic.steps(mass, 0.3), page=1000, prompt=11001)
    tier = SlowTier("x", 1e6, 0.01, 0.005)
    how = Setting(100, 1e-6, 0.0, deadline is not None, deadline, PageBudget(0.3, 1, 2))
    said, pages, behind = play(trace, name, tier, how), Counted(), [0]

    def called() -> None:
        behind[0] += 1

    waits = stalls.played(trace, pages, name, (tier, how, called))
    assert np.allclose(waits.round(), said.misses) and said.misses.sum() > 20
    assert 100 * sum(map(len, pages.asked)) == said.fetched.sum() and behind == [50]
    assert all(len(set(ids)) == len(ids) and max(ids, default=0) < 36 for ids in pages.asked)


def test_records_of_pages_come_back(stalls: ModuleType, tmp_path: Path) -> None:
    pages = stalls.Pages(tmp_path, 4096, 7)
    assert pages.seconds([3, 1, 6]) > 0
    assert pages.level.n_bytes >= 7 * 4096 and pages.mover.counts["loads"] == 3
    assert pages.mover.counts["bytes_read"] >= 3 * 4096 and not pages.mover.counts["lost"]
    pages.close()


def test_a_ratio_is_of_sums_and_its_interval_holds_it(stalls: ModuleType) -> None:
    rng = np.random.default_rng(0)
    measured = rng.random(400) + 0.5
    found, low, high = stalls.ratio(1.1 * measured, measured)
    assert (found, low, high) == (1.1, 1.1, 1.1)
    found, low, high = stalls.ratio(measured[::-1], measured)
    assert low < found == 1 < high and high - low < 0.2

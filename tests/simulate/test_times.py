"""Random times have the means that were asked for, and the tails."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import fmean, pstdev

import pytest

from kvweave.cli.simulate_arguments import PAUSES
from kvweave.simulate.interval import interval
from kvweave.simulate.times import ALPHA, SHAPES, Zipf, draw_gap, draw_time


@pytest.mark.parametrize(("shape", "off"), [("exponential", 0.02), ("lognormal", 0.05), ("pareto", 0.2)])  # fmt: skip
def test_every_shape_has_the_mean(shape: str, off: float) -> None:
    rng = Random(1)
    times = [draw_time(rng, 60.0, shape) for _ in range(100_000)]  # type: ignore[arg-type]
    assert fmean(times) == pytest.approx(60, rel=off)


def test_tails() -> None:
    rng = Random(2)
    over = {
        shape: sum(draw_time(rng, 1.0, shape) > 10 for _ in range(100_000)) / 100_000  # type: ignore[arg-type]
        for shape in SHAPES
    }
    assert over["exponential"] < 5e-4  # e^-10
    assert over["pareto"] == pytest.approx(((ALPHA - 1) / ALPHA / 10) ** ALPHA, rel=0.15)
    assert over["lognormal"] == pytest.approx(0.0112, rel=0.15)  # 1 - Phi((ln 10 + 9/8) / 1.5)
    assert set(SHAPES) == set(PAUSES)


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_bursts_have_the_deviation(cv: float) -> None:
    rng = Random(3)
    gaps = [draw_gap(rng, 2.0, cv) for _ in range(100_000)]
    assert fmean(gaps) == pytest.approx(2.0, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.04)


def test_zipf_is_zipf() -> None:
    rng, zipf = Random(4), Zipf(50, 0.8)
    counts = Counter(zipf.draw(rng) for _ in range(200_000))
    assert set(counts) == set(range(50))
    for rank in (1, 9, 49):
        assert counts[0] / counts[rank] == pytest.approx((rank + 1) ** 0.8, rel=0.1)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng, held = Random(5), 0
    for trial in range(100):
        mean, low, high = interval([rng.gauss(3, 1) for _ in range(20)], seed=trial)
        assert low <= mean <= high
        held += low <= 3 <= high
    assert 0.88 <= held / 100 <= 0.98  # the percentile bootstrap is a little narrow at n = 20
    assert interval([2.0]) == [2.0, 2.0, 2.0]

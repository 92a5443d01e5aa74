"""Intervals: exact where there is nothing to draw, and wide as theory says where there is."""

from __future__ import annotations

import math
import random

import pytest

from kvweave.suite import stats
from kvweave.suite.stats import Interval


def test_equal_values_have_no_width():
    assert stats.mean([[1.0, 1.0], [1.0]]) == Interval(1, 1, 1)
    assert stats.ratio([[1.0], [0.0]], [[1.0], [0.0]]) == Interval(1, 1, 1)
    assert stats.difference([[0.5], [0.25]], [[0.25], [0.0]]) == Interval(0.25, 0.25, 0.25)


def test_the_mean_counts_values_not_cases():
    assert stats.mean([[1.0, 1.0, 1.0], [0.0]]).value == 0.75


def test_a_single_case_is_drawn_again_and_again():
    assert stats.mean([[0.0, 1.0]]) == Interval(0.5, 0.5, 0.5)


def test_cases_are_drawn_not_values():
    """Ten equal values in a case are one piece of evidence."""
    rng = random.Random(0)
    single = [[float(rng.random() < 0.5)] for _ in range(200)]
    tenfold = [case * 10 for case in single]
    assert stats.mean(single) == stats.mean(tenfold)


def test_width_of_a_share():
    found = stats.mean([[float(i % 2)] for i in range(400)])
    expected = 1.96 * math.sqrt(0.25 / 400)
    assert found.value == 0.5
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.12)


def test_seeds():
    cases = [[float(i % 3 == 0)] for i in range(50)]
    assert stats.mean(cases, seed=1) == stats.mean(cases, seed=1)
    assert stats.mean(cases, seed=1) != stats.mean(cases, seed=2)


def test_ratio_is_paired():
    """A method that is right where the oracle is has no interval, however few are right."""
    oracle = [[float(i % 4 == 0)] for i in range(60)]
    assert stats.ratio(oracle, oracle) == Interval(1, 1, 1)
    half = [[x / 2 for x in case] for case in oracle]
    assert stats.ratio(half, oracle) == Interval(0.5, 0.5, 0.5)
    assert stats.ratio([[0.0]], [[0.0]]) == Interval(1, 1, 1)
    with pytest.raises(ValueError, match="same questions"):
        stats.ratio([[1.0]], [[1.0, 1.0]])


def test_slope_of_lines():
    lines = [[(x, 2.0 * x + 1) for x in range(10)], [(x, 2.0 * x - 5) for x in range(10)]]
    found = stats.slope(lines)
    assert found.value == pytest.approx(2) and found.low == pytest.approx(2)
    assert found.high == pytest.approx(2)


def test_slope_of_noise_holds_zero_and_of_growth_does_not():
    rng = random.Random(3)
    noise = [[(x, rng.gauss(0, 1)) for x in range(100)] for _ in range(8)]
    growth = [[(x, y + 0.05 * x) for x, y in stream] for stream in noise]
    assert stats.slope(noise).has(0)
    assert not stats.slope(growth).has(0)


def test_quantile_and_rounding():
    assert stats.quantile([0.0, 1.0, 2.0, 3.0, 4.0], 0.5) == 2
    assert Interval(1 / 3, 0.0, 1.0).to_list() == [0.333333, 0.0, 1.0]

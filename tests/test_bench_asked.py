"""The bench of later questions: python -m pytest tests/test_bench_asked.py"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    import asked_again

    yield asked_again


@pytest.mark.slow
def test_ways_differ_in_what_they_repair_of_what_was_met_before(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = bench.ways(tried=False)
    some = {name: every[name] for name in ("none", "every time", "once")}
    some["less"] = bench.Way(partial(bench.Less, 0.5, 1))
    some["full"] = bench.Way(partial(bench.strategy, "full"), 1.0)
    monkeypatch.setattr(bench, "ways", lambda tried: some)
    options = argparse.Namespace(n=2, seed="test", longer=1, tried=False)
    found = list(bench.trials("gemma3-slide", options))
    first, later = (
        {
            way: [t for t in found if t["way"] == way and (t["turn"] == 1) == is_first]
            for way in some
        }
        for is_first in (True, False)
    )
    repaired = {way: sum(t["repaired"] for t in mine) for way, mine in later.items()}
    assert 0 == repaired["none"] == repaired["once"] < repaired["less"] < repaired["every time"]
    assert max(t["kl"] for t in (*first["full"], *later["full"])) < 1e-6
    for way in ("once", "less"):
        for mine, its in zip(first[way], first["every time"], strict=True):
            assert mine["repaired"] == its["repaired"] > 0 and mine["kl"] == pytest.approx(
                its["kl"]
            )
    rows = bench.summed(found)
    assert len(rows) == len(some) and bench.tables(rows)[0].row_count == len(some)

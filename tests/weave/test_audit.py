"""Bounds from audits: covered on streams of known distributions, and an alarm where they change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import CorruptChunk
from kvweave.weave.audit import (
    MOST_CELLS,
    PROBE,
    PROMISED,
    WINDOW,
    AuditCell,
    AuditedCell,
    Auditor,
)
from kvweave.weave.learned import write_learned
from kvweave.weave.shift import FLOOR, LEAST, RECENT, broken, chance, worse

CELL = AuditCell("query", 0.05)
Draw = Callable[[np.random.Generator, int], np.ndarray]
STREAMS: dict[str, Draw] = {
    "log-normal": lambda g, n: np.exp(g.normal(-5, 2, n)),
    "heavy": lambda g, n: 1e-3 * g.pareto(1.1, n),
    "two kinds": lambda g, n: np.where(g.random(n) < 0.1, 1.0, 1e-3) * g.random(n),
    "nearly exact": lambda g, n: g.random(n) * FLOOR,
    "all the same": lambda g, n: np.full(n, 0.25),
}


def told(drifts: np.ndarray, known: AuditedCell) -> tuple[int, int, int]:
    """Promised, then audit, one after the other: promises, misses, and the audit of the first alarm."""
    n, missed, first = 0, 0, -1
    for i, drift in enumerate(drifts):
        bound = known.bound()
        n, missed = n + (bound is not None), missed + (bound is not None and drift > bound)
        if known.saw(float(drift), bound) and first < 0:
            first = i
    return n, missed, first


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.sampled
@pytest.mark.slow
def test_of_answers_like_those_before_95_in_100_are_under_the_bound(name: str) -> None:
    found = [told(STREAMS[name](np.random.default_rng(i), 400), AuditedCell()) for i in range(16)]
    kept = [1 - missed / n for n, missed, _ in found]
    assert np.mean(kept) >= 0.98 and sum(k < PROMISED for k in kept) <= 1
    assert all(n >= 340 for n, _, _ in found), "nearly all have a bound"


@pytest.mark.slow
def test_an_alarm_for_nothing_is_rare() -> None:
    alarms = n_audits = 0
    for name, draw in STREAMS.items():
        for i in range(8):
            known = AuditedCell()
            told(draw(np.random.default_rng([i, len(name)]), 1000), known)
            alarms, n_audits = alarms + known.n_alarms, n_audits + 1000
    assert alarms / n_audits < 1 / 2000


@pytest.mark.slow
@pytest.mark.parametrize("before", [25, 100, 1000])
def test_a_shift_is_an_alarm_within_20_audits(before: int) -> None:
    """Other text or another revision: drifts thirty times as large, or an outlier seven times in ten."""
    late, shifts = 0, 0
    for i in range(40 if before < 1000 else 16):
        generator = np.random.default_rng(i)
        usual = np.exp(generator.normal(-6, 0.7, before))
        larger = np.exp(generator.normal(-6, 0.7, 20)) * 30
        some = np.where(generator.random(20) < 0.7, 2.0, 1e-3)
        before_it = AuditedCell()
        told(usual, before_it)
        for after in (larger, some):
            known = deepcopy(before_it)
            n = known.n_alarms
            told(after, known)
            shifts, late = shifts + 1, late + (known.n_alarms == n)
    assert late / shifts <= 0.03


def test_usual_drifts_that_are_gone_are_an_alarm_and_so_are_misses_among_smaller_ones() -> None:
    """Two shifts of the bench that took more than 20 audits: most drifts were tiny before and
    none is now; and most fall, while three in ten pass the bound."""
    seen = misses = 0
    for i in range(40):
        order = np.random.default_rng(i)
        tiny_ones = np.where(order.random(96) < 0.65, 1e-4, 1.0) * order.random(96)
        seen += worse([*tiny_ones, *(0.01 + order.random(20) * 0.9)])
        fallen = np.where(np.arange(20) % 10 < 3, 1.0, 1e-3) * (1 + order.random(20))
        misses += broken([*(0.02 + 0.05 * order.random(48)), *order.permutation(fallen)])
    assert seen >= 39 and misses >= 39


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_sorting_the_slow_way(seed: int) -> None:
    order = np.random.default_rng(seed)
    drifts = np.round(order.exponential(1, int(order.integers(20, 60))), 1).tolist()  # with ties
    found = False
    for k in RECENT:
        n = len(drifts) - k
        for level in (0.5, 0.75, 0.9) if n >= LEAST else ():
            rank = int(np.ceil(n * level))
            limit = max(sorted(drifts[:n])[rank - 1], FLOOR) * 1.001
            x = sum(drift > limit for drift in drifts[n:])
            found |= x > k * (1 - level) and chance(n, k, x, x + n - rank) <= 1e-4
    assert worse(drifts) == found
    grown = [*drifts, *(np.full(6, 9.0))]
    assert worse(grown) or len(drifts) < 30


def test_what_is_larger_on_the_whole_is_an_alarm_also_under_the_bound() -> None:
    """Drifts thirty times the usual, under the bound that a few outliers made."""
    seen = breaches = 0
    for i in range(40):
        order = np.random.default_rng(i)
        usual = np.exp(order.normal(-6, 1, 200)) + np.where(order.random(200) < 0.05, 3.0, 0.0)
        drifts = [*usual, *np.exp(order.normal(-2.6, 1, 20))]
        seen, breaches = seen + worse(drifts), breaches + broken(drifts)
        assert not worse([*drifts[200:], *drifts[:200]]), "what falls is none"
    assert seen >= 38 and breaches <= 2


@pytest.mark.slow
def test_a_slow_shift_is_followed_without_a_miss_too_many() -> None:
    """What gets slowly worse leaves the window, and misses widen the quantile."""
    n, missed, _ = map(
        sum,
        zip(
            *(
                told(
                    np.exp(np.random.default_rng(i).normal(np.linspace(-6, -3, 800), 1)),
                    AuditedCell(),
                )
                for i in range(10)
            ),
            strict=True,
        ),
    )
    assert 1 - missed / n >= PROMISED


def test_the_bound_is_the_conformal_quantile_exactly() -> None:
    known = AuditedCell()
    for i in range(LEAST - 1):
        known.saw(float(i), None)
    assert known.bound() is None, "of so few the largest promises too little"
    known.saw(0.5, None)
    assert known.bound() == LEAST - 2, "the largest of 19: the next passes it once in twenty"
    for i in range(WINDOW):
        known.saw(float(37 * i % 100) / 100, None)
    assert len(known.window) == WINDOW and known.bound() == 0.99


def test_an_infinite_drift_makes_no_bound() -> None:
    known = AuditedCell()
    for _ in range(2 * LEAST):
        known.saw(float("inf"), None)
    assert known.bound() is None


def alarmed() -> Auditor:
    auditor = Auditor()
    for _ in range(LEAST + 1):
        auditor.saw(CELL, 0.01, auditor.promise(CELL).bound)
    assert auditor.promise(CELL).bound == 0.01 and auditor.promise(CELL).coverage == 1
    raised = [auditor.saw(CELL, 1.0, 0.01) for _ in range(5)]
    assert sum(raised) == 1 and auditor.alarmed and auditor.promise(CELL).alarm
    return auditor


def test_under_an_alarm_nothing_is_promised_and_answers_are_repaired_but_for_probes() -> None:
    auditor = alarmed()
    promise = auditor.promise(CELL)
    assert promise.bound is None and promise.coverage is not None and promise.coverage < 1
    ways = [auditor.way(CELL) for _ in range(2 * PROBE)]
    assert ways.count("probe") == 2 and ways.count("full") == 2 * PROBE - 2
    assert auditor.way(AuditCell("query", 0.1)) == "asked", "others have kept theirs"


def test_a_calibrated_bound_is_bet_against() -> None:
    """It does not follow what audits find: missed by one in three it has an alarm, by few it has none."""
    late = early = 0
    for i in range(20):
        order = np.random.default_rng(i)
        bad = AuditedCell()
        raised = [bad.saw(float(d), 0.9) for d in np.where(order.random(60) < 0.33, 1.0, 0.1)]
        late += not any(raised)
        good = AuditedCell()
        early += sum(good.saw(float(d), 0.97) for d in order.random(400))
    assert late <= 1 and early <= 8, "one in 2,500 audits is an alarm for nothing"


def test_who_asked_for_a_bound_gets_no_probe() -> None:
    auditor, bounded = Auditor(), AuditCell("auto", 0.05, bounded=True)
    for _ in range(6):
        auditor.saw(bounded, 1.0, 0.1)
    assert auditor.promise(bounded).alarm
    assert {auditor.way(bounded) for _ in range(3 * PROBE)} == {"full"}


def test_an_alarm_ends_with_a_new_bound() -> None:
    auditor = alarmed()
    n = 0
    while auditor.promise(CELL).alarm:
        assert not auditor.saw(CELL, 1.5, None)
        n += 1
    assert n <= LEAST and auditor.promise(CELL).bound == 1.5 and auditor.way(CELL) == "asked"
    [report] = auditor.report()
    assert (report.n_alarms, report.alarm) == (1, False)
    assert report.coverage == 1 - report.n_missed / report.n_promised


def test_what_was_audited_least_is_forgotten_first() -> None:
    auditor = Auditor()
    for _ in range(2):
        auditor.saw(CELL, 0.1, None)
    for i in range(3 * MOST_CELLS):
        auditor.saw(AuditCell("query", i / 1000 + 0.1), 0.1, None)
    reports = list(auditor.report())
    assert len(reports) == MOST_CELLS and CELL in {r.cell for r in reports}


def test_a_tenant_raises_no_alarm_for_others_and_pushes_nobody_out() -> None:
    auditor, other = alarmed(), replace(CELL, tenant="anna")
    for _ in range(LEAST):
        auditor.saw(other, 0.1, None)
    assert auditor.way(CELL) != "asked" and auditor.way(other) == "asked"
    assert auditor.promise(other).bound == 0.1 and not auditor.promise(other).alarm
    for i in range(3 * MOST_CELLS):
        flood = replace(CELL, share=i / 1000 + 0.1, tenant="mallory")
        for _ in range(2 * LEAST):
            auditor.saw(flood, 0.1, None)
    assert auditor.promise(other).bound == 0.1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.booleans()), max_size=80))
def test_what_was_saved_goes_on_where_it_was(steps: list[tuple[float, bool]]) -> None:
    one = Auditor()
    for drift, promised in steps:
        one.saw(CELL, drift, one.promise(CELL).bound if promised else None)
    model = tiny().fingerprint
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit.json"
        write_learned(path, one.told(model))
        two = Auditor.load(path, model)
    assert list(one.report()) == list(two.report())
    assert one.saw(CELL, 2.0, 1.0) == two.saw(CELL, 2.0, 1.0)
    assert list(one.report()) == list(two.report())


def test_audits_of_another_model_say_nothing(tmp_path: Path) -> None:
    auditor, file = alarmed(), tmp_path / "audit.json"
    assert not list(Auditor.load(file, tiny().fingerprint).report()), "there is none yet"
    write_learned(file, auditor.told(tiny().fingerprint))
    other = tiny("qwen3").fingerprint
    assert list(Auditor.load(file, tiny().fingerprint).report())
    assert not list(Auditor.load(file, other).report())
    file.write_text("{}")
    with pytest.raises(CorruptChunk):
        Auditor.load(file, other)

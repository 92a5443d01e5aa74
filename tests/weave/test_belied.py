"""Promises that were not kept are not made again: by the same calibration, by a cell that forgot, by an engine that
died in between. python -m pytest tests/weave/test_belied.py"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tiny
from weave.test_shadow import asked
from weaving import flat

from kvweave import Engine
from kvweave.weave.audit import AuditCell, Auditor
from kvweave.weave.calibration import FILE, Calibration
from kvweave.weave.learned import LearnedFile
from kvweave.weave.plan import Plan
from kvweave.weave.shift import LEAST

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
GATED: dict[str, object] = {"repair": "auto", "share": 0.25, "audit": 1.0}
LOW = flat(_25=1e-7)  # promises what nobody keeps
BOUNDED = AuditCell("auto", 0.25, bounded=True)


def answer(engine: Engine, seed: int) -> tuple[float | None, str | None]:
    """What is promised of one answer, and by whom; it is audited."""
    context = asked(engine, f"c{seed}", seed)
    plan = context.generate(2, ignore_eos=True).plan
    engine.close_context(context.name)
    engine.audit(8)
    return plan.drift, plan.drift_by


def test_a_calibration_that_was_belied_promises_nothing_more(engines: Make) -> None:
    """Its alarm ends with the bound that audits make, and that is promised then. It was the calibration's
    again, and missed each time, until the next alarm."""
    engine = engines(**GATED)
    engine.weaver.calibration = LOW
    auditor, told = engine.shadow.auditor, []
    while not auditor.alarmed:
        told.append(answer(engine, len(told)))
    assert set(told) == {(1e-7, "calibration")}
    [cell] = [report.cell for report in auditor.report()]
    while auditor.promise(cell).alarm:
        auditor.saw(cell, 0.5, None)
    for seed in range(50, 56):
        drift, by = answer(engine, seed)
        assert by == "audit" and drift is not None and drift > 1e-3
    [report] = auditor.report()
    assert report.n_alarms == 1 and report.n_promised == report.n_missed + 6


def test_a_calibration_that_keeps_its_promise_is_believed_behind_another_alarm() -> None:
    """What was usual has changed, within the bound."""
    auditor, cell = Auditor(), AuditCell("auto", 0.25)
    for drift in (*[1e-4] * (2 * LEAST), *[1.0] * LEAST):
        auditor.saw(cell, drift, 2.0)
    assert [report.n_alarms for report in auditor.report()] == [1]
    assert not auditor.promise(cell).belied


def belied(auditor: Auditor) -> None:
    for _ in range(6):
        auditor.saw(BOUNDED, 1.0, 0.1)
    assert auditor.promise(BOUNDED).alarm


def test_who_asks_for_a_bound_is_not_promised_again_behind_a_restart_what_was_not_kept(
    tmp_path: Path,
) -> None:
    """Until the model is calibrated anew: all such answers are repaired, so no audit ends it."""
    LOW_FILE, anew = tmp_path / FILE, replace(LOW, n=LOW.n + 1)

    def opened(known: Calibration | None) -> Engine:
        LOW_FILE.unlink(missing_ok=True)
        if known is not None:
            known.save(LOW_FILE)
        return Engine(tiny(), home=tmp_path, **GATED)  # type: ignore[arg-type]

    with opened(LOW) as engine:
        belied(engine.shadow.auditor)
    for _ in range(2):
        with opened(LOW) as engine:
            promise = engine.shadow.auditor.promise(BOUNDED)
            assert promise.alarm and promise.belied
            assert engine.shadow.auditor.way(BOUNDED) == "full"
    for known in (anew, None):
        with opened(LOW) as engine:
            belied(engine.shadow.auditor)
        with opened(known) as engine:
            assert engine.shadow.auditor.way(BOUNDED) == "asked"
            assert not engine.shadow.auditor.promise(BOUNDED).belied


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_a_bound_that_was_belied_is_kept_by_repairing_all_with_audits_or_without(
    tmp_path: Path, audit: float
) -> None:
    LOW.save(tmp_path / FILE)
    gated = GATED | {"home": tmp_path, "audit": audit, "max_drift": 1e-6}

    def plan(engine: Engine, seed: int) -> Plan:
        return asked(engine, f"c{seed}", seed).generate(2, ignore_eos=True).plan

    with Engine(tiny(), **(gated | {"audit": 1.0})) as engine:  # type: ignore[arg-type]
        assert plan(engine, 0).drift == 1e-7
        [found] = engine.audit()
        for _ in range(6):
            engine.shadow.auditor.saw(found.cell, 1.0, 1e-7)
    with Engine(tiny(), **gated) as engine:  # type: ignore[arg-type]
        again = plan(engine, 1)
        assert again.alarm and again.drift == 0


def test_an_engine_that_is_killed_knows_of_its_alarm(tmp_path: Path) -> None:
    """The old bound lay in the home, and was promised again."""
    with Engine(tiny(), home=tmp_path, repair="none", audit=1.0) as engine:
        asked(engine, "c").generate(2, ignore_eos=True)
        [audit] = engine.audit()
        for _ in range(2 * LEAST):
            engine.shadow.auditor.saw(audit.cell, 1e-5, None)
        assert engine.shadow.auditor.promise(audit.cell).bound is not None
    child = os.fork()
    if not child:  # it dies right behind the alarm
        threading.Timer(30, os.kill, (os.getpid(), signal.SIGKILL)).start()
        engine = Engine(tiny(), home=tmp_path, repair="none", audit=1.0)
        for seed in range(30):
            asked(engine, f"d{seed}", seed + 3).generate(2, ignore_eos=True)
            if any(audit.alarm for audit in engine.audit()):
                break
        file = engine.shadow._file
        assert file is not None
        file._writing.acquire()  # whoever writes has written
        file._writing.release()
        while file._news is not None:
            pass
        with file._writing:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with Engine(tiny(), home=tmp_path, repair="none", audit=1.0) as engine:
        promise = engine.shadow.auditor.promise(audit.cell)
        assert promise.alarm and promise.bound is None


def test_news_are_written_while_nobody_waits_and_the_last_ones_stay(tmp_path: Path) -> None:
    file = LearnedFile(tmp_path / "it.json")
    with file._writing:  # a disk that is slow
        for n in range(5):
            file.later({"n": n})
        assert not file.path.exists()
    file.now({"n": 5})
    with file._writing:
        assert '"n": 5' in file.path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["it.json"]

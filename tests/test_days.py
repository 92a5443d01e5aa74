"""What a run that does not ask all cases leaves to other days. python -m pytest tests/test_days.py"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import conftest
import days
import pytest

MANY = "test_many", 10, pytest.mark.sampled.mark
Run = Callable[[int], tuple[list[str], Any]]


class Case:
    """A case as a collector finds it."""

    def __init__(self, test: str, i: int, mark: pytest.Mark | None) -> None:
        self.nodeid = f"{test}[{i}]"
        self.marks = [mark] if mark else []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Collect, as `.ci/run` does, on a day; return the cases that are left, and what is known of it."""
    monkeypatch.setenv("PYTEST_WHOLE", "1")
    monkeypatch.setenv(conftest.CASES, "3")

    def collected(day: int) -> tuple[list[str], Any]:
        monkeypatch.setattr(days, "DAY", day)
        tests = (MANY, ("test_plain", 10, None), ("test_few", 3, MANY[2]),
                 ("test_more", 10, pytest.mark.sampled(5).mark),
                 ("test_part", 1, pytest.mark.small.mark))  # fmt: skip
        items: list[Any] = [Case(name, i, mark) for name, n, mark in tests for i in range(n)]
        all_of_them, left = [*items], []
        hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
        config: Any = SimpleNamespace(stash=pytest.Stash(), hook=hook)
        conftest.pytest_collection_modifyitems(config, items)
        assert sorted(map(id, items + left)) == sorted(map(id, all_of_them))
        return [item.nodeid for item in items], config

    return collected


def n_of(cases: list[str], test: str) -> int:
    return sum(case.startswith(test) for case in cases)


def test_each_case_has_its_day(run: Run) -> None:
    asked = [run(day)[0] for day in range(4)]
    for cases in asked:
        assert 2 <= n_of(cases, "test_many") <= 3
        assert n_of(cases, "test_more") == 5, "as many as its mark says"
        assert (n_of(cases, "test_plain"), n_of(cases, "test_few")) == (10, 3)
        assert n_of(cases, "test_part") == 0, "a slow test asks that"
    assert len({case for cases in asked for case in cases}) == 33
    assert run(0)[0] == asked[0] != asked[1], "the same day, the same cases"


def test_all_are_asked_by_who_names_them_or_sets_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_WHOLE", "")
    assert len(run(0)[0]) == 34
    monkeypatch.setenv("PYTEST_WHOLE", "1")
    monkeypatch.delenv(conftest.CASES)
    assert len(run(0)[0]) == 34


def test_a_worker_tells_how_many_are_left_and_the_run_ends_with_it(run: Run) -> None:
    cases, worker = run(0)
    worker.workeroutput = {}
    conftest.pytest_sessionfinish(SimpleNamespace(config=worker))  # type: ignore[arg-type]
    whole = SimpleNamespace(stash=pytest.Stash())
    conftest.pytest_testnodedown(SimpleNamespace(config=whole, workeroutput=worker.workeroutput))
    conftest.pytest_testnodedown(SimpleNamespace(config=whole))  # one that died
    said: list[str] = []
    reporter: Any = SimpleNamespace(stats={}, config=whole, line=said.append)
    conftest.pytest_terminal_summary(reporter)
    assert said == [
        f"{33 - len(cases)} cases of 2 tests are left to other days: make test-slow asks all"
    ]

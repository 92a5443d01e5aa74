"""The system gives no thread: not the first that is asked for, not the second, and so on."""

from __future__ import annotations

import _thread
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store.faults.verbs import (
    KINDS,
    Oracle,
    Verdict,
    ask,
    chunks,
    durable_put,
    examine,
    model,
    open_engine,
    settle,
    tier_at,
)

START = _thread.start_new_thread
TOLD = chunks(2)


class Miser:
    """Gives threads, but not those from number ``first`` on, ``n`` of them."""

    def __init__(self, first: int, n: int) -> None:
        self.asked, self.first, self.n = 0, first, n

    def __call__(self, *args: Any) -> int:
        self.asked += 1
        if self.first <= self.asked < self.first + self.n:
            raise RuntimeError("can't start new thread")
        return START(*args)


@pytest.fixture(scope="module")
def truth() -> Iterator[Oracle]:
    oracle = Oracle(model())
    yield oracle
    oracle.engine.close()


def live(truth: Oracle, home: Path, tiers: tuple[str, ...]) -> tuple[Verdict, set[str]]:
    """Put, and answer from below memory; return what was refused, and what was acknowledged."""
    verdict, kept = Verdict(), set()
    for _ in range(2):  # the second engine loads what the first one wrote
        engine = verdict.timed("open", 60, lambda: open_engine(truth.runner, home, tiers))
        if engine is None:
            continue
        for name, tokens in TOLD.items():
            if name not in engine.table.names():
                before = len(verdict.errors) + len(verdict.hintless)
                verdict.timed(name, 60, lambda e=engine, n=name, t=tokens: durable_put(e, n, t))
                if len(verdict.errors) + len(verdict.hintless) == before:
                    kept.add(name)
            if name in engine.table.names():
                found = verdict.timed(name, 60, lambda e=engine, n=name: ask(e, n))
                if found not in (truth.answer(tokens), None):
                    verdict.wrong.append(name)
        verdict.timed("settle", 60, lambda e=engine: settle(e))
        verdict.timed("close", 60, engine.close)
    return verdict, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n"),
    [*itertools.product(sorted(KINDS & {"disk", "files", "s3"}), (1, 1000)), ("disk", 3)],
)
@pytest.mark.sampled
def test_each_thread_that_is_not_given(
    truth: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, n: int
) -> None:
    refused = 0
    for first in itertools.count(1):
        home = tmp_path / str(first)
        (home / "s3").mkdir(parents=True)
        spec = f"s3 url=file://{home}/s3" if kind == "s3" else tier_at(home / "tier")
        miser = Miser(first, n)
        monkeypatch.setattr(_thread, "start_new_thread", miser)
        verdict, kept = live(truth, home, (spec,))
        monkeypatch.setattr(_thread, "start_new_thread", START)
        assert not verdict.faults, f"without thread {first}: {verdict.faults}"
        told = {
            name: (tokens,) if name in kept else (tokens, None) for name, tokens in TOLD.items()
        }
        after = examine(truth, home, (spec,), told, kept)
        assert not after.faults, f"after a life without thread {first}: {after.faults}"
        assert not after.refused, f"after a life without thread {first}: {after.refused}"
        refused += len(verdict.errors)
        if miser.asked < first:
            break
    assert first > 3, "no life needs threads"
    assert refused, "nothing was ever refused"

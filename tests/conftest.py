from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

import torch

if not torch.cuda.is_available():  # read when Triton is imported, which transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

import needs
import oracle
import pytest

import kvweave
from kvweave.run.model import Runner

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # beside vLLM there is none
    pass
else:  # a busy machine is no fault of what is tested
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

BUNDLED = Path(__file__).parents[1] / "src" / "kvweave" / "demo" / "model"


def pytest_collection_finish() -> None:
    """Spare the collector what was imported: to go through it takes up to a second, each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """What a bench sets holds for its own test: with two threads those behind it take ten times as long."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was skipped, and what would enable it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped")
        for line in needs.summary(report.longrepr[2] for report in skipped):
            terminalreporter.line(line)


@cache
def tiny(name: str = "llama", dtype: torch.dtype = torch.float64) -> Runner:
    """A tiny random model of a named architecture, built once per test run."""
    kind, changes = (oracle.MODELS | oracle.FIXED)[name]
    return Runner(oracle.build(kind, changes, dtype), name=name)


@pytest.fixture
def runner() -> Runner:
    return tiny()


@pytest.fixture
def engines() -> Iterator[Callable[..., kvweave.Engine]]:
    """Make engines over tiny models; afterwards each is checked and closed."""
    made: list[kvweave.Engine] = []

    def make(
        name: str = "llama", dtype: torch.dtype = torch.float64, **options: object
    ) -> kvweave.Engine:
        defaults: dict[str, object] = {"repair": "none"}
        made.append(kvweave.Engine(tiny(name, dtype), **(defaults | options)))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


@pytest.fixture(scope="session")
def bundled() -> Path:
    return BUNDLED

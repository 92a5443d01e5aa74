from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import KEYS, METRICS_KEY, Driven, Served, bundled_runner

from kvweave import Engine
from kvweave.serve.app import create_app
from kvweave.serve.options import Options


@pytest.fixture
def drive(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Driven]]:
    """Make driven tiny engines; afterwards each is stopped, then checked."""
    # however slow the machine is: what may begin does before the next step
    monkeypatch.setattr("kvweave.serve.driver.thread.BEGIN_SECONDS", 60.0)
    made: list[Driven] = []

    def make(engine_options: dict[str, Any] | None = None, **options: Any) -> Driven:
        made.append(Driven(engines(**(engine_options or {})), **options))
        return made[-1]

    yield make
    for each in made:
        each.steps.open.set()
        each.driver.stop(grace=0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Make apps over the bundled model that anna and berta have keys of; afterwards each is
    stopped, its engine checked and closed."""
    made: list[Served] = []

    def make(
        home: Any = None,
        engine_options: dict[str, Any] | None = None,
        *,
        start: bool = True,
        **options: Any,
    ) -> Served:
        engine = Engine(
            bundled_runner(), home=home, **({"repair": "none"} | (engine_options or {}))
        )
        given = {"keys": KEYS} | options
        given = ({"metrics_key": METRICS_KEY} if given["keys"] else {}) | given
        served = Served(engine, create_app(engine, Options(**given)))
        made.append(served)
        if start:
            served.start()
        return served

    yield make
    for each in made:
        each.close()

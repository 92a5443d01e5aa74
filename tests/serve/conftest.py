from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import Driven

from kvweave import Engine


@pytest.fixture
def drive(engines: Callable[..., Engine]) -> Iterator[Callable[..., Driven]]:
    """Make driven tiny engines; afterwards each is stopped, then checked."""
    made: list[Driven] = []

    def make(engine_options: dict[str, Any] | None = None, **options: Any) -> Driven:
        made.append(Driven(engines(**(engine_options or {})), **options))
        return made[-1]

    yield make
    for each in made:
        each.steps.open.set()
        each.driver.stop(grace=0)

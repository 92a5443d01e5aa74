from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from routing import FakeWorker, Reply, Routed, Seen, answered, routed


@pytest.fixture
def workers() -> Iterator[Callable[..., list[FakeWorker]]]:
    """Make workers that behave alike, and end them afterwards."""
    made: list[FakeWorker] = []

    def make(
        n: int = 2, behave: Callable[[Seen], Reply] = lambda seen: answered(), **more: Any
    ) -> list[FakeWorker]:
        new = [FakeWorker(behave, **more).start() for _ in range(n)]
        made.extend(new)
        return new

    yield make
    for worker in made:
        worker.stop()


@pytest.fixture
def route() -> Iterator[Callable[..., Routed]]:
    """Make routers before workers, and stop them afterwards."""
    with ExitStack() as stack:

        def make(workers: list[Any], **options: Any) -> Routed:
            return stack.enter_context(routed([worker.url for worker in workers], **options))

        yield make

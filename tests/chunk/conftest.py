from __future__ import annotations

from collections.abc import Iterator

import postgres
import pytest


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Server]:
    if postgres.LACKING:
        pytest.skip(postgres.LACKING)
    with postgres.running() as made:
        yield made

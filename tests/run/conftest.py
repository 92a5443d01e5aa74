from __future__ import annotations

import pytest
from run.backend import BACKENDS, NAMES

from kvweave.run.base import Backend


@pytest.fixture(params=NAMES, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend with each model."""
    kind, name = request.param
    made: Backend = BACKENDS[kind](name)
    return made

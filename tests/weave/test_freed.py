"""Claims about contexts some of whose rows were freed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from world import models

from kvweave import Context, Engine
from kvweave.weave.repair import strategy


def text(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, 64, (n,), generator=generator).tolist()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], repair="auto", share=1.0) as made:
        made.put_many([(f"d{i}", text(20, i)) for i in range(3)])
        yield made


def woven(engine: Engine) -> Context:
    """A context of three chunks, none of whose rows was repaired."""
    context = engine.context("c")
    for i in range(3):
        context.append_chunk(f"d{i}")
    context.weave("none")
    context.session.strategy = strategy("auto")
    return context


def free(context: Context, part: int) -> None:
    """Free all rows of a part, in every layer and head."""
    rows = context.session.state.rows
    placed = context.session.state.woven[part]
    for layer, info in enumerate(context.session.weaver.backend.layers):
        for head in range(info.shape.k_heads):
            rows.free(layer, head, np.arange(*placed.slots))


@pytest.mark.parametrize("n_new", [6, 50])
def test_rows_that_are_freed_are_not_repaired(engine: Engine, n_new: int) -> None:
    """What is computed there is written nowhere."""
    context = woven(engine)
    n_base = len(context.parts) - 3
    free(context, n_base + 1)
    context.append(text(n_new, 9))
    spans = context.weave().spans
    assert spans[n_base + 1].n_repaired == 0
    assert spans[n_base].n_repaired > 0 or spans[n_base + 2].n_repaired > 0

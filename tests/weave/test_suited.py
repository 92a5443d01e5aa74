"""What was measured on some contexts chooses nothing for others: python -m pytest tests/weave/test_suited.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from weave.test_cells import NOTHING, Verb, coded, compressed, foreign
from weave.test_trying import AUTO, BLIND, taught
from weaving import chat, text

from kvweave import Context, Engine, Sampling
from kvweave.weave.calibration import Calibration
from kvweave.weave.learning import LEAST

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
Case = tuple[
    dict[str, Any], dict[str, Any], Verb
]  # options of an engine, of a context; what is done


def gap(engine: Engine, context: Context, name: str) -> None:
    context.weave()
    context.drop(1)
    context.drop(1)


CASES: dict[str, Case] = {
    "8-bit rows": ({"rows": "int8"}, {}, NOTHING),
    "a codec": ({}, {}, coded("int4")),
    "what was thinned": ({}, {}, compressed("kvzip:0.5")),
    "evict": ({}, {"prune": "evict"}, NOTHING),
    "a token policy": ({}, {"keep": "streaming:32"}, NOTHING),
    "another base": ({}, {}, foreign),
    "gaps": ({}, {"prune": "forget", "positions": "keep"}, gap),
}


def recomputed(
    engine: Engine, name: str, how: tuple[dict[str, Any], Verb]
) -> tuple[list[int], str]:
    """Which rows an answer's repair took, and the strategy of its cell."""
    context = chat(engine, name, [20, 20, 20, 20], **how[0])
    how[1](engine, context, name)
    context.append(text(4, 5))
    turn = context.begin(Sampling(max_tokens=2, ignore_eos=True))
    wove = turn._weaving
    turn.run()
    [sample] = engine.shadow._waiting or [None]
    engine.shadow.spare()
    engine.close_context(name)
    return [*map(int, wove.computed), *map(int, wove.ahead)], sample and sample.cell.repair


@pytest.mark.parametrize("by", ["learned", "calibrated"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_measured_elsewhere_chooses_nothing(
    engines: Make, tmp_path: Path, case: str, by: str
) -> None:
    """Not rows alone: nothing that bounds, or an alarm, goes by is of the way that was chosen either."""
    options, *how = CASES[case]
    engine = engines(home=tmp_path / "home", **(AUTO | options))
    before = recomputed(engine, "one", (how[0], how[1]))
    choose(engine, by)
    assert recomputed(engine, "two", (how[0], how[1])) == before


@pytest.mark.parametrize("by", ["learned", "calibrated"])
def test_what_was_measured_on_contexts_like_it_does(engines: Make, by: str) -> None:
    engine = engines(**AUTO)
    rows, cell = recomputed(engine, "one", ({}, NOTHING))
    choose(engine, by)
    other_rows, other = recomputed(engine, "two", ({}, NOTHING))
    assert other == f"auto:{BLIND}" != cell and other_rows != rows


def choose(engine: Engine, by: str) -> None:
    if by == "learned":
        taught(engine.shadow.auditor.learner, LEAST)
    else:
        engine.weaver.calibration = Calibration(
            tiny().fingerprint, 0.0, 0, (), recipes=((0.25, BLIND),)
        )


def test_rows_at_random_are_told_apart(engines: Make) -> None:
    """`auto:evidence` looks and repairs others besides, whatever the way."""
    engine = engines(**AUTO)
    choose(engine, "learned")
    cells = {recomputed(engine, f"c{i}", ({"repair": how}, NOTHING))[1]
             for i, how in enumerate(("auto", "auto:evidence"))}  # fmt: skip
    assert len(cells) == 2

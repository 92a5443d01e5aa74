"""The engine against its twin, through random verbs. python -m pytest tests/world

The quick part plays 2,000 steps, ``-m slow`` 100,000 more (KVWEAVE_WORLD_STEPS says otherwise). A
failure prints the verbs that lead to it, as few as were found, and how to play them again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from oracle import DEVICE
from recorded import Played

from kvweave import Context, Plan, Runner
from kvweave.run.pool import Pools
from world import memory, play

LONG = int(os.environ.get("KVWEAVE_WORLD_STEPS", 100_000))
PARTS = 40
DRAWN = 60  # verbs drawn for one world, of which some cannot happen


def many(first_world: int, n_steps: int) -> set[str]:
    """Play worlds one after the other; return the verbs that happened."""
    done, verbs = 0, set()
    while done < n_steps:
        steps = play.play(first_world, DRAWN)
        done, verbs, first_world = done + len(steps), verbs | {v for v, _ in steps}, first_world + 1
    return verbs


@pytest.mark.parametrize("part", range(8))
@pytest.mark.sampled
def test_the_engine_does_what_its_twin_does(part: int) -> None:
    verbs = many(1000 * part, 250)
    assert len(verbs) > 0.7 * len(play.VERBS), f"only {verbs}"


@pytest.mark.slow
def test_so_it_does_where_rows_stand_in_pools_and_passes_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way of GPUs, without one."""
    if DEVICE.type == "cuda":
        return  # all of them go this way
    init = Pools.__init__

    def recorded(self: Pools, infos: Any, dtype: Any, device: Any) -> None:
        init(self, infos, dtype, device)
        self.graphs = Played(device)

    monkeypatch.setattr(Runner, "pooled", True)
    monkeypatch.setattr(Pools, "__init__", recorded)
    monkeypatch.setattr(memory, "alive", lambda: 0)  # pools have room to spare
    many(3000, 250)


FOUND: list[tuple[int, play.Steps]] = [
    # repaired rows of a part that an evict froze were put over exact ones
    (1005004, [("open_context", 3213378971), ("ask", 161695673), ("put", 276107682), ("begin", 524599325),
     ("evict", 2361065444), ("begin", 1293630333), ("cancel", 582925326), ("fault", 1332109852)]),
    # the twin's own: a strategy that a weave was told stays, and so do its bounds
    (1030056, [("compose", 1827881629), ("weave", 355516254), ("fault", 2313931661)]),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "steps"), FOUND)
def test_what_differed_once_does_not_any_more(seed: int, steps: play.Steps) -> None:
    assert len(play.replay(seed, steps)) == len(steps), "the verbs draw otherwise: find it anew"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(10)
def test_the_engine_does_what_its_twin_does_for_long(part: int) -> None:
    many(1_000_000 + 1000 * part, LONG // PARTS)


def _all_exact(plan: Plan) -> Plan:
    return replace(plan, drift=0.0, spans=tuple(replace(s, exact=True) for s in plan.spans))


LIES: dict[str, Any] = {
    "append": lambda true: lambda self, content, **options: true(self, [9, 9], **options),
    "weave": lambda true: lambda self, *a, **options: _all_exact(true(self, *a, **options)),
    "drop": lambda true: lambda self, *refs, **options: None,
    "tokens": lambda true: lambda self: [*true(self), 9],
}


@pytest.mark.parametrize("verb", LIES)
def test_what_lies_is_found_and_the_way_to_it_is_short(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, verb, LIES[verb](getattr(Context, verb)))
    with pytest.raises(play.Difference) as found:
        for seed in range(50):
            play.play(seed, DRAWN)
    assert len(found.value.steps) <= 6
    with pytest.raises(play.Difference, match="again: play"):
        play.replay(found.value.seed, found.value.steps)

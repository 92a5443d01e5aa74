"""Strategies by name, and against the oracle: python -m pytest tests/weave/test_strategies.py"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from weaving import EXACT, again, chat, rows, text

from kvweave import Engine
from kvweave.cli import parser, values
from kvweave.errors import InvalidArgument
from kvweave.weave.repair import (
    STRATEGIES,
    Boundary,
    Deviation,
    FirstK,
    Full,
    PatchRepair,
    strategy,
)

Make = Callable[..., Engine]
REACH_ALL = sorted(set(STRATEGIES) - {"none", "first_k"})


@pytest.mark.parametrize("which", REACH_ALL)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
def test_a_share_of_one_equals_full_prefill(engines: Make, name: str, which: str) -> None:
    engine = engines(name)
    context = chat(engine, "c", [6, 9, 4], repair=which, share=1.0)
    context.append(text(3, 77))
    plan = context.weave()
    found = context.check()
    assert plan.repaired == 13 and plan.prefilled == 3
    assert found.kl < 1e-12 and max(*found.k_error, *found.v_error) < EXACT


def test_options_stand_behind_the_name() -> None:
    for which in ("deviation:k@2", "deviation:2@k"):
        made = strategy(which)
        assert isinstance(made, Deviation) and (made.layer, made.what) == (2, "k")
    made = strategy("deviation:kv")
    assert isinstance(made, Deviation) and (made.layer, made.what) == (1, "kv")
    made = strategy("deviation:0")
    assert isinstance(made, Deviation) and (made.layer, made.what) == (0, "v")
    made = strategy("first_k:16")
    assert isinstance(made, FirstK) and made.k == 16
    made = strategy("patch:8")
    assert isinstance(made, PatchRepair) and made.rank == 8
    made = strategy("full:records")
    assert isinstance(made, Full) and made.records and made.name == "full"


@pytest.mark.parametrize(
    ("which", "message", "hint"),
    [
        ("magic:2", "no strategy 'magic'", "one of auto"),
        ("query:3", "query has no option '3'", "query takes no options"),
        ("patch:x", "patch has no option 'x'", "behind 'patch:' may stand its rank"),
        ("patch:", "patch has no option ''", "its rank"),
        ("patch:2@4", "patch has no option '4'", "its rank"),
        ("patch:0", "0 is below 1", ""),
        ("first_k:0", "0 is below 1", ""),
        ("first_k:-1", "no option '-1'", "its k"),
        ("deviation:q", "'q' is none of k, v, kv", ""),
        ("deviation:k@v", "no option 'v'", "its layer @ its what"),
        ("full:record", "no option 'record'", "its flag records"),
    ],
)
def test_options_that_make_no_sense_are_refused(which: str, message: str, hint: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as error:
        strategy(which)
    assert hint in str(error.value.hint)


def test_the_shell_knows_the_same_names() -> None:
    assert set(values.STRATEGIES) == set(STRATEGIES)
    words = ["run", "so", "--repair"]
    assert parser.parse([*words, "deviation:k@2"]).repair == "deviation:k@2"
    with pytest.raises(parser.UsageError, match="no strategy 'magic:2': one of"):
        parser.parse([*words, "magic:2"])


def test_options_reach_a_context(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 4], repair="first_k:3")
    assert [s.n_repaired for s in context.weave().spans] == [0, 0, 3, 3]
    with pytest.raises(InvalidArgument, match="has no option"):
        context.weave("first_k:many")


class SpyBoundary(Boundary):
    chosen: list[int]

    def choose(self, view):  # type: ignore[no-untyped-def]
        slots = super().choose(view)
        self.chosen = slots.tolist()
        return slots


def test_boundary_takes_the_rows_nearest_to_seams(engines: Make) -> None:
    """The parts begin at slots 0, 5, 11, 20 and 24; the first two are exact."""
    engine = engines()
    for share, wanted in (
        (4 / 13, [11, 19, 20, 23]),
        (6 / 13, [11, 12, 18, 19, 20, 23]),
        (9 / 13, [11, 12, 13, 18, 19, 20, 21, 22, 23]),
    ):
        spy = SpyBoundary()
        context = chat(engine, f"c{share}", [6, 9, 4], repair=spy, share=share)
        context.append(text(3, 77))
        plan = context.weave()
        assert spy.chosen == wanted and plan.repaired == len(wanted)


def test_boundary_without_text_behind_has_no_seam_at_the_end(engines: Make) -> None:
    spy = SpyBoundary()
    chat(engines(), "c", [6, 9, 4], repair=spy, share=3 / 13).weave()
    assert spy.chosen == [11, 19, 20]


def test_boundary_of_a_hole_is_the_text_around_it(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [6, 9])
    spy = SpyBoundary()
    context = engine.context("hole", repair=spy, share=4 / 15)
    context.set_base(first.parts[0].id, "base")
    context.append(text(3, 80))
    context.append_chunk("c/0")
    context.append_chunk("c/1")
    context.append(text(2, 81))
    context.weave()
    assert spy.chosen == [8, 13, 14, 22]


def test_boundary_sees_no_seam_between_survivors_that_saw_each_other(engines: Make) -> None:
    engine = engines()
    spy = SpyBoundary()
    context = engine.context("c", prune="evict", denoise=False, repair=spy, share=3 / 14)
    for i, n in enumerate((5, 8, 6, 8)):
        context.append(text(n, i), name=f"c/{i}")
    context.weave()
    context.drop("c/1")
    context.weave()
    assert spy.chosen == [5, 6, 7], "of slots 5..18, from where the part was cut out"


def test_boundary_is_nearer_to_the_oracle_than_nothing(engines: Make) -> None:
    engine = engines()
    rough = chat(engine, "c", [6, 9, 4])
    rough.append(text(3, 77))
    rough.weave()
    fine = again(engine, "d", rough, repair="boundary", share=0.5)
    fine.weave()
    assert fine.check().v_error[-1] < rough.check().v_error[-1]
    assert bool(torch.isfinite(rows(fine).read(3)[1]).all())

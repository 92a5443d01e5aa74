"""The bench of models: its worlds are true, its costs add up, and no constant sees its own model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules, imported as scripts do."""
    sys.path.insert(0, str(BENCH))
    try:
        import regret
        from models import worlds, zoo

        yield SimpleNamespace(regret=regret, worlds=worlds, zoo=zoo)
    finally:
        sys.path.remove(str(BENCH))


def matches(template: str, words: list[str]) -> dict[str, str] | None:
    """Read a sentence back: what its capitals stand for, or None."""
    parts, found = template.split(), {}
    if len(parts) != len(words):
        return None
    for part, word in zip(parts, words, strict=True):
        if part in "EAVF":
            found[part] = word
        elif part != word:
            return None
    return found


@pytest.mark.parametrize("name", ["llama-one", "qwen3-last", "neox-first", "gemma3-slide"])
@pytest.mark.parametrize("one_key", [True, False])
def test_replies_are_what_a_reader_of_the_sentences_says(bench: Any, name: str, one_key: bool) -> None:  # fmt: skip
    """An interpreter that only has the words: the last statement counts, "it" is who was named before."""
    wording = bench.regret.kind_of(name).wording
    _, attributes, values = wording.parts()
    for seed in range(6):
        world = bench.worlds.World(
            wording, bench.worlds.Size(30, one_key), bench.worlds.random.Random(seed)
        )
        held: dict[tuple[str, str], str] = {}
        last = ""
        for _ in range(30):
            world.say()
            words = world.sentences[-1]
            for template in (wording.change, wording.alias, wording.pronoun, wording.fact):
                said = matches(template, words)
                if said is None or said["A"] not in attributes:
                    continue
                if "V" in said and said["V"] not in values:
                    continue
                entity = said.get("E", last)
                value = said["V"] if "V" in said else held[said["F"], said["A"]]
                held[entity, said["A"]], last = value, entity
                break
        assert held == {key: fact.value for key, fact in world.facts.items()}
        for _ in range(12):
            kind, asked, reply = world.question()
            said = matches(wording.ask, asked)
            assert said is not None and held[said["E"], said["A"]] in reply
            assert reply[-1] == bench.worlds.END and kind in (
                "recall",
                "change",
                "pronoun",
                "alias",
            )


def test_every_word_of_a_document_is_in_the_vocabulary(bench: Any) -> None:
    for kind in bench.zoo.ZOO:
        if kind.wording is None:
            continue
        known = set(kind.wording.words())
        assert len(known) == len(kind.wording.words())
        for seed in range(4):
            size = bench.worlds.Size(24, seed % 2 == 0)
            words, replies = bench.worlds.document(kind.wording, size, 8, str(seed))
            assert set(words) <= known and replies
            assert all(words[b - 1] == bench.worlds.END for _, b, _ in replies)


def test_a_cost_is_what_comes_on_top_of_the_question(bench: Any) -> None:
    question = SimpleNamespace(asked=(1,) * 5, expected=(1,) * 2)
    paper = SimpleNamespace(questions=[question] * 4, notes=[("a", (1,) * 50), ("b", (1,) * 50)])
    # four weaves: a look of 5 rows, 10 repaired with the question, a reply of 2; three passes each
    found = bench.regret.cost(paper, (4 * (5 + 15 + 2), 12), False)
    assert found == pytest.approx((5 + 10) / 100 + bench.regret.PASS)
    # one weave of 10 rows for all, then a pass of 4 questions with their replies
    found = bench.regret.cost(paper, (10 + 4 * (5 + 1), 5), True)
    assert found == pytest.approx(10 / 100 + bench.regret.PASS)


def test_the_best_single_strategy_is_taken_at_the_same_cost(bench: Any) -> None:
    frontier = bench.regret.frontier
    points = [(0.1, 0.1), (0.2, 0.001)]
    assert frontier(points, 0.15) == pytest.approx(0.01)  # on the straight line of the logarithm
    assert frontier(points, 0.05) == float("inf") and frontier(points, 0.9) == pytest.approx(0.001)


def test_what_is_chosen_for_a_model_does_not_look_at_it(bench: Any) -> None:
    def row(model: str, strategy: str, regret: float) -> dict[str, Any]:
        return {"model": model, "strategy": strategy, "share": 0.05, "regret": regret}

    rows = [
        row("a", "x", 9.0), row("a", "y", 1.0), row("b", "x", 1.0), row("b", "y", 2.0),
        row("c", "x", 1.5), row("c", "y", 3.0),
    ]  # fmt: skip
    found = {r["left_out"]: (r["chosen"], r["regret"]) for r in bench.regret.left_out(rows, ("x", "y"))}  # fmt: skip
    assert found == {"a": ("x", 9.0), "b": ("y", 2.0), "c": ("y", 3.0)}


def test_a_trained_model_is_measured(bench: Any) -> None:
    """`query` and `auto` against no repair, on the committed weights of one model."""
    methods = [m for m in bench.regret.methods() if m.label in ("none 0%", "query 30%", "auto 30%")]
    cells = bench.regret.measure("qwen3-last", methods, 2)
    kl = {label: sum(map(sum, cell.kl)) for label, cell in cells.items() if cell.kl}
    assert kl["auto 30%"] < kl["none 0%"] / 2
    assert cells["none 0%"].cost == pytest.approx([0.0, 0.0], abs=1e-9)
    assert all(0.25 < cost < 0.6 for cost in cells["auto 30%"].cost)
    assert cells["full prefill"].right and not cells["full prefill"].kl

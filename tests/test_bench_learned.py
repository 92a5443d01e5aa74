"""The bench of what is learned at rest: who teaches is not asked, and what is planted is found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benches import on_path

BLIND = "0@3@1"


@pytest.fixture(scope="module")
def learned() -> Iterator[ModuleType]:
    with on_path():
        import learned

        yield learned


def cells(learned: ModuleType, best: str) -> dict[str, object]:
    """Twelve documents of four questions: one way is ten times nearer, single strategies are as `auto`."""
    chance = random.Random(best)

    def cell(kl: float, cost: float) -> object:
        told = [[kl * chance.uniform(0.8, 1.25) for _ in range(4)] for _ in range(12)]
        return learned.Cell(told, told, [cost] * 12)

    made = {"none 0%": cell(1.0, 0.0)}
    for share in learned.SHARES:
        for recipe in learned.RECIPES:
            made[f"auto:{recipe} {share:.0%}"] = cell(0.02 if recipe == best else 0.2, share)
        made[f"auto {share:.0%}"] = made[f"auto:{learned.USUAL} {share:.0%}"]
        made |= {f"{each} {share:.0%}": cell(0.2, share) for each in learned.SINGLE}
    return made


@pytest.mark.parametrize("best", [BLIND, "2@0@2"])
def test_what_is_nearest_is_learned_and_told_of_others(
    learned: ModuleType, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "ways_of", lambda name, n, cache: cells(learned, best))
    asked, teachers = list[set[int]](), list[set[int]]()
    taught, regret_of = learned.taught, learned.regret_of

    def teaching(
        cells: object, share: float, who: list[tuple[int, int]], counts: list[int]
    ) -> object:
        teachers.extend([{document for document, _ in who}] * len(counts))
        return taught(cells, share, who, counts)

    def asking(cells: object, share: float, recipe: str, documents: list[int]) -> object:
        asked.append(set(documents))
        return regret_of(cells, share, recipe, documents)

    monkeypatch.setattr(learned, "taught", teaching)
    monkeypatch.setattr(learned, "regret_of", asking)
    out = tmp_path / "x.json"
    learned.main(["m", "--draws", "3", "--out", str(out)])
    assert all(not a & b for a, b in zip(asked, teachers, strict=True)) and all(teachers)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(learned.SHARES) * len(learned.ANSWERS)
    for row in rows:
        if row["answers"]:
            assert row["recipe"] == best and row["of_draws"] == 1 and row["over_usual"] < 0.2
            assert 0.05 < row["regret"] < 0.2
        else:
            assert row["recipe"] == learned.USUAL and row["over_usual"] == 1
            assert 0.6 < row["regret"] < 1.6

"""What is learned while nobody asks: regret after so many answers that were woven again in all ways.

::

    documents    half of them, drawn      answers of these teach (`kvweave.weave.learning`)
                 the other half           the regret of what was learned, at its own cost (bench/regret.py)

Each draw is another half, and another order of answers, which come again where there are no more. A
model that has learned nothing yet repairs as `auto` does. The documents are others than those of bench/regret.py, but for the models of prose.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine, progress, table
from regret import CACHE, FLOOR, SHARES, SINGLE, Cell, cache_file, measure, methods
from rich.console import Console

from kvweave.suite import choose
from kvweave.suite.method import Method
from kvweave.weave.learning import Learner
from kvweave.weave.recipes import NONE, RECIPES, USUAL, reached

ANSWERS = (0, 16, 64, 256, 1024)
DRAWS = 100
SEED = "learned"
FINER = (0.2, 0.4)  # of single strategies: what they reach in between is no guess then


def ways_of(name: str, n: int, cache: Path) -> dict[str, Cell]:
    """Return the cells of all ways, and of single strategies; what was measured of these weights before is read."""
    file = cache_file(name, n, cache, "learned-")
    told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    single = [m for m in methods() if m.name in (NONE, "auto", *SINGLE)]
    single += [Method(each, share, modes=("forget",)) for each in SINGLE for share in FINER]
    ways = [m for m in choose.methods(SHARES) if m.name != f"auto:{USUAL}"]
    if missing := [m for m in (*single, *ways) if m.label not in told]:
        found = measure(name, missing, n, SEED)
        told |= {label: asdict(cell) for label, cell in found.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told))
    known = {label: Cell(**cell) for label, cell in told.items()}
    return known | {f"auto:{USUAL} {share:.0%}": known[f"auto {share:.0%}"] for share in SHARES}


def taught(
    cells: dict[str, Cell], share: float, teachers: Sequence[tuple[int, int]], counts: Sequence[int]
) -> list[str]:
    """Return what an engine has learned after so many answers: of (document, question), again where they end."""
    learner, chosen = Learner(), []
    mine = {
        way: cells[f"{way} 0%" if way == NONE else f"auto:{way} {share:.0%}"]
        for way in (NONE, *RECIPES)
    }
    known = [
        {
            way: (c.kl[document][question], 0.0 if way == NONE else c.cost[document])
            for way, c in mine.items()
        }
        for document, question in teachers
    ]
    before = 0
    for n in counts:
        for i in range(before, n):
            learner.saw("", share, known[i % len(known)])
        before = n
        chosen.append(learner.recipe("", share) or USUAL)
    return chosen


def regret_of(
    cells: dict[str, Cell], share: float, recipe: str, asked: Sequence[int]
) -> tuple[float, float]:
    """Return the regret of a recipe on these documents, and its KL over that of `auto` at the same share."""

    def of(cell: Cell) -> tuple[float, float]:
        return fmean(cell.cost[i] for i in asked), fmean(x for i in asked for x in cell.kl[i])

    points: dict[str, list[tuple[float, float]]] = {}
    for label, cell in cells.items():
        if label.split()[0] in SINGLE:
            points.setdefault(label.split()[0], []).append(of(cell))
    cost, kl = of(cells[f"auto:{recipe} {share:.0%}"])
    least = min(reached(each, cost) for each in points.values())
    return (kl + FLOOR) / (least + FLOOR), (kl + FLOOR) / (
        of(cells[f"auto {share:.0%}"])[1] + FLOOR
    )


def rows_of(name: str, cells: dict[str, Cell], draws: int) -> list[dict[str, Any]]:
    """Return a row for each share and number of answers."""
    made = []
    for share in SHARES:
        usual = cells[f"auto {share:.0%}"]
        found: dict[int, list[tuple[float, float, str]]] = {n: [] for n in ANSWERS}
        for draw in range(draws):
            chance = random.Random(f"{name}/{share}/{draw}")
            documents = list(range(len(usual.kl)))
            chance.shuffle(documents)
            half = len(documents) // 2
            teachers = [(d, q) for d in documents[:half] for q in range(len(usual.kl[d]))]
            chance.shuffle(teachers)
            for n, recipe in zip(ANSWERS, taught(cells, share, teachers, ANSWERS), strict=True):
                found[n].append((*regret_of(cells, share, recipe, documents[half:]), recipe))
        for n, told in found.items():
            (recipe, times), *_ = Counter(each[2] for each in told).most_common()
            ratios = sorted(each[0] for each in told)
            made.append({
                "model": name, "documents": len(usual.kl), "share": share, "answers": n,
                "regret": round(exp(fmean(map(log, ratios))), 3),
                "between": [round(float(np.quantile(ratios, at)), 3) for at in (0.05, 0.95)],
                "over_usual": round(exp(fmean(log(each[1]) for each in told)), 3),
                "recipe": recipe, "of_draws": round(times / draws, 2),
            })  # fmt: skip
    return made


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print regrets by model and share, and how many are above 1.2."""
    at = {(r["model"], r["share"], r["answers"]): r for r in rows}
    body = [
        (model, f"{share:.0%}", *(f"{at[model, share, n]['regret']:.2f}" for n in ANSWERS),
         at[model, share, ANSWERS[-1]]["recipe"])
        for model, share in dict.fromkeys((r["model"], r["share"]) for r in rows)
    ]  # fmt: skip
    console = Console(width=None if Console().is_terminal else 120)
    head = ["model", "share", *(f"{n} answers" for n in ANSWERS), "learned most often"]
    console.print(table("regret after so many answers", head, body))
    for n in ANSWERS:
        mine = [r["regret"] for r in rows if r["answers"] == n]
        mean = exp(fmean(map(log, mine)))
        console.print(
            f"{n}: {sum(x > 1.2 for x in mine)} of {len(mine)} above 1.2, worst {max(mine):.2f}, mean {mean:.2f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="+", help="models of bench/models, NAME or NAME:DOCUMENTS")
    made.add_argument("--n", type=int, default=32, help="documents a model")
    made.add_argument("--draws", type=int, default=DRAWS)
    made.add_argument("--cache", type=Path, default=CACHE)
    made.add_argument("--out", type=Path, default=RESULTS / "learned.json")
    options = made.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with progress("models", len(options.names)) as step:
        for each in options.names:
            name, _, n = each.partition(":")
            rows += rows_of(name, ways_of(name, int(n or options.n), options.cache), options.draws)
            step(name)
    setup = {"draws": options.draws, "answers": ANSWERS}
    told = {"machine": machine(torch.device("cpu")), "setup": setup, "rows": rows}
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()

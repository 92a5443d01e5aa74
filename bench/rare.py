"""Does what is learned hold for questions that are seldom asked?

On the bundled model, as if it had no calibration. Most questions of the fidelity suite are found in one
note, as any way to repair finds them; of *references* (P2, P7) the note that answers names another one, and
most ways lose them. Each way is measured on both, then many streams of answers are drawn, all audited::

    stream    so many references among the answers, in random order
    told      of these how many are right, and the KL of all answers over that of the usual way
    beside    a learner that takes any way which came nearer so far, whatever it has earned
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from common import RESULTS, machine, progress, table
from rich.console import Console

from kvweave.run.model import Runner
from kvweave.suite.exam import Exam
from kvweave.suite.method import Method
from kvweave.suite.protocols import cases
from kvweave.weave import learning
from kvweave.weave.learning import WAYS, Learned, Tried
from kvweave.weave.recipes import NONE, RECIPES, USUAL

MODEL = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
PLAIN, REFERENCES = ("P1", "P3", "P4", "P8"), ("P2", "P7")
OFTEN = (0.0, 0.005, 0.02, 0.1)  # of answers
ANSWERS, STREAMS, SEED = 400, 40, "rare"

Asked = tuple[
    Tried, dict[str, float]
]  # of a question: what its answer teaches, and where it is right


def measured(n: int, share: float, model: Path = MODEL) -> dict[str, list[Asked]]:
    """Return what all ways come to on ``n`` questions of each protocol."""
    exam = Exam(Runner.load(str(model), device="cpu"), evidence=False)
    ways = [Method(NONE, modes=("forget",))]
    ways += [Method(f"auto:{recipe}", share, modes=("forget",)) for recipe in RECIPES]
    found: dict[str, list[Asked]] = {}
    with progress("protocols", len(PLAIN + REFERENCES)) as step:
        for name in PLAIN + REFERENCES:
            mine: list[Asked] = []
            for i, case in enumerate(itertools.islice(cases(name, SEED), n)):
                asked: dict[int, Asked] = {}
                for trial in exam.sit(exam.words.paper(case, i), ways):
                    way = trial.method.split()[0].removeprefix("auto:")
                    if way in WAYS:
                        told, right = asked.setdefault(trial.item, ({}, {}))
                        told[way] = trial.kl, 0.0 if way == NONE else trial.cost  # type: ignore[index]
                        right[way] = trial.right
                mine += asked.values()
                if len(mine) >= n:
                    break
            found[name] = mine[:n]
            step(name)
    exam.close()
    return found


def stream(
    found: dict[str, list[Asked]], often: float, chance: random.Random
) -> tuple[float, float, list[float]]:
    """Return the KL (nats) of all answers of a stream, in the way that was learned until each and in the
    usual one, and how many references were right."""
    learned, mine, usual, right = Learned(), 0.0, 0.0, list[float]()
    for _ in range(ANSWERS):
        rare = chance.random() < often
        told, goes = chance.choice(found[chance.choice(REFERENCES if rare else PLAIN)])
        mine += told[learned.recipe][0]
        usual += told[USUAL][0]
        right += [goes[learned.recipe]] if rare else []
        learned.saw(told)
    return mine, usual, right


def rows_of(found: dict[str, list[Asked]], streams: int) -> list[dict[str, Any]]:
    """Return a row for each share of references, of the learner and of one that asks for nothing earned."""
    made = []
    for often, earns in itertools.product(OFTEN, (True, False)):
        told = learning.EARNED if earns else -learning.AHEAD * ANSWERS
        low = learning.BEHIND if earns else 0.0  # nothing is ever lost then
        with mock.patch.multiple(learning, EARNED=told, BEHIND=low):
            each = [stream(found, often, random.Random(f"{SEED}/{i}")) for i in range(streams)]
        right = [x for *_, asked in each for x in asked]
        made.append({
            "references": often, "earned": learning.EARNED if earns else None,
            "right": round(fmean(right), 3) if right else None, "asked": len(right),
            "kl": round(fmean(mine for mine, *_ in each) / ANSWERS, 6),
            "usual_kl": round(fmean(usual for _, usual, _ in each) / ANSWERS, 6),
        })  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--n", type=int, default=48, help="questions a protocol")
    made.add_argument("--share", type=float, default=0.05)
    made.add_argument("--streams", type=int, default=STREAMS)
    made.add_argument("--out", type=Path, default=RESULTS / "rare.json")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    found = measured(options.n, options.share)
    rows = rows_of(found, options.streams)
    alone = {
        name: {way: round(fmean(right[way] for _, right in asked), 3) for way in WAYS}
        for name, asked in found.items()
    }
    setup = {"n": options.n, "share": options.share, "answers": ANSWERS, "streams": options.streams}
    told = {"machine": machine(torch.device("cpu")), "setup": setup, "rows": rows, "right": alone}
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    body = [
        (f"{r['references']:.1%}", "taken as nearer" if r["earned"] is None else "taken as earned",
         "-" if r["right"] is None else f"{r['right']:.3f}", f"{r['kl']:.2g}", f"{r['usual_kl']:.2g}")
        for r in rows
    ]  # fmt: skip
    head = ["references", "a way is", "of these right", "KL of all", "the usual way's"]
    Console().print(table("what is learned, and what is seldom asked", head, body))


if __name__ == "__main__":
    main()

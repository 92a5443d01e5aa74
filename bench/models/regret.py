"""Regret: how much further from a full prefill a strategy is than the best one at the same cost.

Each model of the bench is asked about documents of its own world; prose is continued. The cost of a
strategy is what it computes: rows of all its passes (looks, drafts, rounds) as a share of the
context's, and `PASS` for each pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worlds import BOS, Size, case
from zoo import ZOO, Kind

from kvweave.run.model import Runner
from kvweave.suite import prose, stats
from kvweave.suite.exam import Exam
from kvweave.suite.method import Method
from kvweave.suite.words import Paper, Question

WEIGHTS = Path(__file__).resolve().parent / "weights"
PASS = 0.004  # of the context: a pass of one row took as long as 18 rows more of 4,200 (19 M, CPU)
SENTENCES, NOTES, ASKED = 40, 8, 8
SINGLE = ("random", "first_k", "deviation:v@1", "query", "rollout", "rollout:1@0", "boundary")
SHARES = (0.02, 0.05, 0.10, 0.15, 0.30)
WIDER = (0.5, 0.8)  # of single strategies, so that nothing is compared beyond what was measured


@dataclass
class Cell:
    """One method on one model: KL (nats) and rightness of each question by case, and its cost."""

    kl: list[list[float]] = field(default_factory=list)
    right: list[list[float]] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)


class Counted:
    """Stands before a runner's ``forward`` and counts rows, in passes through all layers."""

    def __init__(self, runner: Runner) -> None:
        self.rows, self.passes = 0.0, 0
        self._forward, self._layers = runner.forward, len(runner.layers)
        runner.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, works: Sequence[Any], *rest: Any, **named: Any) -> Any:
        """Run a pass."""
        for work in works:
            deep = self._layers if work.last is None else work.last
            self.rows += work.n * deep / self._layers
            self.passes += 1
        return self._forward(works, *rest, **named)


def kind_of(name: str) -> Kind:
    """Return a model's entry. Raises ValueError for one that is not in the zoo."""
    found = {kind.name: kind for kind in ZOO}
    if name not in found:
        raise ValueError(f"no model {name!r}; there are {', '.join(found)}")
    return found[name]


def papers(kind: Kind, exam: Exam, n: int, seed: str) -> Iterator[Paper]:
    """Yield ``n`` cases of a model's world, or documents of held-out prose."""
    if kind.wording is None:
        yield from prose.papers(exam.words.maker, n * 3)
        return
    ids = exam.runner.tokenizer.get_vocab()
    for i in range(n):
        made = case(kind.wording, Size(SENTENCES, False), NOTES, ASKED, f"{seed}/{kind.name}/{i}")
        notes = [(f"note/{j}", tuple(ids[w] for w in words)) for j, words in enumerate(made.notes)]
        asked = [
            Question(about, tuple(ids[w] for w in words), tuple(ids[w] for w in reply))
            for about, words, reply in made.questions
        ]
        yield Paper(kind.name, i, tuple(n for n in notes if n[1]), tuple(asked))


def measure(name: str, methods: Sequence[Method], n: int, seed: str = "report") -> dict[str, Cell]:
    """Return a cell for each method, and one for the full prefill."""
    torch.set_num_threads(1)
    kind = kind_of(name)
    runner = Runner.load(str(WEIGHTS / name), device="cpu")
    counted, exam = Counted(runner), Exam(runner, BOS)
    found: dict[str, Cell] = {}
    for paper in papers(kind, exam, n, seed):
        truth = exam.truth(paper)
        n_rows = sum(len(tokens) for i, (_, tokens) in enumerate(paper.notes) if i != paper.dropped)
        n_reply = sum(len(q.expected) for q in paper.questions)
        for method in methods:
            rows, passes = counted.rows, counted.passes
            trials = exam.under(paper, method, truth)
            cell = found.setdefault(method.label, Cell())
            cell.kl.append([t.kl for t in trials])
            cell.right.append([t.right for t in trials])
            spent = (counted.rows - rows - n_reply) / n_rows + PASS * (counted.passes - passes - 1)
            cell.cost.append(spent if method.is_blind else spent / len(paper.questions))
        full = found.setdefault("full prefill", Cell())
        asked = range(len(paper.questions))
        full.right.append([exam.right(paper, i, truth[i]) for i in asked])
    exam.close()
    return found


def frontier(points: Sequence[tuple[float, float]], cost: float) -> float:
    """Return the least KL that strategies reach at a cost: ``points`` are (cost, KL) of one strategy,
    between two of which the logarithm of the KL is taken to be straight; infinite below the first."""
    known = sorted(points)
    if cost < known[0][0]:
        return math.inf
    xs, ys = [p[0] for p in known], [math.log(max(p[1], 1e-9)) for p in known]
    return math.exp(float(np.interp(cost, xs, ys)))


def regrets(cells: dict[str, Cell], name: str, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:  # fmt: skip
    """Return, for each share of ``name``, its KL over that of the best single one at equal cost."""
    single: dict[str, list[tuple[float, float]]] = {}
    for label, cell in cells.items():
        words = label.split()
        if words[0] in SINGLE:
            single.setdefault(words[0], []).append((_mean(cell.cost), _mean(cell.kl)))
    made = []
    for share in shares:
        cell = cells[f"{name} {share:.0%}"]
        cost, kl = _mean(cell.cost), stats.mean(cell.kl)
        best = min(single, key=lambda s: frontier(single[s], cost))
        least = frontier(single[best], cost)
        made.append({
            "strategy": name, "share": share, "cost": cost, "kl": kl.to_list(), "best": best,
            "best_kl": least, "regret": (kl.value + FLOOR) / (least + FLOOR),
            "right": _mean(cell.right), "full": _mean(cells["full prefill"].right),
        })  # fmt: skip
    return made


FLOOR = 1e-4  # nats: below that all are alike


def _mean(values: Sequence[Any]) -> float:
    flat = [x for v in values for x in v] if values and isinstance(values[0], list) else values
    return float(np.mean(flat))

"""Whether quality holds in bfloat16: the bench's models and the bundled one, in both dtypes.

Each dtype is held against its own full prefill, and bfloat16's full prefill against what float32's
gets right. A CPU with units for bfloat16 runs checkpoints that are stored so in it by default
(`run/load.py`); `holds` is the gate of that, and a slow test asks it of two models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, progress, table
from models.worlds import BOS
from models.zoo import ZOO
from regret import WEIGHTS, kind_of, papers
from rich.console import Console

from kvweave.demo.job import MODEL
from kvweave.run.model import Runner
from kvweave.suite import stats
from kvweave.suite.exam import Exam, outcome
from kvweave.suite.method import FULL, Method
from kvweave.suite.run import NAMES, Suite

DTYPES = ("float32", "bfloat16")
METHODS = tuple(
    Method(name, share, modes=("forget",))
    for name, share in (("none", 0.0), ("query", 0.05), ("auto", 0.05), ("auto", 0.15))
)
BUNDLED = "bundled"
LOSS = 0.02  # of all models' questions: so many fewer may be right than in float32
FARTHER, FLOOR = 1.5, 0.002  # and so many times as far may a model be from its full prefill; nats
Found = dict[str, dict[str, list[list[float]]]]  # by method: of each case the questions' right, kl


def of_world(name: str, dtype: str, n: int) -> Found:
    """Ask a model of the bench about ``n`` documents of its world."""
    runner = Runner.load(str(WEIGHTS / name), device="cpu", dtype=dtype)
    exam, found = Exam(runner, BOS, evidence=False), empty()
    for paper in papers(kind_of(name), exam, n, "bf16"):
        truth = exam.truth(paper)
        list(exam.under(paper, Method("none"), truth))  # stores the notes
        for method in METHODS:
            add(found, method.label, list(exam.under(paper, method, truth)))
        add(found, FULL, [outcome(paper, i, x, x, method=FULL) for i, x in enumerate(truth)])
        exam.clear()
    exam.close()
    return found


def of_bundled(dtype: str, n: int) -> Found:
    """Ask the bundled model all protocols but the stream and prose, about ``n`` questions each."""
    suite, found = Suite(Runner.load(str(MODEL), device="cpu", dtype=dtype), n), empty()
    for protocol in NAMES:
        if protocol in ("P6", "prose"):
            continue
        for trials in suite.run(protocol, METHODS, range(suite.units(protocol))):
            for label in found:
                add(found, label, [t for t in trials if t.method == label and t.mode != "never"])
    suite.close()
    return found


def empty() -> Found:
    """Return a place for what comes."""
    return {label: {"right": [], "kl": []} for label in (FULL, *(m.label for m in METHODS))}


def add(found: Found, label: str, trials: Sequence[Any]) -> None:
    """Add the questions of one case."""
    if trials:
        found[label]["right"].append([t.right for t in trials])
        found[label]["kl"].append([t.kl for t in trials])


def measure(name: str, n: int) -> list[dict[str, Any]]:
    """Return a row for each dtype and method of one model."""
    torch.set_num_threads(1)
    rows = []
    for dtype in DTYPES:
        found = of_bundled(dtype, 4 * n) if name == BUNDLED else of_world(name, dtype, n)
        rows += [
            {
                "model": name, "dtype": dtype, "method": label,
                "right": stats.mean(cell["right"]).to_list(),
                "kl": stats.mean(cell["kl"]).to_list(),
            }
            for label, cell in found.items()
        ]  # fmt: skip
    return rows


def losses(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how much less is right in bfloat16, a row for each model and method, worst first."""
    at = {(r["model"], r["dtype"], r["method"]): r for r in rows}
    made = []
    for (model, dtype, method), row in at.items():
        if dtype == "float32":
            half = at[model, "bfloat16", method]
            full = [at[model, d, FULL]["right"][0] for d in DTYPES]
            made.append({
                "model": model, "method": method,
                "lost": row["right"][0] - half["right"][0],
                # beyond what the full prefill loses itself
                "beyond": row["right"][0] - half["right"][0] - (full[0] - full[1]),
                "kl": [row["kl"][0], half["kl"][0]],
            })  # fmt: skip
    return sorted(made, key=lambda r: -r["lost"])


def holds(rows: Sequence[dict[str, Any]]) -> bool:
    """Tell whether no method loses more than `LOSS` of all models' questions, and no model is farther
    from its full prefill than `FARTHER`. One model has some 30 questions: one of them is 3 %."""
    found = losses(rows)
    lost = {
        m: [max(r["lost"], r["beyond"]) for r in found if r["method"] == m]
        for m in {r["method"] for r in found}
    }
    near = all(r["kl"][1] <= FARTHER * r["kl"][0] + FLOOR for r in found)
    return near and all(sum(each) / len(each) <= LOSS for each in lost.values())


def main() -> None:
    """Measure, write, print."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("names", nargs="*", help="models (all)")
    made.add_argument(
        "--n", type=int, default=6, help="documents a model; questions are 8 times as many"
    )
    made.add_argument("--out", type=Path, default=RESULTS / "bf16.json")
    options = made.parse_args()
    names = options.names or [BUNDLED, *(kind.name for kind in ZOO)]
    rows: list[dict[str, Any]] = []
    with progress("models", len(names)) as step:
        for name in names:
            rows += measure(name, options.n)
            step(name)
    setup = {"n": options.n, "loss": LOSS, "farther": FARTHER, "floor": FLOOR}
    about = {"machine": machine(torch.device("cpu")), "setup": setup, "holds": holds(rows)}
    options.out.write_text(
        json.dumps(about | {"losses": losses(rows), "rows": rows}, indent=1) + "\n"
    )
    shown = [
        (
            r["model"],
            r["method"],
            f"{r['lost']:.3f}",
            f"{r['beyond']:.3f}",
            *(f"{k:.4f}" for k in r["kl"]),
        )
        for r in losses(rows)
    ]
    head = ["model", "method", "fewer right", "beyond full", "KL float32", "KL bfloat16"]
    Console(width=120).print(table("bfloat16 against float32", head, shown))


if __name__ == "__main__":
    main()

"""What fewer bits, or a place below memory, cost instead of rows that go: equal bytes, side by side.

As `bench/policies_tokens.py` measures policies: documents of the suite and of prose, asked once and five
questions of one cache. Bytes are those of a model in bfloat16, whatever runs here, and do not count
what rests below memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, progress, table
from policies_tokens import (
    CACHE,
    MODEL,
    OF_ONE,
    ONCE,
    OPTIONS,
    PROSE,
    PROTOCOLS,
    WEIGHTS,
    Bench,
    passages,
    world,
)  # fmt: skip
from rich.console import Console

from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import Rows
from kvweave.run.model import Runner
from kvweave.run.packed import FORMS, form_bytes
from kvweave.suite import stats
from kvweave.suite.exam import Exam
from kvweave.suite.words import Paper
from kvweave.weave.keeping import Keeper

SPECS = (
    *(f"{name}:{what}" for name in ("kvzip", "snapkv", "keydiff") for what in (
        "0.3", "0.15,int8=0.3", "0.05,int4=0.8", "8,k4v2=rest", "0.1,below=rest"
    )),
    "ttkv:8", "ttkv:8,int4=rest", "ttkv:8,k4v2=rest", "diffkv", "diffkv,quant=3", "diffkv,prune=0.1,quant=3",
    "flexicache:0.3", "flexicache:0.3,overlap=0", "flexicache:0.3,beyond=true", "flexicache:0.52",
)  # fmt: skip


class Levels(Bench):
    """A document under every specification."""

    def __init__(self, exam: Exam) -> None:
        super().__init__(exam, SPECS, (1.0,))

    def keeper(self, name: str, share: float) -> Keeper:
        """Return a policy at work on nothing yet."""
        first, *rest = name.split(",")
        page = ["page=4", "recent=8"] if first.startswith("flexicache") else []
        return Keeper(Keep.parse(",".join([first, OPTIONS, *page, *rest])), self.runner)


def used(rows: Rows, runner: Runner) -> int:
    """Return the bytes of the rows in memory, were they bfloat16, without room for more."""
    heads = runner.layers[0].shape.k_heads
    shape, forms = runner.layers[0].shape, rows.forms
    coded = sum(n * form_bytes(form, shape) / heads for form, n in forms.items() if form in FORMS)
    n_raw = rows.n * heads * len(runner.layers) - rows.n_freed - sum(forms.values())
    moving = 1.5 if rows.unrotated(0) is not None else 1.0  # unrotated keys too
    return round(coded + moving * n_raw * 2 * shape.width / heads)


def sit(bench: Levels, paper: Paper) -> dict[str, Any]:
    """Return what a case gives, with the bytes of the rows of one cache."""
    found = bench.sit(paper)
    tokens = [*bench.exam.words.head, *(t for _, part in paper.left() for t in part)]
    made = bench.kept(torch.tensor(tokens).numpy())
    whole = 2 * sum(info.shape.width for info in bench.runner.layers) * len(tokens)
    found["bytes"] = {name: used(made[name, 1.0], bench.runner) / whole for name in SPECS}
    return found


def measure(n: int, n_prose: int, minutes: float) -> list[dict[str, Any]]:
    """Return a row a specification and way of asking."""
    found: dict[str, list[dict[str, Any]]] = {}
    begun = time.perf_counter()
    mark = hashlib.blake2b("|".join((OPTIONS, *SPECS)).encode(), digest_size=4).hexdigest()
    jobs = [(str(MODEL), protocol, n) for protocol in PROTOCOLS]
    jobs += [(str(WEIGHTS / name), name, n_prose) for name in PROSE]
    with progress("cases", sum(many for *_, many in jobs)) as step:
        for model, what, many in jobs:
            runner = Runner.load(model, device="cpu")
            bos = str(getattr(runner.tokenizer, "bos_token", None) or "")
            exam = Exam(runner, bos if what in PROSE else None, evidence=False)
            papers = passages(exam, what, many) if what in PROSE else world(exam, what, many)
            for i, paper in enumerate(papers):
                file = CACHE / f"levels-{what}-{i}-{mark}.json"
                if not file.exists():
                    if time.perf_counter() - begun > 60 * minutes:
                        continue
                    CACHE.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(sit(Levels(exam), paper)))
                found.setdefault(what, []).append(json.loads(file.read_text()))
                step(what)
            exam.close()
    return [summed(found, name, mode) for name in SPECS for mode in (ONCE, OF_ONE)]


def summed(found: dict[str, list[dict[str, Any]]], name: str, mode: str) -> dict[str, Any]:
    """Return accuracy in the world, KL of each prose model, and the bytes of one cache."""
    cell = f"{name}:1.0"
    world_of = [case for what, cases in found.items() if what not in PROSE for case in cases]
    right = [[r for r, _ in case["scores"][mode][cell]] for case in world_of]
    made: dict[str, Any] = {"keep": name, "mode": mode, "n": sum(map(len, right))}
    made["right"] = stats.mean(right).to_list() if right else None
    made["bytes"] = round(sum(c["bytes"][name] for c in world_of) / max(1, len(world_of)), 3)
    for what in PROSE:
        kl = [[k for _, k in case["scores"][mode][cell]] for case in found.get(what, [])]
        made[what] = stats.mean(kl).to_list() if kl else None
    return made


def main() -> None:
    """Read the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--n", type=int, default=4, help="cases of a protocol, five questions each")
    made.add_argument("--prose", type=int, default=8, help="documents of a prose model")
    made.add_argument("--minutes", type=float, default=math.inf, help="begin no case after that")
    made.add_argument("--out", type=Path, default=RESULTS / "levels.json")
    options = made.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.n, options.prose, options.minutes)
    found = {"machine": machine(torch.device("cpu")), "setup": {"options": OPTIONS}, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    body = [
        [
            r["keep"],
            r["mode"],
            r["bytes"],
            *(f"{r[k][0]:.3g}" if r[k] else "" for k in ("right", *PROSE)),
        ]
        for r in rows
    ]
    Console().print(table("levels", ["keep", "mode", "bytes", "right", *PROSE], body))


if __name__ == "__main__":
    main()

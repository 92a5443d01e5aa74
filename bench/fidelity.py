"""Fidelity: how right replies stay, and how far from a full prefill, under every way of reuse.

Seeded protocols (`kvweave.suite`), on the bundled model or any other. Outcomes are kept per
protocol, method and part in ``--cache``, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import regret
import torch
from common import RESULTS, machine, progress, table
from rich.console import Console

from kvweave.demo import world
from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.suite import calibrate, plot, prose, protocols, report, stream
from kvweave.suite.exam import Trial
from kvweave.suite.method import Method, Pruning
from kvweave.suite.run import NAMES, SEED, Suite
from kvweave.weave import calibration

HERE = Path(__file__).parent
MODEL = HERE.parent / "src" / "kvweave" / "demo" / "model"
SHARES = (0.05, 0.10, 0.15, 0.30)
PLAIN = ("random", "first_k", "deviation:v@1", "boundary")
DRAWN = ("random", "first_k", "deviation:v@1", "query", "rollout", "boundary", "deps", "auto")  # fmt: skip
BOUNDS = (0.01, 0.03, 0.1, 0.3)  # nats
ENOUGH = 1000  # questions, for a calibration
PARTS = 2  # of a protocol's cases: what one worker does at a time
WIDE: tuple[Pruning, ...] = ("forget", "never", "evict")  # of a prune
FEW = ("none", "random", "deviation:v@1", "query", "auto")


def all_methods() -> list[Method]:
    """Return every row of the table whose strategy exists."""
    made = [Method("none", modes=WIDE)]
    for share in SHARES:
        made += [Method(s, share, modes=("forget",)) for s in (*PLAIN, "query")]
        made += [Method("deps", share, before="full:records", modes=("forget",))]
        made += [Method("auto", share, modes=WIDE if share == 0.15 else ("forget",))]
    one: dict[str, Any] = {"modes": ("forget",)}  # of a prune
    made += [Method(s, 0.15, **one) for s in ("deviation:k@1", "deviation:kv@1", "deviation:v@3")]
    made += [Method(s, share, **one) for s in ("rollout", "rollout:2@0") for share in (0.05, 0.15)]
    made += [Method("patch:4", 0.0, before="patch:4", **one)]
    made += [Method("none", base=False, **one)]
    made += [Method(s, 0.15, base=False, **one) for s in ("random", "query", "auto")]
    return [m for m in made if exists(m)]


def exists(method: Method) -> bool:
    """Whether the method's strategy is there; says so when it is not."""
    try:
        method.build()
    except InvalidArgument as error:
        print(f"skipped: {method.label}: {error}")
        return False
    return True


def quick_methods() -> list[Method]:
    """Return a few, for a smoke test."""
    return [Method("none"), Method("query", 0.15), Method("none", base=False)]


def wanted(protocol: str, methods: Sequence[Method]) -> list[Method]:
    """Return the methods that are run on a protocol: fewer where a question takes long, or where
    nothing crosses a note."""
    if protocol in ("P1", "P2", "P4", "P5", "P7"):
        return list(methods)
    some = [m for m in methods if m.base and str(m.strategy) in FEW and m.share != 0.10]
    if protocol not in ("P6", "prose"):
        return some
    # a stream has no context without what left; only none shows what evict keeps
    modes = {True: ("forget", "evict"), False: ("forget",)}
    return [replace(m, modes=modes[m.name == "none"]) for m in some]  # type: ignore[arg-type]


class Cache:
    """Outcomes on disk, a file for each protocol, method and part."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, protocol: str, label: str, part: int) -> Path:
        """Return the file of a cell's part."""
        name = hashlib.blake2b(label.encode(), digest_size=8).hexdigest()
        return self.folder / f"{protocol}-{name}-{part}.json"

    def put(self, protocol: str, label: str, part: int, outcomes: Sequence[Trial]) -> None:
        """Write a part, whole or not at all."""
        path = self.path(protocol, label, part)
        found = {"method": label, "outcomes": [o.to_dict() for o in outcomes]}
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(found))
        temporary.replace(path)

    def get(self, protocol: str, label: str, part: int) -> list[Trial]:
        """Read a part."""
        found = json.loads(self.path(protocol, label, part).read_text())
        return [Trial(**o) for o in found["outcomes"]]


Task = tuple[str, int, list[Method]]  # protocol, part, methods still missing
_suite: Suite | None = None
_cache: Cache | None = None


def begin(model: str, n: int, prunes: int, cache: Cache) -> None:
    """Load the model in a worker."""
    global _suite, _cache
    torch.set_num_threads(1)
    runner = Runner.load(model, device="cpu")
    _suite, _cache = Suite(runner, n, prunes, recipes_of(Path(model), runner)), cache


def recipes_of(model: Path, runner: Runner) -> calibration.Recipes:
    """Return how `auto` chooses rows by the calibration beside the model."""
    known = calibration.calibration_of(runner.fingerprint, None, [model])
    return () if known is None else known.recipes


def work(task: Task) -> tuple[str, int, int, float]:
    """Run one part of a protocol and store its outcomes; return how many and seconds."""
    assert _suite is not None and _cache is not None
    protocol, part, methods = task
    started = time.process_time()
    found: dict[str, list[Trial]] = {m.label: [] for m in methods}
    found[report.FULL] = []
    for outcomes in _suite.run(protocol, methods, range(part, _suite.units(protocol), PARTS)):
        for o in outcomes:
            found[o.method].append(o)
    for label, mine in found.items():
        _cache.put(protocol, label, part, mine)
    return protocol, part, sum(map(len, found.values())), time.process_time() - started


def run(tasks: Sequence[Task], options: argparse.Namespace, cache: Cache) -> list[dict[str, Any]]:
    """Do all tasks in worker processes; return what each took."""
    taken = []
    start = (str(options.model), options.n, options.prunes, cache)
    with progress("fidelity", len(tasks)) as step:
        for protocol, part, n, seconds in _results(tasks, options.workers, start):
            step(f"{protocol}/{part}")
            taken.append({"protocol": protocol, "outcomes": n, "seconds": round(seconds, 1)})
    return taken


def _results(
    tasks: Sequence[Task], workers: int, start: tuple[str, int, int, Cache]
) -> Iterator[tuple[str, int, int, float]]:
    if workers == 1:
        begin(*start)
        yield from map(work, tasks)
        return
    # not multiprocessing.Pool, which starts workers for ever when the model cannot be loaded
    with ProcessPoolExecutor(workers, get_context("spawn"), begin, start) as pool:
        for done in as_completed([pool.submit(work, task) for task in tasks]):
            yield done.result()


def key_of(model: Path, n: int, prunes: int) -> str:
    """Return what outcomes depend on besides protocol and method: weights, questions, size, seed.

    The code of strategies is not among it, nor is what a calibration chose: after a change there, ``--again NAME``.
    """
    made = hashlib.blake2b(digest_size=8)
    for module in (protocols, stream, prose, world):
        made.update(Path(str(module.__file__)).read_bytes())
    for file in sorted(model.glob("*.safetensors")) if model.is_dir() else []:
        made.update(file.read_bytes())
    made.update(f"{model.name}/{n}/{prunes}/{SEED}".encode())
    return made.hexdigest()


def collect(
    names: Sequence[str], methods: Sequence[Method], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run what is missing; return the rows of the table and what the parts took."""
    cache = Cache(options.cache, key_of(options.model, options.n, options.prunes))
    tasks: list[Task] = []
    again = tuple(filter(None, options.again.split(",")))
    for protocol in names:
        mine = wanted(protocol, methods)
        for part in range(PARTS):
            missing = [
                m
                for m in mine
                if (again and m.name.startswith(again))
                or not cache.path(protocol, m.label, part).exists()
            ]
            if missing:
                tasks.append((protocol, part, missing))
    tasks.sort(key=lambda task: {"P5": 0, "prose": 2, "P6": 3}.get(task[0], 1))
    taken = run(tasks, options, cache) if tasks else []
    rows = []
    for protocol in names:
        mine = wanted(protocol, methods)
        labels = [report.FULL, *(m.label for m in mine)]
        outcomes = [
            o for x in labels for part in range(PARTS) for o in cache.get(protocol, x, part)
        ]
        rows += report.summarise(outcomes, mine)
    return rows, taken


def gate_of(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calibrate the gate on what `auto` did, beside the bundled model; return what it is worth."""
    cache = Cache(options.cache, key_of(options.model, options.n, options.prunes))
    shares = [Method("auto", share).label for share in calibrate.SHARES]
    found = [
        o
        for protocol in names
        for label in shares
        for part in range(PARTS)
        for o in cache.get(protocol, label, part)
        if o.mode in ("", "forget") and not o.kind.startswith("leak")
    ]
    seen = calibrate.gather(found)
    if len(seen) < ENOUGH:
        return []
    runner = Runner.load(str(options.model), device="cpu")
    mine, recipes = runner.fingerprint, recipes_of(options.model, runner)
    replace(calibrate.fit(seen, mine), recipes=recipes).save(options.model / calibration.FILE)
    return calibrate.halves(seen, mine, (None, *BOUNDS))


def main() -> None:
    """Parse, run, write, print, draw."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--model", type=Path, default=MODEL)
    made.add_argument("--n", type=int, default=500, help="questions a protocol")
    made.add_argument("--prunes", type=int, default=100, help="of a stream")
    made.add_argument("--protocols", default=",".join(NAMES))
    made.add_argument("--strategies", default="", help="only methods whose name begins so")
    made.add_argument("--again", default="", help="run methods again whose name begins so")
    made.add_argument("--workers", type=int, default=2, help="processes of one thread")
    made.add_argument("--quick", action="store_true", help="a smoke test: 8 questions, 3 methods")
    made.add_argument("--cache", type=Path, default=HERE / ".cache" / "fidelity")
    made.add_argument("--out", type=Path, help="where to write the result")
    made.add_argument("--figure", type=Path, help="where to draw (docs/fidelity.png)")
    made.add_argument(
        "--models", action="store_true", help="the bench of models instead: regret.py"
    )
    options = made.parse_args()
    if options.models:
        regret.report(regret.parser().parse_args([]))
        return
    if options.quick:
        options.n, options.prunes = 8, 3
    methods = quick_methods() if options.quick else all_methods()
    if options.strategies:
        begins = tuple(options.strategies.split(","))
        methods = [m for m in methods if m.name.startswith(begins)]
    found = {"machine": machine(torch.device("cpu"))}  # the load is of before
    rows, taken = collect(options.protocols.split(","), methods, options)
    setup = {"model": options.model.name, "n": options.n, "prunes": options.prunes, "seed": SEED}
    result = found | {"setup": setup, "taken": taken, "rows": rows}
    whole = not (options.quick or options.strategies) and options.protocols == ",".join(NAMES)
    if not (options.quick or options.strategies):
        result["gate"] = gate_of(options.protocols.split(","), options)
    name = "fidelity" if whole else "fidelity-part"
    out = options.out or (RESULTS / f"{name}.json" if whole else options.cache / f"{name}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    show(rows)
    figure = options.figure or (HERE.parent / "docs" / "fidelity.png" if whole else out.with_suffix(".png"))  # fmt: skip
    drawn = plot.draw(rows, DRAWN, figure, f": {options.model.name}, n = {options.n}")
    print(f"wrote {out}" + (f" and {figure}" if drawn else "; no matplotlib, no figure"))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table a protocol."""
    console = Console(width=None if Console().is_terminal else 140)
    for title, part in report.tables(rows).items():
        note = report.warning(part)
        made = table(f"{title}: {note}" if note else title, report.head(part[0]), [report.cells(r) for r in part])  # fmt: skip
        console.print(made)


if __name__ == "__main__":
    main()

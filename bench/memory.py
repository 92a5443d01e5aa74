"""Memory of contexts: its peak over the bytes of their rows, and what is really alive under a budget.

Peak: of one woven context beyond the canonical store, in a process of its own: the rise of the
resident set (on CUDA, of allocated memory) from just before to the peak within each step. It holds
everything a weave needs for a while too.

Alive: the bytes of all storages that tensors hold after each of many random operations, the model's
left out, against the budget of the engine, which is small enough to be hit all the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import (
    Pair,
    Shape,
    machine,
    make_engine,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    shape_of,
    table,
)
from rich.table import Table
from users import User

from kvweave import Context, Engine
from kvweave.config import n_bytes

N_BASE, PIECE, N_SUFFIX = 16, 170, 64
# what random operations run on: 3.7 M parameters, 8 KiB of KV a token in float32
SMALL = Shape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=704, vocab=1024)
BUDGET = "4MiB"
LIMIT = 1024  # positions


class Meter:
    """Reads memory in use and its peak since the last `reset`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Forget the peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _status(self, field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
        raise ValueError(field)

    def now(self) -> int:
        """Return bytes in use."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self._status("VmRSS")

    def peak(self) -> int:
        """Return the most bytes in use since `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._status("VmHWM")


def measure(pair: Pair, n_context: int) -> dict[str, Any]:
    """Weave, prune and grow one context; return bytes by step."""
    base = random_ids(N_BASE, pair.shape.vocab, 99)
    engine = make_engine(pair, base)
    starts = range(N_BASE, n_context - N_SUFFIX, PIECE)
    for i, start in enumerate(starts):
        n = min(PIECE, n_context - N_SUFFIX - start)
        engine.put(f"turn/{i}", random_ids(n, pair.shape.vocab, i))
    warm = engine.context("warm", repair="none", denoise=False)  # what only the first pass needs
    warm.append(random_ids(N_SUFFIX, pair.shape.vocab, 7))
    warm.generate(max_tokens=1)
    engine.close_context("warm")
    meter = Meter(pair.device)
    context = engine.context("measured", repair="none", denoise=False)
    for i in range(len(starts)):
        context.append_chunk(f"turn/{i}")
    store = engine.shelf.ram.n_bytes
    meter.reset()
    before = meter.now()

    def step(name: str, call: Callable[[], object]) -> dict[str, object]:
        meter.reset()
        call()
        return _figures(name, context, meter.peak() - before, meter.now() - before, pair)

    def say(seed: int, n: int, n_new: int) -> None:
        context.append(random_ids(n, pair.shape.vocab, seed))
        context.generate(max_tokens=n_new, ignore_eos=True)

    steps = [step("weave, first token", lambda: say(1, N_SUFFIX, 1))]
    steps.append(step("the same again", lambda: context.weave("none")))
    context.drop(-1)

    def minus_plus() -> None:
        context.drop(context.oldest())
        say(2, N_SUFFIX, 16)

    steps.append(step("minus one plus one", minus_plus))
    steps.append(step("grow by 1/8, prefilled", lambda: say(3, n_context // 8, 16)))
    return {"canonical_store_bytes": store, "steps": steps}


def _figures(name: str, context: Context, peak: int, held: int, pair: Pair) -> dict[str, object]:
    rows = context.session.state.rows
    needed = rows.n * pair.runner.row_bytes
    return {
        "step": name,
        "tokens": rows.n,
        "rows_bytes": needed,  # of the tokens there are
        "allocated_bytes": rows.n_bytes,  # free slots included
        "peak_bytes": peak,
        "held_bytes": held,
        "peak_over_rows": round(peak / needed, 3),
        "allocated_over_rows": round(rows.n_bytes / needed, 3),
    }


class Alive:
    """Counts the bytes tensors hold, those left out that were alive on entering.

    What only circles keep counts too: Python looks for them when it likes, so here it does not.
    """

    def __enter__(self) -> Alive:
        gc.collect()
        self._known = {start for start, _ in self._storages()}
        gc.freeze()  # what there is now need not be looked through again each time
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()

    def _storages(self) -> Iterator[tuple[int, int]]:
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):
                storage = each.untyped_storage()
                try:
                    start = storage.data_ptr()
                except RuntimeError:  # a fake one, which has no memory
                    continue
                yield start, storage.nbytes()

    def n_bytes(self) -> int:
        """Return the bytes of all storages; what several tensors share counts once."""
        total = end = 0
        for start, n in sorted(set(self._storages())):
            if start not in self._known:
                total += max(0, start + n - max(start, end))
                end = max(end, start + n)
        return total


def alive(pair: Pair, operations: int, budget: int | str, seed: int = 0) -> dict[str, Any]:
    """Act at random on an engine with little memory; return what was alive after each operation."""
    base, most = random_ids(4, pair.shape.vocab, 99), n_bytes(budget)
    with Engine(pair.runner, base=base, repair="none") as engine:  # type: ignore[arg-type]
        context = engine.context("warm")  # what a first pass leaves with the model is not counted
        context.append(random_ids(64, pair.shape.vocab, 7))
        context.generate(2, ignore_eos=True)
    del engine, context
    with tempfile.TemporaryDirectory() as home, Alive() as meter:
        engine = Engine(pair.runner, base=base, budget=budget, home=home)  # type: ignore[arg-type]
        user, found, accounted = User(engine, pair.shape.vocab, seed), [], []
        with progress("alive", operations) as step:
            for _ in range(operations):
                name = user.act()
                found.append(meter.n_bytes())
                accounted.append(engine.shelf.n_bytes)
                step(name)
        engine.check_integrity()
        for name in list(engine.contexts):
            engine.close_context(name)
        closed, kept = meter.n_bytes(), engine.shelf.n_bytes
        engine.close()
        del engine, user.engine
        gone = meter.n_bytes()
    return {
        "budget_bytes": most,
        "operations": operations,
        "done": dict(sorted(user.done.items())),
        "refused": dict(sorted(user.refused.items())),
        "alive_max_bytes": max(found),
        "alive_final_bytes": found[-1],
        "accounted_max_bytes": max(accounted),
        "accounted_final_bytes": accounted[-1],
        "alive_over_budget": {
            "max": round(max(found) / most, 3),
            "final": round(found[-1] / most, 3),
        },
        "operations_over_5_percent": sum(each > 1.05 * most for each in found),
        "operations_at_80_percent": sum(each > 0.8 * most for each in accounted),
        "without_contexts": {"alive_bytes": closed, "accounted_bytes": kept},
        "alive_after_close_bytes": gone,
    }


def child(options: argparse.Namespace) -> None:
    """Measure in this process and print one line of JSON."""
    torch.set_num_threads(options.threads)
    if options.child == "alive":
        pair = model_pair(SMALL, options.dtype, options.device, LIMIT)
        print(json.dumps(alive(pair, options.operations, options.budget)))
        return
    pair = model_pair(shape_of(options), options.dtype, options.device, 4 * options.context)
    print(json.dumps(measure(pair, options.context)))


def in_a_process(arguments: list[str], what: str) -> dict[str, Any]:
    """Run `child` in another process with freed memory given back at once."""
    # glibc keeps what was freed and the peak would count it: map every larger block by itself
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, *arguments, "--child", what]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse, measure, report."""
    made = parser(__doc__)
    made.add_argument("--operations", type=int, default=1000, help="random ones")
    made.add_argument("--budget", default=BUDGET, help="of the engine they are done on")
    made.add_argument("--child", choices=["peak", "alive"], help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        child(options)
        return
    about = machine(torch.device(options.device))
    with progress("memory", 2) as step:
        result = in_a_process(sys.argv[1:], "peak")
        step("what is alive")
        result["alive"] = in_a_process(sys.argv[1:], "alive")
        step("done")
    setup = {"dtype": options.dtype, "context": options.context, "model": vars(shape_of(options))}
    setup["alive"] = {"budget": options.budget, "model": asdict(SMALL)}
    report({"setup": setup, **result, "machine": about}, tables(result), options, "memory")


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the figures for people."""
    rows = [
        (
            s["step"], s["tokens"], s["rows_bytes"] / 2**20, s["allocated_bytes"] / 2**20,
            s["peak_bytes"] / 2**20, s["peak_over_rows"],
        )
        for s in result["steps"]
    ]  # fmt: skip
    columns = ("step", "tokens", "rows MiB", "allocated MiB", "peak MiB", "peak / rows")
    found = result["alive"]
    held = [
        (
            when, found[f"accounted_{when}_bytes"] / 2**20, found[f"alive_{when}_bytes"] / 2**20,
            found["alive_over_budget"][when],
        )
        for when in ("max", "final")
    ]  # fmt: skip
    n, over = found["operations"], found["operations_over_5_percent"]
    title = f"alive through {n} random operations under {found['budget_bytes'] / 2**20:.3g} MiB"
    return [
        table("memory beyond the canonical store", columns, rows),
        table(
            f"{title}; after {over} of them more than 5 % over it",
            ("", "accounted MiB", "alive MiB", "alive / budget"),
            held,
        ),
    ]


if __name__ == "__main__":
    main()

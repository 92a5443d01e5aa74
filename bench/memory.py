"""Peak memory of a woven context beyond the canonical store, over the bytes of its KV rows.

Runs in a process of its own: the rise of the resident set (on CUDA, of allocated memory) from just
before to the peak within each step. The peak holds everything a weave needs for a while too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    Pair,
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

from kvweave.weave.context import Context

N_BASE, PIECE, N_SUFFIX = 16, 170, 64


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
    rows = context._state.rows
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


def child(options: argparse.Namespace) -> None:
    """Measure in this process and print one line of JSON."""
    torch.set_num_threads(options.threads)
    pair = model_pair(shape_of(options), options.dtype, options.device, 4 * options.context)
    print(json.dumps(measure(pair, options.context)))


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    """Run `child` in another process with freed memory given back at once."""
    # glibc keeps what was freed and the peak would count it: map every larger block by itself
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, *arguments, "--child"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse, measure, report."""
    made = parser(__doc__)
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        child(options)
        return
    about = machine(torch.device(options.device))
    with progress("memory", 1) as step:
        result = in_a_process(sys.argv[1:])
        step("done")
    setup = {"dtype": options.dtype, "context": options.context, "model": vars(shape_of(options))}
    rows = [
        (
            s["step"], s["tokens"], s["rows_bytes"] / 2**20, s["allocated_bytes"] / 2**20,
            s["peak_bytes"] / 2**20, s["peak_over_rows"],
        )
        for s in result["steps"]
    ]  # fmt: skip
    columns = ("step", "tokens", "rows MiB", "allocated MiB", "peak MiB", "peak / rows")
    made_table = table("memory beyond the canonical store", columns, rows)
    report({"setup": setup, **result, "machine": about}, [made_table], options, "memory")


if __name__ == "__main__":
    main()

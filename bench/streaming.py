"""One answer without an end: memory and time a token while ``keep="streaming:256"`` decodes on and on.

The bundled model goes on from one fact, drawing at temperature 1 and never stopping. Every step is
timed; bytes of the rows are looked at after each of them, memory of the process after each tenth of the
tokens. Twenty times on the way a stream is begun anew beside it, and both go on step by step in
turns: what the long one takes over the new one does not depend on how busy the machine is. An answer
that is not over in ``--minutes`` is cancelled, and the result says so. With ``--alone`` nothing is begun
beside it, so that what the process grows by is the long one's; that stands beside the other result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine, table
from rich.console import Console

import kvweave.demo
from kvweave import Engine
from kvweave.keep.tokens.spec import Keep
from kvweave.run.model import Runner
from kvweave.weave.answer import request_from

MODEL = Path(kvweave.demo.__file__).parent / "model"
TENTHS = 10
BESIDE = 64  # steps beside a stream just begun
OPTIONS = {"ignore_eos": True, "temperature": 1.0, "seed": 0}
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Fresh:
    """Streams just begun, with as many rows as the long one has."""

    def __init__(self, runner: Runner, keep: str) -> None:
        self.engine, self.keep = Engine(runner, base=""), keep

    def begin(self, n: int) -> None:
        """Begin one behind ``n`` tokens."""
        self.context = self.engine.context("fresh", keep=self.keep)
        self.context.append([8 + i % 64 for i in range(n)])
        self.turn = self.context.begin(*request_from(4 * BESIDE, OPTIONS))
        while not self.turn.take()[1]:
            self.step()
        for _ in range(8):
            self.step()

    def step(self) -> None:
        """Decode a token."""
        self.engine.loop.step()

    def end(self) -> None:
        """End it."""
        self.turn.cancel()
        self.engine.close_context("fresh")


def stream(
    runner: Runner, keep: str, n_tokens: int, minutes: float, alone: bool = False
) -> dict[str, Any]:
    """Decode ``n_tokens`` in one answer, or for so many minutes."""
    clock, cpu = np.zeros(n_tokens), np.zeros(n_tokens)
    used, marks = np.zeros(n_tokens, np.int64), [(0, 0)]
    with Engine(runner, base="") as engine:
        context = engine.context("stream", keep=keep)
        context.append(list(range(8, 72)))
        turn = context.begin(*request_from(n_tokens, OPTIONS))
        begun, n, other, left = time.perf_counter(), 0, Fresh(runner, keep), 0
        ratios: list[tuple[int, float]] = []
        new = own = 0.0
        while not turn.done and (n < 2 or time.perf_counter() - begun < 60 * minutes):
            before, busy = time.perf_counter(), time.process_time()
            engine.loop.step()
            clock[n], cpu[n] = time.perf_counter() - before, time.process_time() - busy
            used[n], n = context.session.state.rows.n_bytes, n + 1
            if n % 64 == 0:
                turn.take()
            if n % max(4 * BESIDE, n_tokens // 100) == 0 or n == 512:
                marks.append((n, resident()))
                if not (left or alone) and len(marks) % 5 == 1:
                    other.begin(context.session.state.rows.n)
                    left, new, own = BESIDE, 0.0, 0.0
            elif left:
                busy = time.process_time()
                other.step()
                new, own, left = new + time.process_time() - busy, own + cpu[n - 1], left - 1
                if not left:
                    ratios.append((n, own / new))
                    other.end()
        marks.append((n, resident()))
        was_over = turn.done
        if not was_over:
            turn.cancel()
        answer = turn.finish()
        other.engine.close()
        engine.check_integrity()
        rows = context.session.state.rows
        target = Keep.parse(keep).budget.rows or 0
        most = int(used[:n].max())
        found = {
            "keep": keep, "asked": n_tokens, "decoded": len(answer.tokens), "complete": was_over,
            "tenths": tenths((clock[:n], cpu[:n], used[:n]), marks, ratios), "rows_bytes_most": most,
            "rows_most": round(most / runner.row_bytes, 1), "rows_budget": target,
            "row_bytes": runner.row_bytes, "rows_left": rows.n, "limit": runner.limit,
            "different_tokens": len(set(answer.tokens)),
        }  # fmt: skip
    settled = [mark for mark in marks if mark[0] >= 512] or marks[-1:]
    (first, small), (last, large) = settled[0], settled[-1]
    grown = (large - small) / max(1, last - first)
    return found | {"resident_grows_bytes_per_token": round(max(0.0, grown), 1)}


def tenths(
    steps: tuple[np.ndarray, ...], marks: list[tuple[int, int]], ratios: list[tuple[int, float]]
) -> list[dict[str, Any]]:
    """Return time a token and memory in each tenth of the tokens; the first step is the prompt's."""
    made, (clock, cpu, used) = [], steps
    for part in np.array_split(np.arange(1, len(clock)), TENTHS):
        if not len(part):  # cut after a few tokens
            continue
        stop = int(part[-1]) + 1
        at = min((mark for mark in marks[1:]), key=lambda mark: abs(mark[0] - stop))
        beside = [ratio for n, ratio in ratios if part[0] < n <= stop]
        made.append({
            "over_fresh": round(float(np.median(beside)), 3) if beside else None,
            "upto": stop, "seconds_per_token": float(f"{clock[part].mean():.5g}"),
            "cpu_per_token": float(f"{cpu[part].mean():.5g}"),
            "median": float(f"{np.median(clock[part]):.5g}"),
            "p99": float(f"{np.quantile(clock[part], 0.99):.5g}"),
            "rows_bytes": int(used[part].max()), "resident_bytes": at[1],
        })  # fmt: skip
    return made


def show(found: dict[str, Any]) -> None:
    """Print the tenths."""
    rows = [
        (t["upto"], t["over_fresh"] or "", 1e3 * t["median"], 1e3 * t["seconds_per_token"], 1e3 * t["cpu_per_token"],
         t["rows_bytes"] / 2**20, t["resident_bytes"] / 2**20)
        for t in found["tenths"]
    ]  # fmt: skip
    head = ["tokens", "over fresh", "median ms", "mean ms", "cpu ms", "rows MiB", "process MiB"]
    Console(width=None if Console().is_terminal else 120).print(
        table(f"{found['keep']}, {found['decoded']:,} tokens", head, rows)
    )


def main() -> None:
    """Read the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--tokens", type=int, default=200_000)
    made.add_argument("--minutes", type=float, default=60.0, help="cancel the answer then")
    made.add_argument("--alone", action="store_true")
    made.add_argument("--keep", default="streaming:256")
    made.add_argument("--model", default=str(MODEL))
    made.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    options = made.parse_args()
    torch.set_num_threads(1)
    about = {"machine": machine(torch.device("cpu")), "model": Path(options.model).name}
    runner = Runner.load(options.model, device="cpu")
    found = stream(runner, options.keep, options.tokens, options.minutes, options.alone)
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.alone:
        result = (before or about) | {"alone": about | found}
    else:
        result = about | found | {k: v for k, v in before.items() if k == "alone"}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()

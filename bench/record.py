"""What a recording costs: plain decode and recorded decode behind one prompt, a random model of 0.2 B parameters.

Two processes. One decodes plainly, and says how much memory that took at most; the other decodes
plainly and with a recording in turns, ``--block`` steps each, from the same rows on, and says how much the
recording took and how long both were, by the clock and by the processor (which says more where others use it
too). The peak is of resident memory while it decodes, prefill left out; rows and what the recorder holds are counted
besides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch import Tensor

from kvweave.probe.recorder import PageRecorder, Recording, prefill
from kvweave.probe.trace import PageTrace, TraceHeader, TraceSteps, TraceWriter
from kvweave.run.base import Rows, Work

PAGE = 16
WAYS = ("plain", "recorded")
MIB = 1 << 20


class Decode:
    """Rows behind a prompt, and greedy steps from there on, with or without a recorder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        shape = common.shape_of(options)
        limit = options.context + options.block + 1
        self.runner = common.model_pair(shape, options.dtype, "cpu", limit).runner
        tokens = np.array(common.random_ids(options.context, shape.vocab, 0))
        self.how = Recording(page=PAGE)
        self.rows, self.logits = prefill(self.runner, tokens, options.context + options.block)
        self.recorder = PageRecorder(self.runner.layers, self.how)
        header = TraceHeader(PAGE, self.recorder.heads, options.context)
        self.writer = TraceWriter(folder / "a.kvt", header)
        self.n, self.held, self.written = options.context, 0, 0

    def run(self, steps: int, recorded: bool) -> list[float]:
        """Return the seconds a step takes in the mean of so many, of clock and processor, what is written with
        it; the rows are as before afterwards."""
        logits = self.logits

        def decode() -> None:
            nonlocal logits
            for _ in range(steps):
                logits = self.step(self.rows, logits, recorded)
            if recorded and self.recorder.n:
                self.write()

        found = common.took(decode, self.runner.device)
        self.rows.truncate(self.n)
        return [each / steps for each in found]

    def step(self, rows: Rows, logits: Tensor, recorded: bool) -> Tensor:
        """Decode one token, as `kvweave.probe.record` does."""
        slot, token = np.array([rows.n]), np.array([int(logits.argmax())])
        work = Work(rows, token, slot, slot, np.array([0]))
        if recorded:
            self.recorder.starts(rows.n)
            work.observer = self.recorder
        found = self.runner.forward([work])[0][0]
        if recorded and self.recorder.full:
            self.write()
        return found

    def write(self) -> None:
        """Write the steps that wait."""
        self.held = max(self.held, self.recorder.n_bytes)
        mass, access = self.recorder.take()
        n = mass.shape[-1]
        tokens = np.zeros(n, np.int32)
        self.writer.steps(TraceSteps(self.written, tokens, mass.numpy(), access.numpy()))
        self.written += n


def peak() -> int:
    """Return the most resident bytes since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def forget_peak() -> None:
    """Begin anew, where the system lets one."""
    Path("/proc/self/clear_refs").write_text("5")


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way in this process."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        decode = Decode(options, Path(folder))
        recorded = options.child == "recorded"
        decode.run(4, False)
        forget_peak()
        times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS if recorded else WAYS[:1]:
                times[way].append(decode.run(options.block, way == "recorded"))
        decode.writer.close()
        found = {
            "peak_bytes": peak(),
            "row_bytes": decode.rows.n_bytes,
            "times": times,
            "parameters": sum(p.numel() for p in decode.runner.model.parameters()),
        }
        if recorded:
            trace = PageTrace(Path(folder) / "a.kvt")
            assert trace.n_steps == options.rounds * options.block
            found["recorder_bytes"] = decode.held
            found["file_bytes_per_step"] = round(trace.path.stat().st_size / trace.n_steps)
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both processes; return what came out."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    return summed(found, options)


def summed(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Put two processes' measurements into one result."""
    plain, recorded = found["plain"], found["recorded"]
    by_clock, by_cpu = (
        {way: [r[i] for r in recorded["times"][way]] for way in WAYS} for i in (0, 1)
    )
    return {
        "setup": {
            "context": options.context, "block": options.block, "rounds": options.rounds, "page": PAGE,
            "parameters": plain["parameters"], "dtype": options.dtype, "threads": options.threads,
        },
        "seconds_per_step": {way: common.median(by_clock[way]) for way in WAYS},
        "cpu_seconds_per_step": {way: common.median(by_cpu[way]) for way in WAYS},
        "times_as_long": common.compare(by_clock["recorded"], by_clock["plain"]),
        "times_as_much_cpu": common.compare(by_cpu["recorded"], by_cpu["plain"]),
        "memory": {
            "plain_mib": round(plain["peak_bytes"] / MIB, 1),
            "recorded_mib": round(recorded["peak_bytes"] / MIB, 1),
            "rows_mib": round(recorded["row_bytes"] / MIB, 1),
            "recorder_mib": round(recorded["recorder_bytes"] / MIB, 2),
            "times_as_much": round(recorded["peak_bytes"] / plain["peak_bytes"], 3),
        },
        "file_bytes_per_step": recorded["file_bytes_per_step"],
        "machine": common.machine(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    """Read the command line."""
    made = common.parser(__doc__, context=16384, rounds=6, threads=1)
    made.add_argument("--block", type=int, default=64, help="steps of a turn")
    made.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    torch.set_num_threads(options.threads)
    found = measure(options)
    head = ["", "plain", "recorded", "ratio"]
    ms, cpu = (
        [1000 * found[key][way] for way in WAYS]
        for key in ("seconds_per_step", "cpu_seconds_per_step")
    )
    memory = found["memory"]
    rows = [
        ["ms a step", *ms, found["times_as_long"]["median"]],
        ["of a processor", *cpu, found["times_as_much_cpu"]["median"]],
        ["peak MiB", memory["plain_mib"], memory["recorded_mib"], memory["times_as_much"]],
    ]
    common.report(found, [common.table("recording", head, rows)], options, "record")


if __name__ == "__main__":
    main()

"""The demonstration in words and numbers: a line a turn, a table, a summary, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvweave import Runner, __version__

WAYS = ("kvweave", "reuse", "full", "prefix")
NAMES = {
    "kvweave": "kvweave",
    "reuse": "no repair",
    "full": "full prefill",
    "prefix": "prefix caching",
}
HEAD = (
    "      context  kvweave: tokens            first token, ms               right\n"
    "turn   tokens  reused  moved  rep. new   kvweave  reuse   full prefix  k r f p"
)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the pruned turns, and how often each way was right."""
    pruned = [row for row in rows if row["phase"] == "prune"]

    def middle(way: str, key: str) -> float:
        return float(statistics.median(row[way][key] for row in pruned))

    ways = {}
    for way in WAYS:
        verdicts = [row[way]["right"] for row in pruned if row[way]["right"] is not None]
        keys = ("ttft_ms", "computed", "answer_ms", "idle_ms")
        ways[way] = {key: middle(way, key) for key in keys} | {
            "total_ms": statistics.median(r[way]["answer_ms"] + r[way]["idle_ms"] for r in pruned),
            "speedup": middle("full", "ttft_ms") / middle(way, "ttft_ms"),
            "right": sum(verdicts),
            "asked": len(verdicts),
            "first_as_full": sum(row[way]["first_as_full"] for row in pruned),
            "text_as_full": sum(row[way]["text_as_full"] for row in pruned),
        }
    return {
        "turns": len(pruned),
        "n_tokens": round(statistics.median(row["n_tokens"] for row in pruned)),
        "ways": ways,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the last row; the turns that fill the context are one line together."""
    row, filling = rows[-1], [r for r in rows if r["phase"] == "fill"]
    if row["phase"] == "fill":
        return
    n = len(rows) - len(filling)
    if n == 1 and filling:
        medians = [statistics.median(r[w]["ttft_ms"] for r in filling) for w in WAYS]
        console.print(
            f"filled: {len(filling)} turns, {filling[-1]['n_tokens']:,} tokens; "
            "first token, ms: " + ", ".join(f"{m:.1f}" for m in medians),
        )
    if n % 25 == 1:
        console.print(HEAD, style="bold")
    k = row["kvweave"]
    marks = " ".join({True: "✓", False: "✗", None: "-"}[row[w]["right"]] for w in WAYS)
    times = "".join(f"{row[w]['ttft_ms']:7.1f}" for w in WAYS)
    console.print(
        f"{n:4}{row['n_tokens']:9,}{k['exact'] + k['reused']:8,}{k['moved']:7,}{k['repaired']:6,}"
        f"{k['prefilled']:5,}   {times}  {marks}"
    )


def table(report: dict[str, Any]) -> Table:
    """Return the closing table."""
    summary = report["summary"]
    title = f"medians of {summary['turns']} turns, {summary['n_tokens']:,} tokens of context"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("", no_wrap=True)
    heads = ("first\ntoken ms", "against\nfull", "tokens\ncomputed", "idle\nms",
             "answer +\nidle ms", "right", "text as\nfull")  # fmt: skip
    for head in heads:
        found.add_column(head, justify="right", no_wrap=True)
    for way, s in summary["ways"].items():
        found.add_row(
            NAMES[way], f"{s['ttft_ms']:.1f}", f"{s['speedup']:.1f}×", f"{s['computed']:,.0f}",
            f"{s['idle_ms']:.1f}", f"{s['total_ms']:.1f}", f"{s['right']}/{s['asked']}",
            f"{s['text_as_full']}/{summary['turns']}",
        )  # fmt: skip
    return found


def line(report: dict[str, Any]) -> str:
    """Return the summary in one line."""
    summary, repair = report["summary"], report["settings"]["repair"]
    k, reuse, full, prefix = (summary["ways"][way] for way in WAYS)
    return (
        f"summary: minus one turn, plus one: kvweave's first token comes {k['speedup']:.1f} times "
        f"as fast as a full prefill's with repair {repair!r}, {reuse['speedup']:.1f} times without "
        f"(prefix caching: {prefix['speedup']:.1f}); right {k['right']}/{k['asked']} and "
        f"{reuse['right']}/{reuse['asked']}, full prefill {full['right']}/{full['asked']}"
    )


def machine(runner: Runner) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.partition(":")[2].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    device = str(runner.device)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "kvweave": __version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of these sources; None when they are installed or not tracked."""
    here = Path(__file__)
    for command in (
        ["ls-files", "--error-unmatch", here.name],
        ["describe", "--always", "--dirty"],
    ):
        try:
            done = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
    return done.stdout.strip()

"""Which chunks should go first? Hit rates of all eviction policies on traces, and of what is declared.

Every block counts that is held (chunks need no prefix). Cache sizes are parts of all different
blocks. The last table is of a generated trace in which applications declare prunes and ends of
sessions: how much of LRU's distance to Belady's oracle does each policy close, in tokens?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import machine, report, table
from rich.table import Table

from kvweave.simulate import NAMES, Cost, Tier, Trace, generate, read, replay
from kvweave.simulate.generate import Shape

SHARES = (0.01, 0.03, 0.1, 0.3)
DECLARED = 0.03
TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"


def rates(trace: Trace, share: float, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return hit rates and mean seconds to the first token of each policy."""
    cost = Cost()
    unit = max(1, trace.block) * cost.token_bytes
    budget = max(1, int(trace.unique_tokens() // max(1, trace.block) * share)) * unit
    found = {}
    for name in names:
        result = replay(trace, name, [Tier("ram", budget, 20e9, 1.0)], cost)
        found[name] = {
            "blocks": round(result.block_rate, 4),
            "tokens": round(result.token_rate, 4),
            "ttft_s": round(result.mean_ttft, 4),
        }
    return found


def closed(by_policy: dict[str, dict[str, float]], what: str) -> dict[str, float]:
    """Return which part of the way from LRU to Belady each policy goes."""
    low, high = by_policy["lru"][what], by_policy["belady"][what]
    return {name: round((by[what] - low) / (high - low), 3) for name, by in by_policy.items()}


def declarations(n_seeds: int, shape: Shape) -> dict[str, Any]:
    """Return rates on generated traces, and the part of the gap closed, seed by seed."""
    found: dict[str, Any] = {"share": DECLARED, "seeds": []}
    for seed in range(n_seeds):
        by_policy = rates(generate(shape, seed), DECLARED, NAMES)
        gaps = {what: closed(by_policy, what) for what in ("tokens", "blocks")}
        found["seeds"].append({"rates": by_policy, "closed": gaps})
    return found


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    made = []
    if result["traces"]:
        heads = [f"{name} {share}" for name, by in result["traces"].items() for share in by]
        rows: list[list[object]] = [
            [
                policy,
                *(
                    by[policy]["blocks"]
                    for each in result["traces"].values()
                    for by in each.values()
                ),
            ]
            for policy in NAMES
        ]
        made.append(table("Block hit rates", ["policy", *heads], rows))
    seeds = result["declared"]["seeds"]
    rows = []
    for policy in NAMES:
        means = [
            sum(of(seed) for seed in seeds) / len(seeds)
            for of in (
                lambda seed, p=policy: seed["rates"][p]["tokens"],
                lambda seed, p=policy: seed["closed"]["tokens"][p],
                lambda seed, p=policy: seed["rates"][p]["blocks"],
                lambda seed, p=policy: seed["closed"]["blocks"][p],
                lambda seed, p=policy: seed["rates"][p]["ttft_s"],
            )
        ]
        rows.append([policy, *means])
    head = ["policy", "tokens", "gap closed", "blocks", "gap closed", "ttft s"]
    made.append(table(f"Declared prunes and ends, cache {DECLARED:.0%}", head, rows))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print tables, and write bench/results/policies.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, help="JSONL files (../shared/data/traces)")
    parser.add_argument("--seeds", type=int, default=5, help="generated traces")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    paths = options.traces or ([] if options.quick else sorted(TRACES.glob("*.jsonl")))
    traces: dict[str, Any] = {}
    for path in paths:
        trace = read(path)
        traces[path.stem] = {f"{share:.0%}": rates(trace, share, NAMES) for share in SHARES}
    shape = Shape(sessions=30) if options.quick else Shape()
    result = {
        "traces": traces,
        "declared": declarations(1 if options.quick else options.seeds, shape),
        "machine": machine(torch.device("cpu")),
    }
    report(result, tables(result), options, "policies")


if __name__ == "__main__":
    main()

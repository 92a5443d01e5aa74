"""Which chunks should go first? Hit rates of all eviction policies on traces, and of what is declared.

Every block counts that is held (chunks need no prefix). Cache sizes are parts of all different
blocks. The other tables are of generated traces in which applications declare prunes and ends of
sessions: how much of LRU's distance to Belady's oracle does each policy close? *Declared* is told
all, *undeclared* is the same requests without kinds, sessions, prunes and ends. With libcachesim
(for development only), its hit rates on the traces stand beside ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine, report, table
from rich.table import Table

from kvweave.simulate import NAMES, Cost, Tier, Trace, generate, read
from kvweave.simulate import replay as play
from kvweave.simulate.generate import Shape

try:
    import libcachesim
except ImportError:
    libcachesim = None

SHARES = (0.01, 0.03, 0.1, 0.3)
AHEAD = (4, 16)  # requests in the queue
TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
# gdsf with one size and one cost is our lfu; their LFUDA counts differently
PEERS = {"lru": "LRU", "arc": "ARC", "s3fifo": "S3FIFO", "lfu": "GDSF", "belady": "Belady"}
NEVER = 2**63 - 1
Rates = dict[str, dict[str, float]]


def room(trace: Trace, share: float) -> int:
    """Return how many units (blocks, or tokens where sizes differ) a share of the trace is."""
    return max(1, int(trace.unique_tokens() // max(1, trace.block) * share))


def rates(trace: Trace, share: float, names: Sequence[str], look_ahead: int = 0) -> Rates:
    """Return hit rates and mean seconds to the first token of each policy."""
    cost = Cost()
    tier = Tier("ram", room(trace, share) * max(1, trace.block) * cost.token_bytes, 20e9, 1.0)
    found = {}
    for name in names:
        result = play(trace, name, [tier], cost, look_ahead=look_ahead)
        found[name] = {
            "blocks": round(result.block_rate, 4),
            "tokens": round(result.token_rate, 4),
            "ttft_s": round(result.mean_ttft, 4),
        }
    return found


def peers(keys: Sequence[int], room: int) -> dict[str, float]:
    """Return libcachesim's hit rates for keys of one size, by our names."""
    after = [NEVER] * len(keys)
    seen: dict[int, int] = {}
    for at in range(len(keys) - 1, -1, -1):
        after[at], seen[keys[at]] = seen.get(keys[at], NEVER), at
    found = {}
    for name, theirs in PEERS.items():
        cache = getattr(libcachesim, theirs)(cache_size=room, hashpower=18)
        hits = sum(
            cache.get(
                libcachesim.Request(
                    obj_id=key + 1, obj_size=1, clock_time=at, next_access_vtime=after[at]
                )
            )
            for at, key in enumerate(keys)
        )
        found[name] = round(hits / len(keys), 4)
    return found


def on_trace(path: Path) -> dict[str, Any]:
    """Return the rates of all policies at all sizes, and libcachesim's."""
    trace = read(path)
    found: dict[str, Any] = {f"{share:.0%}": rates(trace, share, NAMES) for share in SHARES}
    if libcachesim is not None:
        keys = [key for request in trace.requests for key in request.blocks]
        for share in SHARES:
            for name, rate in peers(keys, room(trace, share)).items():
                found[f"{share:.0%}"][name]["libcachesim"] = rate
    return found


def closed(by_policy: Rates, what: str) -> dict[str, float]:
    """Return which part of the way from LRU to Belady each policy goes."""
    low, high = by_policy["lru"][what], by_policy["belady"][what]
    return {name: round((by[what] - low) / (high - low), 3) for name, by in by_policy.items()}


def bare(trace: Trace) -> Trace:
    """Return the trace with nothing told."""
    requests = [
        replace(r, kinds=("",) * len(r.blocks), session="", pruned=(), ended=False)
        for r in trace.requests
    ]
    return Trace(requests, trace.block)


def generated(seed: int, shape: Shape) -> dict[str, Any]:
    """Return rates, and the part of the gap closed, at all sizes of one generated trace."""
    trace = generate(shape, seed)
    untold = bare(trace)
    found: dict[str, Any] = {}
    for share in SHARES:
        by_policy = rates(trace, share, NAMES)
        by_policy["undeclared"] = rates(untold, share, ["declared"])["declared"]
        for n in AHEAD:
            ahead = rates(trace, share, ["declared"], n)["declared"]
            by_policy[f"queue of {n}"] = ahead
        gaps = {what: closed(by_policy, what) for what in ("tokens", "blocks")}
        found[f"{share:.0%}"] = {"rates": by_policy, "closed": gaps}
    return found


def mean(seeds: Sequence[Any], of: Callable[[Any], float]) -> float:
    """Return the mean over seeds."""
    return sum(map(of, seeds)) / len(seeds)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    made = []
    if result["traces"]:
        heads = [f"{name} {share}" for name, by in result["traces"].items() for share in by]
        rows: list[list[object]] = [
            [p, *(by[p]["blocks"] for t in result["traces"].values() for by in t.values())]
            for p in NAMES
        ]
        made.append(table("Block hit rates", ["policy", *heads], rows))
    seeds = result["generated"]
    for share in seeds[0]:
        rows = []
        for policy in seeds[0][share]["rates"]:
            pick: list[Callable[[Any], float]] = [
                lambda s, p=policy, a=share: s[a]["rates"][p]["tokens"],
                lambda s, p=policy, a=share: s[a]["closed"]["tokens"][p],
                lambda s, p=policy, a=share: s[a]["rates"][p]["blocks"],
                lambda s, p=policy, a=share: s[a]["closed"]["blocks"][p],
                lambda s, p=policy, a=share: s[a]["rates"][p]["ttft_s"],
            ]
            rows.append([policy, *(round(mean(seeds, of), 4) for of in pick)])
        head = ["policy", "tokens", "gap closed", "blocks", "gap closed", "ttft s"]
        made.append(table(f"Declared prunes and ends, cache {share}", head, rows))
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
    shape = Shape(sessions=30) if options.quick else Shape()
    result = {
        "traces": {path.stem: on_trace(path) for path in paths},
        "generated": [generated(s, shape) for s in range(1 if options.quick else options.seeds)],
        "machine": machine(torch.device("cpu")),
    }
    report(result, tables(result), options, "policies")


if __name__ == "__main__":
    main()

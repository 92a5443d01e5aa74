"""Which chunks should go first, and what would a deployment need? Policies, tiers, queues and routers.

Generated traces, in which applications declare prunes and ends of sessions, with means over seeds and
their bootstrap intervals: how much of LRU's distance to Belady's oracle does each policy close, also
when pruned chunks come back and pauses have heavy tails? *Undeclared* is the same requests without
kinds, sessions, prunes and ends. Published traces are chained by prefix: they count as a prefix cache
would. Then the load that an SLO allows, by policy, router and arrivals, and costs fitted to a log of a
real engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import machine, report, table
from rich.table import Table

from kvweave import Engine
from kvweave.cli.home import BUNDLED
from kvweave.simulate import (
    NAMES,
    Arrivals,
    Cost,
    Setup,
    Tier,
    Trace,
    generate,
    largest_load,
    read,
    replay,
    serve,
)
from kvweave.simulate.calibrate import entry, fit
from kvweave.simulate.cost import TYPICAL
from kvweave.simulate.generate import Shape, asked_again
from kvweave.simulate.interval import interval
from kvweave.simulate.replaying import percentile
from kvweave.simulate.route import ROUTERS

SHARES = (0.01, 0.03, 0.1)
AHEAD = (16,)  # requests in the queue
FEW = ("lru", "dead_first", "reuse", "declared", "belady")
SHAPES = {
    "regret 10 %": {"regret": 0.1}, "regret 30 %": {"regret": 0.3},
    "lognormal pauses": {"pauses": "lognormal"}, "Pareto pauses": {"pauses": "pareto"},
}  # fmt: skip
REPAIRS = (0.0, 0.05, 0.1, 0.3)
SLO = 3.0  # seconds: a long prompt that nobody knows takes two
TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"  # or give them as arguments
LARGEST = ("requests_per_s", "p50_s", "p99_s", "utilisation", "dollars_per_thousand", "disk_years")
Found = dict[str, Any]


def tier(trace: Trace, name: str, share: float, **more: float) -> Tier:
    """Return a typical tier that holds a share of all chunks of a trace."""
    budget = max(1, int(trace.unique_tokens() * share * Cost().token_bytes))
    typical = TYPICAL[name]
    made = Tier(name, budget, typical.bandwidth, typical.price, drive_writes=typical.drive_writes)
    return replace(made, **more)


def rates(trace: Trace, share: float, names: Iterable[str], look_ahead: int = 0) -> Found:
    """Return hit rates and mean seconds to the first token of each policy, with memory only."""
    found = {}
    for name in names:
        result = replay(trace, name, [tier(trace, "ram", share)], look_ahead=look_ahead)
        found[name] = {
            "tokens": result.token_rate, "blocks": result.block_rate, "ttft_s": result.mean_ttft,
        }  # fmt: skip
    return found


def closed(by_policy: Found) -> None:
    """Add which part of the way from LRU to Belady each policy goes."""
    for what in ("tokens", "blocks"):
        low, high = by_policy["lru"][what], by_policy["belady"][what]
        for by in by_policy.values():
            by[f"{what}_closed"] = (by[what] - low) / (high - low) if high > low else None


def bare(trace: Trace) -> Trace:
    """Return the trace with nothing told."""
    requests = [
        replace(
            r, kinds=("",) * len(r.blocks), session="", pruned=(), ended=False,
            made=tuple(m._replace(kind="") for m in r.made),
        )
        for r in trace.requests
    ]  # fmt: skip
    return Trace(requests, trace.block)


def generated(shape: Shape, seed: int) -> Found:
    """Return rates of all policies at all sizes of one trace."""
    trace, found = generate(shape, seed), {}
    for share in SHARES:
        by_policy = rates(trace, share, NAMES)
        by_policy["undeclared"] = rates(bare(trace), share, ["declared"])["declared"]
        for n in AHEAD:
            by_policy[f"queue of {n}"] = rates(trace, share, ["declared"], n)["declared"]
        closed(by_policy)
        found[f"{share:.0%}"] = by_policy
    return found


def shaped(shape: Shape, seed: int) -> Found:
    """Return rates of a few policies on traces of several shapes, and how much was asked for again."""
    found: Found = {}
    for name, change in SHAPES.items():
        trace = generate(replace(shape, **change), seed)
        found[name] = {"asked again": {"share": {"of_pruned": asked_again(trace)}}}
        for share in SHARES[1:]:
            by_policy = rates(trace, share, FEW)
            closed(by_policy)
            found[name][f"{share:.0%}"] = by_policy
    return found


def tiered(shape: Shape, seed: int) -> Found:
    """Return what two tiers do, and what chunks cost against a prefix cache at several repairs."""
    trace = generate(shape, seed)
    both = [tier(trace, "ram", 0.03), tier(trace, "disk", 0.1)]
    found: Found = {"tiers": {}, "repair": {}}
    for name in NAMES:
        result = replay(trace, name, both)
        disk = result.moved["disk"]
        found["tiers"][name] = {
            "tokens": result.token_rate, "ttft_s": result.mean_ttft,
            "written_gib": disk.written / 2**30, "read_gib": disk.read / 2**30,
        }  # fmt: skip
    ways = {f"chunks, repair {share:.0%}": ("chunks", share) for share in REPAIRS}
    for name, (hits, share) in {"prefix": ("prefix", 0.0), **ways}.items():
        result = replay(trace, "declared", both, Cost(repair=share), hits)  # type: ignore[arg-type]
        found["repair"][name] = {
            "tokens": result.token_rate, "ttft_s": result.mean_ttft,
            "requests_per_s": result.throughput, "device_s": result.busy["device"],
            "canonical_s": result.canonical,
        }  # fmt: skip
    return found


def planned(shape: Shape, seed: int) -> Found:
    """Return the largest loads an SLO allows on one node, and what four nodes do by router."""
    trace = generate(replace(shape, pause=20.0), seed)
    both = [tier(trace, "ram", 0.03), tier(trace, "disk", 0.1)]
    found: Found = {"largest": {}, "routers": {}, "ttl": {}}
    cases = {
        "prefix cache, lru": ("lru", "prefix", "poisson"),
        "chunks, lru": ("lru", "chunks", "poisson"),
        "chunks, declared": ("declared", "chunks", "poisson"),
        "chunks, declared, bursty": ("declared", "chunks", "bursty"),
    }
    for name, (policy, hits, kind) in cases.items():
        setup = Setup(policy, both, hits=hits)  # type: ignore[arg-type]
        best = largest_load(trace, setup, Arrivals(kind, 1.0, seed), SLO)  # type: ignore[arg-type]
        if best is None:
            found["largest"][name] = dict.fromkeys(LARGEST) | {"requests_per_s": 0.0}
            continue
        told: Found = best.to_dict()
        figures = (
            best.rate, percentile(best.result.ttft, 0.5), percentile(best.result.ttft, 0.99),
            best.utilisation, told["dollars"]["per_thousand_requests"], told["wear"]["disk"]["years"],
        )  # fmt: skip
        found["largest"][name] = dict(zip(LARGEST, figures, strict=True))
    for router in ROUTERS:
        small = [replace(each, budget=each.budget // 2) for each in both]
        setup = Setup("declared", small, nodes=4, router=router)
        served = serve(trace, setup, Arrivals("poisson", 6.0, seed))
        found["routers"][router] = {
            "tokens": served.result.token_rate, "p50_s": percentile(served.result.ttft, 0.5),
            "p99_s": percentile(served.result.ttft, 0.99), "utilisation": served.utilisation,
            "busiest": max(served.per_node) / served.result.requests * setup.nodes,
        }  # fmt: skip
    for seconds in (30.0, 120.0, 600.0):
        setup = Setup("declared", [replace(each, ttl=seconds) for each in both])
        served = serve(trace, setup, Arrivals("poisson", 1.0, seed))
        found["ttl"][f"{seconds:.0f} s"] = {
            "tokens": served.result.token_rate, "p99_s": percentile(served.result.ttft, 0.99),
        }  # fmt: skip
    return found


def on_trace(path: Path) -> Found:
    """Return the rates of a prefix cache under all policies at all sizes of a published trace."""
    trace, found = read(path), {"chained": read(path).chained}
    for share in (*SHARES, 0.3):
        by = {name: replay(trace, name, [tier(trace, "ram", share)], hits="prefix") for name in NAMES}  # fmt: skip
        found[f"{share:.0%}"] = {name: round(result.block_rate, 4) for name, result in by.items()}
    return found


def calibrated(n: int) -> Found:
    """Fit costs to the log of the bundled model on this machine, woven from chunks of many sizes."""
    rng, rows = Random(0), []
    with Engine(str(BUNDLED)) as engine:
        words = "so well then we saw it was a day of rain".split()
        for at in range(n):
            names = []
            for number in range(rng.randint(1, 6)):
                names.append(f"c/{at}/{number}")
                text = " ".join(rng.choices(words, k=rng.randint(20, 250)))
                engine.put(names[-1], f"{text} {at} {number} .")
            asked = " ".join(rng.choices(words, k=rng.randint(4, 300)))
            context = engine.compose(f"{{docs}} {asked}", docs=names)
            answer = context.generate(max_tokens=2)
            rows.append(entry(answer.plan, float(answer.usage["ttft"])))  # type: ignore[arg-type]
            context.close()
    found = fit(rows[2:])  # the first ones warm up
    seen = found.token > 0  # else the machine was too busy to see what tokens cost
    return {
        "answers": found.n, "error": round(found.error, 4), "fixed_s": round(found.fixed, 5),
        "tokens_per_s": round(1 / found.token, 1) if seen else None,
        "doubles_at": found.cost().doubles_at if seen else None,
    }  # fmt: skip


def summed(seeds: Sequence[Any]) -> Any:
    """Return the same tree with, for each number, its mean and interval over seeds."""
    first = seeds[0]
    if isinstance(first, dict):
        return {key: summed([seed[key] for seed in seeds]) for key in first}
    known = [value for value in seeds if value is not None]
    return [round(x, 4) for x in interval(known)] if known else None


def shown(value: Sequence[float]) -> str:
    """Return ``0.31 [0.29, 0.33]``."""
    return f"{value[0]:.3g} [{value[1]:.3g}, {value[2]:.3g}]"


def flat(title: str, by_name: Found) -> Table:
    """Return a table: a name a row, a figure a column."""
    columns = list(next(iter(by_name.values())))
    rows = [[name, *(shown(by[c]) if by[c] else "-" for c in columns)] for name, by in by_name.items()]  # fmt: skip
    return table(title, ["", *columns], rows)


def tables(result: Found) -> list[Table]:
    """Return what is printed."""
    made = [flat(f"Declared, cache {share}", by) for share, by in result["generated"].items()]
    for name, by_share in result["shapes"].items():
        made += [flat(f"{name}, {share}", by) for share, by in by_share.items()]
    made += [flat(name, result["tiered"][name]) for name in result["tiered"]]
    made += [flat(name, result["planned"][name]) for name in result["planned"]]
    for name, by_share in result["traces"].items():
        rows = [
            [p, *(by[p] for share, by in by_share.items() if share != "chained")] for p in NAMES
        ]
        heads = [share for share in by_share if share != "chained"]
        made.append(table(f"Prefix cache on {name}: blocks hit", ["", *heads], rows))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print tables, and write bench/results/policies.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, help="JSONL files (../shared/data/traces)")
    parser.add_argument("--seeds", type=int, default=6, help="generated traces; half to plan")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 1: none but this")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    quick = options.quick
    paths = options.traces or ([] if quick else sorted(TRACES.glob("*.jsonl")))
    shape = Shape(sessions=8) if quick else Shape(sessions=150)
    n = 1 if quick else options.seeds
    result: Found = {"setup": {"sessions": shape.sessions, "seeds": n, "slo_s": SLO}}
    result["calibration"] = calibrated(10 if quick else 80)
    apart = partial(ProcessPoolExecutor, mp_context=get_context("spawn"))
    with (apart if options.jobs > 1 else ThreadPoolExecutor)(options.jobs) as pool:

        def each(run: Callable[[Shape, int], Found], shape: Shape, seeds: int) -> Any:
            return summed(list(pool.map(partial(run, shape), range(seeds))))

        few = Shape(sessions=3) if quick else shape
        result["planned"] = each(planned, few, max(1, n // 2))
        result["generated"] = each(generated, shape, n)
        result["shapes"] = each(shaped, few, n)
        result["tiered"] = each(tiered, few, n)
        found = pool.map(on_trace, paths)
        result["traces"] = {path.stem: by for path, by in zip(paths, found, strict=True)}
    result["machine"] = machine(torch.device("cpu"))
    report(result, tables(result), options, "policies")


if __name__ == "__main__":
    main()

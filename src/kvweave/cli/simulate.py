"""``kvweave simulate``: policies and tiers on a trace, or nodes under a load, as a table or JSON."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.cli.command import UsageError
from kvweave.cli.show import Out
from kvweave.cli.simulate_arguments import GENERATED
from kvweave.errors import nearest, of_system
from kvweave.simulate import (
    NAMES,
    Arrivals,
    Cost,
    Served,
    Setup,
    Shape,
    Tier,
    Trace,
    generate,
    largest_load,
    read,
    replay,
)
from kvweave.simulate.bill import Prices
from kvweave.simulate.calibrate import Fit, fit, read_log
from kvweave.simulate.cost import size, tiers
from kvweave.simulate.draw import draw, kind_of
from kvweave.simulate.play import Hits
from kvweave.simulate.route import ROUTERS
from kvweave.simulate.sweep import Point, front, sizes_of, sweep, under_load

HEAD = (
    "policy", "tiers", "blocks hit", "tokens hit", "ttft", "p99", "requests/s", "loaded", "written",
    "$/month",
)  # fmt: skip
LOADED = (
    "policy", "tiers", "router", "tokens hit", "requests/s", "p50", "p99", "wait p99", "busy",
    "$/1000",
)  # fmt: skip
GIB = 2**30


def simulate(args: Namespace) -> None:
    """Replay or serve the trace and print what was found."""
    out = Out.of(args)
    policies, routers = _chosen("policy", args.policy, NAMES), _chosen("router", args.router, [*ROUTERS])  # fmt: skip
    if args.plot and not args.sizes:
        raise UsageError("--plot draws what --sizes found", "give --sizes too")
    if args.plot:
        kind_of(Path(args.plot))
    loaded = bool(args.load or args.slo)
    if args.arrivals and not loaded:
        raise UsageError("--arrivals need a load", "give --load, or --slo to find the largest")
    trace, fitted = _trace(args), fit(read_log(args.calibrate)) if args.calibrate else None
    cost, hits = _cost(args, fitted), _hits(args, trace, out)
    all_bytes = trace.unique_tokens() * cost.token_bytes
    wanted = tiers(args.tiers, all_bytes)
    wanted = fitted.tiers(wanted) if fitted else wanted
    sizes = [size(text, all_bytes) for text in args.sizes or ()]
    choices = sizes_of(wanted, sizes) if sizes else [wanted]
    points = []
    for router in routers if loaded else [""]:
        run = _run(args, trace, (cost, hits, router))
        points += sweep(policies, choices, run)
    if not points:
        raise UsageError(f"no load keeps {args.slo:g} s", "allow more, or give more tiers")
    best = front(points) if sizes else []
    if out.as_json:
        found: dict[str, Any] = {"hits": hits, "all_bytes": all_bytes, "chained": trace.chained}
        found |= {"calibration": vars(fitted)} if fitted else {}
        rows = [_json(p, args.slo) | ({"front": p in best} if sizes else {}) for p in points]
        out.data(found | {"results": rows})
    else:
        head, row = (LOADED, _loaded_row) if loaded else (HEAD, _row)
        out.table(head, [row(point, point in best) for point in points], 3 if loaded else 2)
    if args.plot:
        _draw(points, Path(args.plot), out)


def _draw(points: Sequence[Point], path: Path, out: Out) -> None:
    """Write the figure, behind what was told: that is not lost where the figure cannot be written."""
    try:
        if not draw(points, path):
            out.note("no figure: pip install 'kvweave[plot]'")
    except OSError as error:
        raise of_system(error, "write", path) from error


def _run(
    args: Namespace, trace: Trace, about: tuple[Cost, Hits, str]
) -> Callable[[str, Sequence[Tier]], Any]:
    """Return what is done with each policy and choice of tiers."""
    cost, hits, router = about
    if not router:
        return lambda policy, tiers: replay(trace, policy, tiers, cost, hits, args.look_ahead)
    arrivals = Arrivals(args.arrivals or "poisson", args.load or 1.0, args.seed)

    def setup(policy: str, tiers: Sequence[Tier]) -> Setup:
        return Setup(
            policy, tiers, cost, hits, args.nodes, args.slots, router,
            prices=Prices(args.node_price),
        )  # fmt: skip

    def largest(policy: str, tiers: Sequence[Tier]) -> Served | None:
        return largest_load(trace, setup(policy, tiers), arrivals, args.slo)

    if not args.load:
        return largest
    return lambda policy, tiers: under_load(trace, setup(policy, tiers), arrivals)(policy, tiers)


def _trace(args: Namespace) -> Trace:
    if args.trace != GENERATED:
        return read(args.trace)
    return generate(Shape(args.sessions, pauses=args.pauses, regret=args.regret), args.seed)


def _hits(args: Namespace, trace: Trace, out: Out) -> Hits:
    """Return how hits are counted. Raises UsageError for chunks where a trace cannot show them."""
    if not trace.chained:
        return args.hits or "chunks"
    if args.hits == "chunks":
        raise UsageError(
            "no block of this trace is ever used behind another predecessor: it cannot show what "
            "chunks at any position would hit",
            "use --hits prefix, or a trace whose ids name content",
        )
    out.note("the trace's ids are chained by prefix: counting what a prefix cache hits")
    return "prefix"


def _chosen(what: str, names: list[str], known: Sequence[str]) -> list[str]:
    chosen = list(known) if names == ["all"] else list(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            near = nearest(name, list(known), 1)
            hint = f"did you mean {near[0]}?" if near else f"some of {', '.join(known)}, or all"
            raise UsageError(f"no {what} {name!r}", hint)
    if not chosen:
        raise UsageError(f"no {what}", f"some of {', '.join(known)}, or all")
    return chosen


def _cost(args: Namespace, fitted: Fit | None) -> Cost:
    """Return the costs: typical, then as fitted, then as said."""
    cost = fitted.cost() if fitted else Cost()
    said = {
        "seconds": 1 / args.prefill_rate if args.prefill_rate else None,
        "doubles_at": args.doubles_at,
        "token_bytes": args.token_bytes,
        "repair": args.repair,
        "overlap": args.overlap,
        "decode": 1 / args.decode_rate if args.decode_rate else None,
    }
    return replace(cost, **{name: value for name, value in said.items() if value is not None})


def _json(point: Point, slo: float | None) -> dict[str, Any]:
    return point.result.to_dict() if point.served is None else point.served.to_dict(slo)


def _tiers(point: Point) -> str:
    return " ".join(f"{tier.name}:{tier.budget / GIB:.3g}GiB" for tier in point.result.tiers)


def _row(point: Point, is_best: bool) -> list[str]:
    result = point.result
    return [
        result.policy,
        _tiers(point),
        f"{result.block_rate:.2%}",
        f"{result.token_rate:.2%}",
        f"{result.mean_ttft:.3f} s",
        f"{result.percentile(0.99):.3f} s",
        f"{result.throughput:.3g}",
        f"{sum(result.loaded.values()) / GIB:.3g} GiB",
        f"{sum(moved.written for moved in result.moved.values()) / GIB:.3g} GiB",
        f"{result.monthly:.3g}{' *' if is_best else ''}",
    ]


def _loaded_row(point: Point, is_best: bool) -> list[str]:
    served = point.served
    assert served is not None
    found: dict[str, Any] = served.to_dict()
    return [
        found["policy"],
        _tiers(point),
        found["router"],
        f"{point.result.token_rate:.2%}",
        f"{served.rate:.3g}",
        f"{found['ttft_s']['p50']:.3f} s",
        f"{found['ttft_s']['p99']:.3f} s",
        f"{found['wait_s']['p99']:.3f} s",
        f"{served.utilisation:.0%}",
        f"{found['dollars']['per_thousand_requests']:.3g}{' *' if is_best else ''}",
    ]

"""``kvweave simulate``: policies and tiers on a trace, as a table or JSON."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from kvweave.cli.parser import UsageError
from kvweave.cli.show import Out
from kvweave.errors import nearest
from kvweave.simulate import NAMES, Cost, Result, read, replay
from kvweave.simulate.cost import size, tiers
from kvweave.simulate.sweep import draw, front, sweep

HEAD = (
    "policy", "tiers", "blocks hit", "tokens hit", "ttft", "p95", "requests/s", "loaded", "moved",
    "price",
)  # fmt: skip
GIB = 2**30


def simulate(args: Namespace) -> None:
    """Replay the trace and print what was found."""
    out = Out.of(args)
    policies = _policies(args.policy)
    if args.plot and not args.sizes:
        raise UsageError("--plot draws what --sizes found", "give --sizes too")
    cost = _cost(args)
    trace = read(args.trace)
    all_bytes = trace.unique_tokens() * cost.token_bytes
    wanted = tiers(args.tiers, all_bytes)
    if args.sizes:
        sizes = [size(text, all_bytes) for text in args.sizes]
        results = sweep(trace, policies, wanted, sizes, cost, args.hits, args.look_ahead)
        best = front(results)
    else:
        results = [
            replay(trace, policy, wanted, cost, args.hits, args.look_ahead) for policy in policies
        ]
        best = []
    if args.plot and not draw(results, Path(args.plot)):
        out.note("no figure: pip install 'kvweave[plot]'")
    if out.as_json:
        on_front = {id(result) for result in best}
        rows = [r.to_dict() | ({"front": id(r) in on_front} if best else {}) for r in results]
        out.data({"hits": args.hits, "all_bytes": all_bytes, "results": rows})
        return
    out.table(HEAD, [_row(result, result in best) for result in results], 2)


def _policies(names: list[str]) -> list[str]:
    chosen = list(NAMES) if names == ["all"] else list(dict.fromkeys(names))
    for name in chosen:
        if name not in NAMES:
            near = nearest(name, NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else f"some of {', '.join(NAMES)}, or all"
            raise UsageError(f"no policy {name!r}", hint)
    if not chosen:
        raise UsageError("no policy", f"some of {', '.join(NAMES)}, or all")
    return chosen


def _cost(args: Namespace) -> Cost:
    default = Cost()
    return Cost(
        1 / args.prefill_rate if args.prefill_rate else default.seconds,
        args.doubles_at or default.doubles_at,
        args.token_bytes or default.token_bytes,
    )


def _row(result: Result, is_best: bool) -> list[str]:
    sizes = " ".join(f"{tier.name}:{tier.budget / GIB:.3g}GiB" for tier in result.tiers)
    return [
        result.policy,
        sizes,
        f"{result.block_rate:.2%}",
        f"{result.token_rate:.2%}",
        f"{result.mean_ttft:.3f} s",
        f"{result.percentile(0.95):.3f} s",
        f"{result.throughput:.3g}",
        f"{sum(result.loaded.values()) / GIB:.3g} GiB",
        f"{sum(result.moved.values()) / GIB:.3g} GiB",
        f"{result.cost:.3g}{' *' if is_best else ''}",
    ]

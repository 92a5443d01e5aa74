"""Many sizes of tiers: which are worth their price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.simulate.replay import Hits, Result, replay
from kvweave.simulate.trace import Trace

Aims = tuple[float, float, float]  # less is better in each


def sweep(
    trace: Trace,
    policies: Sequence[str],
    tiers: Sequence[Tier],
    sizes: Sequence[int],
    cost: Cost = DEFAULT,
    hits: Hits = "chunks",
    look_ahead: int = 0,
) -> list[Result]:
    """Replay under each policy with each tier at each size (bytes), in all combinations."""
    return [
        replay(
            trace,
            policy,
            [replace(t, budget=n) for t, n in zip(tiers, chosen, strict=True)],
            cost,
            hits,
            look_ahead,
        )
        for policy in policies
        for chosen in product(sizes, repeat=len(tiers))
    ]


def front(results: Sequence[Result]) -> list[Result]:
    """Return those that no other one beats, cheapest first.

    One beats another if it is no worse in price, mean time to first token and throughput, and better
    in one of them, as in Kareto (arXiv 2603.08739). Of equal ones the first stays. The oracle takes
    no part beside others: nobody can have it.
    """
    real = [result for result in results if result.policy != "belady"] or results
    aims = [(r.cost, r.mean_ttft, -r.throughput) for r in real]
    best = [
        at
        for at, mine in enumerate(aims)
        if mine not in aims[:at] and not any(_beats(other, mine) for other in aims)
    ]
    return [real[at] for at in sorted(best, key=aims.__getitem__)]


def _beats(one: Aims, other: Aims) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def draw(results: Sequence[Result], path: Path) -> bool:
    """Write a figure of all results and their front; return False without matplotlib.

    Two views of the same points: price against time to first token, and against throughput.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's default backend is
    best = front(results)
    views: tuple[tuple[str, Callable[[Result], float]], ...] = (
        ("mean time to first token (s)", lambda result: result.mean_ttft),
        ("requests a second", lambda result: result.throughput),
    )
    for axes, (label, of) in zip(figure.subplots(1, 2), views, strict=True):
        axes.scatter(
            [r.cost for r in best], [of(r) for r in best],
            s=70, facecolors="none", edgecolors="#222222", linewidths=1.0, label="front",
        )  # fmt: skip
        for policy in dict.fromkeys(result.policy for result in results):
            mine = [result for result in results if result.policy == policy]
            axes.scatter([r.cost for r in mine], [of(r) for r in mine], s=18, label=policy)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("price of the tiers (as GiB of host memory)")
        axes.set_ylabel(label)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
    return True

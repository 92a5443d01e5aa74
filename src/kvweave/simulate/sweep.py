"""Many sizes of tiers: which are worth their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.simulate.replay import Hits, Result, replay
from kvweave.simulate.trace import Trace


def sweep(
    trace: Trace,
    policies: Sequence[str],
    tiers: Sequence[Tier],
    sizes: Sequence[int],
    cost: Cost = DEFAULT,
    hits: Hits = "chunks",
) -> list[Result]:
    """Replay under each policy with each tier at each size (bytes), in all combinations."""
    return [
        replay(
            trace,
            policy,
            [replace(t, budget=n) for t, n in zip(tiers, chosen, strict=True)],
            cost,
            hits,
        )
        for policy in policies
        for chosen in product(sizes, repeat=len(tiers))
    ]


def front(results: Sequence[Result]) -> list[Result]:
    """Return those that no other one beats in price and mean time to first token, cheapest first."""
    best: list[Result] = []
    for result in sorted(results, key=lambda r: (r.cost, r.mean_ttft)):
        if not best or result.mean_ttft < best[-1].mean_ttft:
            best.append(result)
    return best


def draw(results: Sequence[Result], path: Path) -> bool:
    """Write a figure of all results and their front; return False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's default backend is
    axes = figure.subplots()
    for policy in dict.fromkeys(result.policy for result in results):
        mine = [result for result in results if result.policy == policy]
        axes.scatter([r.cost for r in mine], [r.mean_ttft for r in mine], s=16, label=policy)
    best = front(results)
    axes.plot(
        [r.cost for r in best], [r.mean_ttft for r in best], "k--", linewidth=1, label="front"
    )
    axes.set_xscale("log")
    axes.set_xlabel("price of the tiers (GiB of host memory)")
    axes.set_ylabel("mean time to first token (s)")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True

"""The figure of docs/prune-bench.md: what each rule computes, engine by engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvweave.suite import plot

WAYS = {"prefix": "prefix caching", "auto": "kvweave, auto 5 %", "none": "kvweave, no repair"}


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw what rules compute, and what they cost; return False without counts or matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if "count" not in result:
        return False
    rules = dict(list(result["count"]["as they are"]["rules"].items())[1:])
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(
        panels, {"computed": "tokens computed", "price": "price"}.items(), strict=True
    ):
        for i, (way, label) in enumerate(WAYS.items()):
            places = [y + 0.27 * (1 - i) for y in range(len(rules), 0, -1)]
            values = [found[key][way] for found in rules.values()]
            axes.barh(places, values, height=0.25, color=plot.COLOURS[i], label=label)
        axes.axvline(1, color="#777777", linestyle=":", linewidth=0.8)
        axes.set_xlabel(f"{title}, of no edits with a prefix cache", fontsize=9)
        axes.set_yticks(range(len(rules), 0, -1), list(rules), fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(WAYS),
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
    return True

"""The figure of the suite: quality against repaired rows, a small multiple for each protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.chunk.rebuild import replacing
from kvweave.suite.report import Row, title

# Okabe and Ito's palette, told apart by markers too
COLOURS = ("#999999", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = "osD^vPX*"
SKIPPED = ("P5 leak", "P5 leak-fact", "P5 leak-alias")
FLOOR = 1e-7  # nats; below it a KL is rounding


def draw(rows: Sequence[Row], strategies: Sequence[str], path: Path, subtitle: str = "") -> bool:
    """Write the figure to ``path``; return False when matplotlib is not installed.

    ``strategies`` are the lines, in the order of the legend (without "seen"). ``none`` is the point without repair
    where all lines begin.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [r for r in rows if r["base"] and r["mode"] in ("", "forget")]
    names = [t for t in dict.fromkeys(title(r) for r in shown) if t not in SKIPPED]
    columns = -(-len(names) // 2) if len(names) > 5 else len(names)
    bands = -(-len(names) // columns)
    figure = Figure(figsize=(2.2 * columns + 1, 4.8 * bands + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * bands, columns, sharex=True, squeeze=False)
    for unused in axes[-2:, columns - (bands * columns - len(names)) :].flat:
        unused.set_visible(False)
    for at, name in enumerate(names):
        mine = [r for r in shown if title(r) == name]
        band, column = divmod(at, columns)
        upper, lower = axes[2 * band][column], axes[2 * band + 1][column]
        for i, strategy in enumerate(strategies):
            _line(upper, lower, _points(mine, strategy), strategy, i)
        upper.axhline(1.0, color="#777777", linewidth=0.8, linestyle=":")
        counts = all(r["counts"] for r in mine)
        upper.set_title(
            name if counts else f"{name}\nfull prefill {mine[0]['full']:.0%}", fontsize=9
        )
        lower.set_yscale("log")
        lower.set_xlabel("rows repaired (%)", fontsize=8)
        for a in (upper, lower):
            a.grid(True, which="major", color="#dddddd", linewidth=0.6)
            a.set_axisbelow(True)
            a.spines[["top", "right"]].set_visible(False)
            a.tick_params(which="both", labelsize=8)
    for band in range(bands):
        axes[2 * band][0].set_ylabel("accuracy / full prefill")
        axes[2 * band + 1][0].set_ylabel("KL to full prefill (nats)")
    figure.suptitle(f"Quality per repaired token{subtitle}", fontsize=11)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(10, len(labels) or 1), frameon=False, fontsize=8)  # fmt: skip
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format=path.suffix.removeprefix(".") or "png")
    return True


def _points(rows: Sequence[Row], strategy: str) -> list[Row]:
    """Return a strategy's rows by share, from the point without repair on."""
    own = [r for r in rows if r["strategy"].removesuffix(" seen") == strategy]
    if not any(r["share"] == 0 for r in own):
        own += [r for r in rows if r["strategy"] == "none"]
    return sorted(own, key=lambda r: float(r["repaired"]))


def _line(upper: Any, lower: Any, points: Sequence[Row], strategy: str, i: int) -> None:
    """Draw one strategy with its intervals into both panels."""
    if not points:
        return
    look = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8], "markersize": 3.5, "linewidth": 1.2, "capsize": 1.5, "elinewidth": 0.8, "label": strategy}  # fmt: skip
    x = [100 * r["repaired"] for r in points]
    for axes, key in ((upper, "relative"), (lower, "kl")):
        ends = [[max(FLOOR, v) if key == "kl" else v for v in r[key]] for r in points]
        y = [v for v, _, _ in ends]
        below = [max(0.0, v - low) for v, low, _ in ends]
        above = [max(0.0, high - v) for v, _, high in ends]
        axes.errorbar(x, y, yerr=[below, above], **look)

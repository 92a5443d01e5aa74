"""The figure of the demonstration: time to first token and tokens computed, turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvweave.chunk.rebuild import replacing

# Okabe and Ito's palette: told apart by colour-blind eyes, and by their dashes without any colour
LOOKS = {
    "full": ("full prefill", "#D55E00", "-"),
    "kvweave": ("kvweave", "#0072B2", "-"),
    "reuse": ("kvweave, no repair", "#56B4E9", "-"),
    "prefix": ("prefix caching", "#000000", (0, (4, 2))),
}


def draw(report: dict[str, Any], path: Path) -> bool:
    """Write the figure to ``path``; return False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        return False
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's default backend is
    upper, lower = figure.subplots(2, 1, sharex=True)
    rows = report["rows"]
    first = sum(row["phase"] == "fill" for row in rows)
    turns = [row["turn"] - first + 1 for row in rows]  # as numbered in the printed rows
    for axes, key, label in (
        (upper, "ttft_ms", "time to first token (ms)"),
        (lower, "computed", "tokens computed before it"),
    ):
        for way, (name, colour, dash) in LOOKS.items():
            values = [row[way][key] for row in rows]
            axes.plot(turns, values, color=colour, linestyle=dash, linewidth=1.4, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.set_ylabel(label)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.axvline(0.5, color="#777777", linewidth=0.9, linestyle=":")
        axes.margins(x=0.01)
    _words(figure, upper, lower, report)
    with replacing(path) as new:
        figure.savefig(new, dpi=150, format=path.suffix.removeprefix(".") or "png")
    return True


def _words(figure: Any, upper: Any, lower: Any, report: dict[str, Any]) -> None:
    model, summary = report["model"], report["summary"]
    figure.suptitle(
        f"One turn out, one turn in: {model['name']} ({_size(model['parameters'])} parameters), "
        f"context of {summary['n_tokens']:,} tokens",
        fontsize=11,
    )
    upper.text(
        0.5, 1.02, "pruning begins", transform=upper.get_xaxis_transform(), ha="center",
        fontsize=8, color="#555555",
    )  # fmt: skip
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    lower.set_xlabel("turn")


def _size(n: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.3g} {letter}"
    return str(n)

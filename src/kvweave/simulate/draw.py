"""A figure of what a sweep found: prices against times, with the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvweave.chunk.rebuild import replacing
from kvweave.errors import InvalidArgument
from kvweave.simulate.sweep import Point, front

_View = tuple[str, str, Callable[[Point], float], Callable[[Point], float]]
KINDS = ("png", "svg", "pdf", "jpg", "webp")
RIGHT = 1000 / 3600  # $ an hour over requests a second to $ per thousand requests


def kind_of(path: Path) -> str:
    """Return what a figure of this name is written as. Raises InvalidArgument for what cannot be written."""
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in KINDS:
        raise InvalidArgument("plot", f"no figure is written as {path.suffix}", " ".join(KINDS))
    return kind


def draw(points: Sequence[Point], path: Path) -> bool:
    """Write two views of the same points, whole or not at all; return False without matplotlib. Raises
    InvalidArgument, OSError.

    $ a month against the time to the first token; and requests a second against what a thousand of
    them cost, or under a load the cost of a thousand against the time.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's default backend is
    best = front(points)
    for axes, (x_label, y_label, x_of, y_of) in zip(
        figure.subplots(1, 2), _views(points), strict=True
    ):
        axes.plot(
            [x_of(p) for p in best], [y_of(p) for p in best], "o", ms=9, mfc="none", mec="#222222",
            mew=1.0, label="front",
        )  # fmt: skip
        for policy in dict.fromkeys(point.result.policy for point in points):
            mine = [point for point in points if point.result.policy == policy]
            axes.scatter([x_of(p) for p in mine], [y_of(p) for p in mine], s=18, label=policy)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    with replacing(path) as new:
        figure.savefig(new, dpi=150, format=kind_of(path))
    return True


def _views(points: Sequence[Point]) -> tuple[_View, _View]:
    def each(point: Point) -> float:
        return point.price / point.throughput * RIGHT

    if any(point.served for point in points):
        return (
            ("$ a month for the tiers of a node", "99 % have their first token in (s)",
             lambda p: p.result.monthly, lambda p: p.ttft),
            ("$ per thousand requests, nodes included", "99 % have their first token in (s)",
             each, lambda p: p.ttft),
        )  # fmt: skip
    return (
        ("$ a month for the tiers", "mean time to first token (s)",
         lambda p: p.result.monthly, lambda p: p.ttft),
        ("$ per thousand requests for the tiers", "requests a second", each,
         lambda p: p.throughput),
    )  # fmt: skip

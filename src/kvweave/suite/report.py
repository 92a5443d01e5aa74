"""Outcomes made into rows of figures with intervals, and the rows into tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kvweave.suite import stats
from kvweave.suite.exam import Trial
from kvweave.suite.method import FULL, Method

Row = dict[str, Any]
COUNTS_FROM = 0.95  # accuracy of a full prefill below which a protocol says nothing about reuse
# P5's questions are of several kinds; each table line takes some of them.
LINES = {
    "retained": ("retained",),
    "leak": ("leak-fact", "leak-alias"),
    "leak-fact": ("leak-fact",),
    "leak-alias": ("leak-alias",),
}


def summarise(outcomes: Iterable[Trial], methods: Sequence[Method]) -> list[Row]:
    """Return a row for every protocol, line, mode and method, full prefill first."""
    groups: dict[tuple[str, str, str, str], list[Trial]] = defaultdict(list)
    for o in outcomes:
        for line in _lines(o):
            groups[o.protocol, line, o.mode, o.method].append(o)
    order = {m.label: i for i, m in enumerate(methods)}
    about = {m.label: {"strategy": m.name, "share": m.share, "base": m.base} for m in methods}
    about[FULL] = {"strategy": FULL, "share": 1.0, "base": True}
    rows = []
    for key in sorted(groups, key=lambda k: (k[0], k[1], order.get(k[3], -1), k[2])):
        protocol, line, mode, method = key
        full = groups[protocol, line, "", FULL]
        never = groups.get((protocol, line, "never", method)) if mode else None
        row: Row = {"protocol": protocol, "line": line, "mode": mode, "method": method}
        row |= about[method] | figures(groups[key], full, never)
        if row["relative"] is None and (kept := groups.get((protocol, "retained", "", FULL))):
            # who cannot say what is still there leaks nothing, and that says nothing
            row["retained"] = round(stats.mean(by_case(kept, "right")).value, 4)
            row["counts"] = row["retained"] >= COUNTS_FROM
        rows.append(row)
    return rows


def figures(found: Sequence[Trial], full: Sequence[Trial], never: Sequence[Trial] | None) -> Row:
    """Return the figures of one method on one line of a protocol.

    ``relative`` is the accuracy over a full prefill's. Of leak questions ``accuracy`` is the share
    that names the removed value, and ``over_never`` by how much more than without the note.
    """
    right, kl = by_case(found, "right"), by_case(found, "kl")
    oracle = by_case(full, "right")
    accuracy = stats.mean(oracle).value
    is_leak = found[0].kind.startswith("leak")
    prose = found[0].protocol == "prose"
    candidates = sum(o.candidates for o in found)
    row: Row = {
        "n": len(found),
        "cases": len(right),
        "accuracy": stats.mean(right).to_list(),
        "relative": None if is_leak else stats.ratio(right, oracle).to_list(),
        "kl": stats.mean(kl).to_list(),
        "kl_p95": float(f"{stats.quantile([o.kl for o in found], 0.95):.6g}"),
        "repaired": round(sum(o.repaired for o in found) / candidates, 4) if candidates else 0.0,
        "candidates": round(candidates / len(found), 1),
        "full": round(accuracy, 4),
        "counts": is_leak or prose or accuracy >= COUNTS_FROM,
    }
    if prose:
        row["perplexity"] = [
            float(f"{math.exp(x):.6g}") for x in stats.mean(by_case(found, "nll")).to_list()
        ]
    if is_leak and never is not None:
        row["over_never"] = stats.difference(right, by_case(never, "right")).to_list()
    if found[0].prunes:
        streams: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for o in found:
            streams[o.case].append((float(o.prunes), o.kl))
        row["kl_per_prune"] = stats.slope(list(streams.values())).to_list()
    return row


def by_case(outcomes: Iterable[Trial], what: str) -> list[list[float]]:
    """Return a figure of the outcomes, case by case, in the order of cases and items."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for o in outcomes:
        found[o.case][o.item * 1000 + o.prunes] = getattr(o, what)
    return [[found[c][i] for i in sorted(found[c])] for c in sorted(found)]


def title(row: Row) -> str:
    """Return the name of a row's table."""
    return f"{row['protocol']} {row['line']}".strip()


def head(row: Row) -> tuple[str, ...]:
    """Return the columns of a row's table."""
    first = "leaked" if row["relative"] is None else "accuracy"
    last: tuple[str, ...] = ("over never",) if row["relative"] is None else ("of full",)
    if "kl_per_prune" in row:
        last = (*last, "KL a prune")
    if "perplexity" in row:
        last = (*last, "perplexity")
    return ("method", "mode", "repaired", first, *last, "KL", "KL 95 %")


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row under `head`."""
    last = [shown(row.get("over_never")) if row["relative"] is None else shown(row["relative"])]
    last += [shown(row[key]) for key in ("kl_per_prune", "perplexity") if key in row]
    return (
        row["method"],
        row["mode"] or "-",
        f"{row['repaired']:.1%}",
        shown(row["accuracy"]),
        *last,
        shown(row["kl"]),
        f"{row['kl_p95']:.2g}",
    )


def warning(rows: Sequence[Row]) -> str:
    """Return why a table's rows do not count; "" when they do."""
    row = rows[0]
    full = row.get("retained", row["full"])
    return "" if row["counts"] else f"does not count: full prefill scores {full:.1%}"


def tables(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each table, by its title."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[title(row)].append(row)
    return found


def shown(interval: Sequence[float] | None) -> str:
    """Return ``0.93 [0.91, 0.95]``."""
    if interval is None:
        return "-"
    value, low, high = (f"{x:.3g}" for x in interval)
    return f"{value} [{low}, {high}]"


def _lines(o: Trial) -> list[str]:
    if o.protocol != "P5":
        return [""]
    return [line for line, kinds in LINES.items() if o.kind in kinds]

"""The figure of docs/study.md, a panel a question.

``python docs/study_figure.py`` draws docs/study.png from bench/results/study.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from studied import CLASSES, CONTROL, FAMILIES, RESULT, ROOT, RULES, Row, bounds, by

FIGURE = ROOT / "docs" / "study.png"
SMALL = {"frameon": False, "fontsize": 7}


def draw(found: dict[str, Any]) -> None:
    """Draw all panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9.6), layout="constrained", dpi=110)
    axes = figure.subplots(3, 2).ravel()
    panels = (distances, recalls, fading, heads, milestones, cascade)
    for each, panel in zip(axes, panels, strict=True):
        panel(each, found)
        each.grid(True, color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
    figure.savefig(FIGURE)


def _bars(axes: Any, groups: Sequence[str], rows: dict[str, list[list[float]]]) -> None:
    """Draw a bar a row and group, with its interval by bootstrap; groups without values have none."""
    wide = 0.8 / len(rows)
    for i, (name, cells) in enumerate(rows.items()):
        at = np.arange(len(groups)) + (i + 0.5) * wide - 0.4
        means = np.array([np.mean(c) if c else np.nan for c in cells])
        ends = np.array([bounds(c) if c else (np.nan, np.nan) for c in cells])
        color = "black" if name == "oracle" else None
        error = np.abs(ends.T - means)
        axes.bar(at, means, wide, label=name, color=color, yerr=error, error_kw={"lw": 0.8})
    axes.set_xticks(range(len(groups)), groups)


def _models(found: Row) -> list[str]:
    return list(found["scores"])


def distances(axes: Any, found: Row) -> None:
    """KU1."""
    rows = {
        m: [
            [r["reuse_distance"]["0.9"] for r in by(found["traces"], model=m, family=f)]
            for f in FAMILIES
        ]
        for m in _models(found)
    }
    _bars(axes, FAMILIES, rows)
    axes.set_title("KU1: stack distance that nine of ten reads do not pass, pages", fontsize=9)
    axes.legend(**SMALL)


def recalls(axes: Any, found: Row) -> None:
    """KU2 and CB3."""
    rows = {
        name: [[r["recall"][name] for r in by(found["predict"], family=f)] for f in FAMILIES]
        for name in RULES
    }
    _bars(axes, FAMILIES, rows)
    axes.set_ylim(0, 1.15)
    axes.set_title("KU2, CB3: attention that a fifth of the pages holds", fontsize=9)
    axes.legend(ncols=4, **SMALL)


def fading(axes: Any, found: Row) -> None:
    """KU2."""
    for f in FAMILIES:
        parts = np.array(
            [r["recall_by_decile"]["recent"] for r in by(found["traces"], family=f)], float
        )
        style = "--" if f == CONTROL else "-"
        axes.plot(range(1, 11), np.nanmean(parts, 0), marker=".", label=f, ls=style)
    axes.set_ylim(0, 1)
    axes.set_title("KU2: the same of `recent`, by tenth of the decode", fontsize=9)
    axes.legend(ncols=2, **SMALL)


def heads(axes: Any, found: Row) -> None:
    """KU3: all pairs of families."""
    models = _models(found)
    for i, m in enumerate(models):
        own = by(found["heads"], model=m)
        for thinks, mark in ((True, "o"), (False, "x")):
            some = [p["spearman"] for p in own if (CONTROL not in (p["a"], p["b"])) == thinks]
            at = i + np.linspace(-0.25, 0.25, len(some))
            label = ("two of thinking" if thinks else "one and the control") if not i else None
            axes.plot(at, some, mark, color=f"C{i}", label=label, ms=5)
    axes.axhline(0.5, color="black", lw=0.8)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylim(-0.2, 1)
    axes.set_title("KU3: order of heads by stability, two families (rank correlation)", fontsize=9)
    axes.legend(**SMALL)


def milestones(axes: Any, found: Row) -> None:
    """KU4."""
    marked = [f for f in FAMILIES if any(r["milestones"] for r in by(found["traces"], family=f))]
    rows = {
        m: [
            [
                r["milestones"]["recall"] - r["milestones"]["chance"]
                for r in by(found["traces"], model=m, family=f)
            ]
            for f in marked
        ]
        for m in _models(found)
    }
    _bars(axes, marked, rows)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_title("KU4: milestones among the fifth with most attention, over chance", fontsize=9)
    axes.legend(**SMALL)


def cascade(axes: Any, found: Row) -> None:
    """KU5."""
    for key, mark in (("forced", "o"), ("free", "x")):
        some = [
            [c[key] for r in found["ablate"] for c in r["results"] if c["class"] == name]
            for name in CLASSES
        ]
        means, ends = np.array([np.mean(s) for s in some]), np.array([bounds(s) for s in some])
        error = np.abs(ends.T - means)
        axes.errorbar(means, range(len(CLASSES)), fmt=mark, xerr=error, label=key, lw=0.8, ms=5)
    axes.set_yticks(range(len(CLASSES)), CLASSES)
    axes.invert_yaxis()
    axes.set_title("KU5: right words after pages of a class went", fontsize=9)
    axes.legend(**SMALL)


if __name__ == "__main__":
    draw(json.loads(RESULT.read_text()))

"""One page of what traces say: a question, a sentence with numbers, a figure."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from kvweave.probe.distance import DECILES
from kvweave.probe.findings import Findings, estimate

TITLE = "How decoding used its KV"
KINDS_OF = {"top": "attention of the top fifth", "gini": "Gini", "alike": "alike from step to step"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h1, h2 { font-weight: 600; line-height: 1.2 } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto }
td, th { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } footer { margin-top: 3rem; color: #666; font-size: .85rem }
"""
Draw = Callable[[Any, Sequence[Findings]], None]
Cells = Sequence[Sequence[str]]  # the first row is the head
FOOT = (
    "Made by kvweave probe report from the traces alone. Sinks and the newest pages stand apart: they are "
    "read nearly always. Intervals are 95 %, by bootstrap over heads."
)


@dataclass(frozen=True, slots=True)
class Section:
    """A question, what traces say to it in words, in numbers, and as a figure."""

    title: str
    says: str
    table: Cells = ()
    draw: Draw | None = None


def sections(found: Sequence[Findings], control: Findings | None = None) -> list[Section]:
    """Return what there is to say of traces, and of each beside ``control``."""
    told = [
        Section(
            "How far apart are reads of a page?",
            "KU1. A cache of a head that has as many pages as the stack distance would have had the page. "
            + _each(found, lambda f: f"half of the reads come within {f.distances.median():g} other pages "
                    f"and {f.distances.median('steps'):g} steps; the top fifth of pages has {f.top} of the "
                    f"attention that is left beside sinks and newest pages (Gini {f.gini})"),
            (),
            _distances,
        ),
        Section(
            "Where does recency fail?",
            "KU2. Share of the attention that a fifth of the pages would have held, by ranking. "
            + _each(found, _recency),
            _recall_table(found),
            _recalls,
        ),
        Section(
            "Do heads stay what they are?",
            "KU3. Pages read in one step and in the next, by Jaccard's index, and whether the most stable "
            "quarter of heads is the same in both halves of decoding. "
            + _each(found, lambda f: f"{f.alike} alike; {f.halves[0]:.2f} of the quarter stay, rank "
                    f"correlation {f.halves[1]:.2f}"),
            (),
            _heads,
        ),
        Section(
            "Does attention know milestones?",
            "KU4. " + _each(found, marked),
            (),
            _marks if any(f.milestones is not None for f in found) else None,
        ),
    ]  # fmt: skip
    if any(f.phases for f in found):
        told.append(
            Section(
                "Is one phase read as another?",
                "KU2 and KU3 of parts of the decode: what rankings would have held, and how alike the pages are "
                "that a head reads in one step and in the next.",
                _phase_table(found),
            )
        )
    if control is not None:
        told.append(
            Section(
                f"What is other than in {control.label}?",
                "Head by head, where the models are one: the difference, and its interval.",
                _beside(found, control),
            )
        )
    return told


def page(found: Sequence[Findings], control: Findings | None = None) -> str:
    """Return HTML that needs no other file. Figures are left out where matplotlib is not there."""
    parts = [_html(about(found))]
    for each in sections(found, control):
        figure = "" if each.draw is None else _svg(found, each.draw)
        parts.append(
            f"<h2>{escape(each.title)}</h2><p>{escape(each.says)}</p>{_html(each.table)}{figure}"
        )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><h1>{TITLE}</h1>
{"".join(parts)}
<footer>{FOOT}</footer></body></html>
"""


def about(found: Sequence[Findings]) -> Cells:
    """Return the table of what was read."""
    head = ("trace", "model", "prompt", "steps", "pages", "heads", "read is")
    return [head] + [
        (
            f.label + ("" if f.trace.complete else " (cut off)"),
            f.trace.header.model.get("model", "") or "-",
            str(f.trace.header.prompt),
            str(f.trace.n_steps),
            f"{f.trace.n_pages} of {f.trace.header.page}",
            str(len(f.trace.header.heads)),
            str(f.trace.header.rule),
        )
        for f in found
    ]


def _html(table: Cells) -> str:
    if not table:
        return ""
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * (len(table) - 1)], table, strict=True)
    ]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _each(found: Sequence[Findings], says: Callable[[Findings], str]) -> str:
    return " ".join(f"{f.label}: {says(f)}." for f in found)


def _recency(f: Findings) -> str:
    mean = {name: f.recalled.mean(name) for name in f.recalled.mass}
    best = max((n for n in mean if n != "oracle"), key=lambda n: np.nan_to_num(mean[n], nan=-1))
    says = (
        f"recent {mean['recent']:.2f}, best is {best} with {mean[best]:.2f} of {mean['oracle']:.2f}"
    )
    if f.inflection is not None:
        step, change = f.inflection
        says += f"; the slope of recent changes most at step {step}, by {change:+.4f} a step"
    return says


def marked(f: Findings) -> str:
    """Return what a trace says of its milestones, in words (KU4)."""
    if f.milestones is None:
        return "nothing marked as a milestone in it"
    m = f.milestones
    return (
        f"of {m.n_milestones} pages with a milestone {m.recall:.2f} are in the top fifth by attention "
        f"(chance {m.chance:.2f}), of which {m.precision:.2f} have one"
    )


def _recall_table(found: Sequence[Findings]) -> Cells:
    names = list(found[0].recalled.mass)
    return [("", *names)] + [
        (f.label, *(f"{f.recalled.mean(name):.3f}" for name in names)) for f in found
    ]


def _phase_table(found: Sequence[Findings]) -> Cells:
    names = list(found[0].recalled.mass)
    rows: list[Sequence[str]] = [("", "steps", "alike", *names)]
    for f in found:
        for phase, said in f.phases.items():
            values = [f"{said[name]:.3f}" for name in ("alike", *names)]
            rows.append((f"{f.label}: {phase}", f"{said['steps']:g}", *values))
    return rows


def _beside(found: Sequence[Findings], control: Findings) -> Cells:
    """Return what each trace has more than the control, by head."""
    names = list(control.by_head)
    rows: list[Sequence[str]] = [("", *(KINDS_OF[name] for name in names), "distance, pages")]
    for f in found:
        same = f.trace.header.model == control.trace.header.model
        if not same or f.trace.header.heads != control.trace.header.heads:
            rows.append((f"{f.label}: another model", *["-"] * (len(names) + 1)))
            continue
        more = [f"{estimate(f.by_head[name] - control.by_head[name]):+}" for name in names]
        far = f.distances.quantile(0.9) - control.distances.quantile(0.9)
        rows.append((f.label, *more, f"{far:+g}"))
    return rows


def drawn(figure: Any, found: Sequence[Findings], draw: Draw) -> None:
    """Draw on a figure of matplotlib's."""
    draw(figure, found)
    for axes in figure.axes:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)


def _svg(found: Sequence[Findings], draw: Draw) -> str:
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>(no figure: pip install 'kvweave[plot]')</p>"
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    canvas: Any = FigureCanvasSVG(figure)
    drawn(figure, found, draw)
    out = io.StringIO()
    canvas.print_svg(out, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _distances(figure: Any, found: Sequence[Findings]) -> None:
    for axes, which in zip(figure.subplots(1, 2), ("stack", "steps"), strict=True):
        for f in found:
            cdf = f.distances.cdf(which)
            axes.plot(np.arange(len(cdf)) + 1, cdf, label=f.label)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("1 + other pages read meanwhile" if which == "stack" else "1 + steps")
    figure.axes[0].set_ylabel("part of reads within it")
    figure.axes[0].legend(frameon=False)


def _recalls(figure: Any, found: Sequence[Findings]) -> None:
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, f in zip(panels, found, strict=True):
        for name in f.recalled.mass:
            axes.plot(np.arange(1, DECILES + 1), f.recalled.by_decile(name), label=name)
        axes.set_title(f.label, fontsize=10)
        axes.set_xlabel("tenth of decoding")
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("attention held")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)


def _heads(figure: Any, found: Sequence[Findings]) -> None:
    axes = figure.subplots()
    for f in found:
        axes.plot(np.sort(f.stability)[::-1], ".-", label=f.label)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("heads, the most stable first")
    axes.set_ylabel("pages alike from step to step")
    axes.legend(frameon=False)


def _marks(figure: Any, found: Sequence[Findings]) -> None:
    axes, with_marks = figure.subplots(), [f for f in found if f.milestones is not None]
    at = np.arange(len(with_marks))
    for i, (name, label) in enumerate(
        (("recall", "of pages with a milestone, in the top fifth"), ("chance", "chance"))
    ):
        heights = [getattr(f.milestones, name) for f in with_marks]
        axes.bar(at + 0.4 * i - 0.2, heights, 0.38, label=label)
    axes.set_xticks(at, [f.label for f in with_marks])
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)

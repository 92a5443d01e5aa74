"""The report as PDF: a page a question."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.probe.findings import Findings
from kvweave.probe.report import FOOT, TITLE, Section, about, drawn, sections

WIDTH = 8.27  # inches, as A4; a page is as tall as what is on it
LINE, CHART, MARGIN = 0.2, 3.4, 0.4  # inches
WIDE = 96  # letters of a line
CELL = 26  # letters of a cell of a table, at most


def pdf(found: Sequence[Findings], control: Findings | None = None) -> bytes:
    """Return what `page` says. Raises InvalidArgument where matplotlib is not there."""
    try:
        from matplotlib.backends.backend_pdf import PdfPages
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'kvweave[plot]', or write .html"
        raise InvalidArgument("out", "a PDF needs matplotlib", hint) from error
    first = Section(TITLE, FOOT, about(found))
    written = BytesIO()
    with PdfPages(written, metadata={"CreationDate": None, "Title": TITLE}) as pages:
        for each in (first, *sections(found, control)):
            figure: Any = Figure(layout="constrained")
            _fill(figure, each, found)
            pages.savefig(figure)
    return written.getvalue()


def _fill(figure: Any, what: Section, found: Sequence[Findings]) -> None:
    """Lay a section out on a page of its own: words, table, figure."""
    lines = textwrap.wrap(what.says, WIDE)
    cells = [[textwrap.fill(cell, CELL) for cell in row] for row in what.table]
    tall = [max(cell.count("\n") + 1 for cell in row) for row in cells]
    words = LINE * (len(lines) + 2.5)
    parts = [words]
    parts += [LINE * (1.2 * sum(tall) + 1)] if cells else []
    parts += [CHART] if what.draw is not None else []
    height = sum(parts) + 2 * MARGIN
    figure.set_size_inches(WIDTH, height)
    sides, ends = MARGIN / WIDTH, MARGIN / height
    figure.get_layout_engine().set(rect=(sides, ends, 1 - 2 * sides, 1 - 2 * ends))
    top, *rest = figure.subfigures(len(parts), 1, height_ratios=parts, squeeze=False)[:, 0]
    space = top.subplots()
    space.axis("off")
    space.text(0, 1, what.title, fontsize=15, weight="bold", va="top")
    told = "\n".join(lines)
    space.text(0, 1 - 2 * LINE / words, told, fontsize=9.5, va="top", linespacing=1.35)
    if cells:
        _table(rest.pop(0), cells, tall)
    if what.draw is not None:
        drawn(rest.pop(0), found, what.draw)


def _table(figure: Any, cells: list[list[str]], tall: list[int]) -> None:
    axes = figure.subplots()
    axes.axis("off")
    wide = [
        max(len(part) for row in column for part in row.split("\n")) + 2
        for column in zip(*cells, strict=True)
    ]
    shares = [each / sum(wide) for each in wide]
    shown = axes.table(
        cells[1:], colLabels=cells[0], colWidths=shares, bbox=(0, 0, 1, 1), edges="horizontal"
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(7.5)
    for (row, _), cell in shown.get_celld().items():
        cell.set_height(tall[row] / sum(tall))

"""Tables and bars for a terminal; imported only when there is one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """Print a table; the first ``left`` columns flush left, the others flush right."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(head):
        made.add_column(title, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # names may have [brackets], which are no markup
    Console().print(made)


class Bar:
    """A progress bar on stderr."""

    def __init__(self, what: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,}"),
        )
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task(what, total=total)
        self._progress.start()

    def at(self, done: int) -> None:
        """Draw the bar at ``done``."""
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

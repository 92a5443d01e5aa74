"""Rows of a weave that is over, for the next one.

New memory costs a weave on CPUs as much again as placing chunks in it: pages come one by one, as they are
first touched, and go back when it is freed.
"""

from __future__ import annotations

from kvweave.engine import Engine
from kvweave.run.base import Rows
from kvweave.run.layers import RawRows
from kvweave.run.rows import KVRows
from kvweave.weave.context import Context

HOLDER = "spare rows"  # who is charged with them
WASTE = 2  # times as many rows as are needed: more are not lent


class SpareRows:
    """The rows of one context. They count in the budget, and go as soon as anybody needs the room."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._others = engine, engine.shelf.spare
        self.rows: KVRows | None = None
        engine.shelf.spare = self._spare

    def lend(self, context: Context, n: int) -> None:
        """Have a context without rows, which is to have ``n``, take these."""
        rows = self.rows
        if rows is not None and rows.capacity <= WASTE * n:
            self.free()
            context.session.state.rows = rows

    def close(self, context: Context) -> None:
        """Close a context, and keep its rows where there is room for them."""
        state = context.session.state
        rows = _plain(state.rows)
        if rows is not None:
            rows.truncate(0)
            state.rows = self.engine.runner.new_rows()
        self.engine.close_context(context.name, context.namespace)
        more = 0 if self.rows is None else self.rows.n_bytes
        if rows is not None and more < rows.n_bytes <= self.engine.shelf.room + more:
            self.free()
            self.engine.shelf.charge(HOLDER, rows.n_bytes)
            self.rows = rows

    def free(self) -> None:
        """Let go of them."""
        self.rows = None
        self.engine.shelf.charge(HOLDER, 0)

    def _spare(self) -> None:
        self._others()
        if self.rows is not None:
            self.free()


def _plain(rows: Rows) -> KVRows | None:
    """Return rows that are as new ones once they are truncated, on a device that keeps no freed memory."""
    if not isinstance(rows, KVRows) or rows.device.type != "cpu":
        return None
    return rows if all(type(each) is RawRows for each in rows.layers) else None

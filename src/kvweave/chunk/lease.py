"""The number by which an engine is known in a shared index, and until when what it holds counts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import psycopg

TRIES = 3  # to write where nobody else writes in between
Renewal = Literal["kept", "anew", "lost"]


class Lease:
    """``number`` is this engine's as long as its row says what we wrote there, or something older.

    An index that was put back may have given the number to somebody else; the row is newer then.
    """

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        query = (
            "INSERT INTO kvweave_engines DEFAULT VALUES ON CONFLICT DO NOTHING RETURNING id, seen"
        )
        row = None
        while row is None:  # numbers that live on behind an index that was put back are passed over
            row = db.execute(query).fetchone()
        self.number: int = row[0]
        self._seen: datetime | None = row[1]  # None: what was written last is not known

    def renew(
        self, db: psycopg.Connection[Any], model: str, is_same: Callable[[], bool]
    ) -> Renewal:
        """Say that the engine lives. ``anew``: others took it for dead; ``lost``: the index was put back,
        as ``is_same`` tells too, which is asked where the row is not as it was left."""
        for _ in range(TRIES):
            row = db.execute(
                "SELECT seen FROM kvweave_engines WHERE id=%s", (self.number,)
            ).fetchone()
            known = self._seen
            if row is not None and known is not None and row[0] > known:
                return "lost"
            if (row is None or row[0] != known) and not is_same():
                return "lost"
            self._seen = None
            written = self._written(db, model, None if row is None else row[0])
            if written is not None:
                self._seen = written
                return "anew" if row is None else "kept"
            self._seen = known  # somebody else wrote meanwhile
        return "lost"

    def _written(
        self, db: psycopg.Connection[Any], model: str, stood: datetime | None
    ) -> datetime | None:
        """Write that the engine lives, where there stands what ``stood`` there; return what was written."""
        said = {"id": self.number, "model": model, "stood": stood}
        if stood is None:
            names, values = ("id, model", "%(id)s, %(model)s") if model else ("id", "%(id)s")
            query = f"INSERT INTO kvweave_engines({names}) VALUES({values}) ON CONFLICT DO NOTHING"
        else:  # the model too: it may have been claimed while this came back without one
            also = ", model=%(model)s" if model else ""
            query = f"UPDATE kvweave_engines SET seen=clock_timestamp(){also} WHERE id=%(id)s AND seen=%(stood)s"
        row = db.execute(f"{query} RETURNING seen", said).fetchone()
        return None if row is None else row[0]

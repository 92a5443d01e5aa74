"""The log beside an index: whether it was written to that index, and how it is kept when that is refused.

SQLite puts whatever log it finds into the file. One that was left by an older copy, under which the file
was exchanged, would make two indexes one. So each opening that writes draws a name, its life, and writes
it with the lives of which pages may be in the file or its log already: a log belongs to a file of one
of these.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvweave.chunk.format import meta_sum
from kvweave.chunk.pages import is_whole_log
from kvweave.chunk.rebuild import there

LIFE = "life"
_REFUSED = sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN


def log_of(path: Path) -> Path:
    """Return the log of an index."""
    return path.with_name(path.name + "-wal")


def look(path: Path) -> tuple[bool, list[str]]:
    """Return whether the log beside an index is surely not of it, and of which openings pages may be in
    both. Nothing may have the index open in this process. Raises OSError, OperationalError."""
    if not is_there(path):
        return False, [""]
    alone, both = said(path, alone=True), said(path)
    if alone is None or both is None:
        return False, [""]  # who opens it finds out what is wrong
    lives = [*alone[1][:1], *both[1]]
    return both[0] < alone[0] or alone[1][0] not in both[1], lives


def is_there(path: Path) -> bool:
    """Tell whether an index has a log with anything in it. Raises OSError."""
    log = log_of(path)
    return there(log) and log.stat().st_size > 0


def said(path: Path, *, alone: bool = False) -> tuple[int, list[str]] | None:
    """Return how often an index was written and the lives of it, with its log or without; None if that
    is of no index. Nothing is changed. Raises OperationalError where the system refuses.

    To close what was opened ``alone`` lets go of the locks that this process has on the file.
    """
    how = "immutable=1" if alone else "mode=ro"
    try:
        where = f"file:{quote(str(path))}?{how}"
        with closing(sqlite3.connect(where, uri=True, isolation_level=None)) as db:
            rows = db.execute("SELECT key, value, sum FROM meta").fetchall()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED:
            raise  # whose the log is would be asked by nobody any more
        return None
    meta = {key: value for key, value, wanted in rows if meta_sum(key, value) == wanted}
    if "n_writes" not in meta or len(meta) < len(rows):
        return None
    return int(meta["n_writes"]), str(meta.get(LIFE, "")).split(" ")


@contextmanager
def kept(log: Path, leave: Callable[[], None]) -> Iterator[None]:
    """Put a log back that is not whole if the file is refused: SQLite cuts it off. ``leave`` closes it."""
    data = log.read_bytes() if there(log) else b""
    if not data or (is_whole_log(data) and len(data) >= 32):
        yield
        return
    aside = log.with_name(log.name + ".aside")
    shutil.copy2(log, aside)
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            leave()
        os.replace(aside, log)
        raise
    aside.unlink()

"""Whether an index file says what was written to it, and nothing that cannot be."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

from kvweave.chunk.format import (
    APPLICATION_ID,
    FORMAT,
    SCHEMA,
    damaged,
    meta_sum,
    name_sum,
    row_sum,
    tokens_sum,
)
from kvweave.chunk.guard import found_by
from kvweave.errors import FormatTooNew

_ERRORS = (struct.error, TypeError, ValueError, IndexError, AttributeError, OverflowError)

_CONTRADICTIONS = (
    (
        "SELECT n.name, n.id FROM names n LEFT JOIN chunks c ON c.id=n.id"
        " WHERE c.id IS NULL OR c.namespace<>n.namespace LIMIT 1",
        "{0!r} names #{1}, which is not there",
    ),
    (
        "SELECT c.base FROM chunks c LEFT JOIN chunks b ON b.id=c.base"
        " WHERE c.base IS NOT NULL AND b.id IS NULL LIMIT 1",
        "#{0}, the base of others, is missing",
    ),
    (
        "SELECT c.id FROM chunks c LEFT JOIN tokens t ON t.id=c.id"
        " WHERE t.id IS NULL OR length(t.ids)<>4*c.n_tokens LIMIT 1",
        "the tokens of #{0} are missing",
    ),
    (
        "SELECT t.id FROM tokens t LEFT JOIN chunks c ON c.id=t.id WHERE c.id IS NULL LIMIT 1",
        "it has tokens of #{0}, which is not there",
    ),
)


def format_of(db: sqlite3.Connection, path: Path) -> int:
    """Return the format of an open file, 0 for an empty one. Raises CorruptChunk, FormatTooNew."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not is_new and application != APPLICATION_ID:
        raise damaged(path, "it is some other SQLite file, not a kvweave index")
    if version > FORMAT:
        raise FormatTooNew(str(path), version, FORMAT)
    if not is_new and version not in (1, FORMAT):
        raise damaged(path, f"its format is said to be {version}")
    return 0 if is_new else version


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raise CorruptChunk unless an open file has the tables of an index, and no others."""
    schema = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    if sorted(row[0] for row in schema) != sorted(SCHEMA):
        raise damaged(path, "its tables are not those of an index")


def check_rows(db: sqlite3.Connection, path: Path) -> None:
    """Raise CorruptChunk, or an error of SQLite's, unless all of an open index is as it was written."""
    found = found_by(db, "integrity_check", 10)
    if found != "ok":
        raise damaged(path, found)
    for row in db.execute("SELECT * FROM chunks"):
        if not is_good_chunk(row):
            raise damaged(path, f"a chunk's row, #{row[0]}")
    for space, name, id, wanted in db.execute("SELECT * FROM names"):
        if not _same(name_sum, (space, name, id), wanted):
            raise damaged(path, f"the name {name!r} of #{id}")
    for id, wanted, data in db.execute("SELECT * FROM tokens"):
        if not _same(tokens_sum, (id, data), wanted):
            raise damaged(path, f"the checksum of the tokens of #{id} differs")
    for key, value, wanted in db.execute("SELECT * FROM meta"):
        if not _same(meta_sum, (key, value), wanted):
            raise damaged(path, f"its {key} is not what was written")
    for query, sentence in _CONTRADICTIONS:
        row = db.execute(query).fetchone()
        if row is not None:
            raise damaged(path, sentence.format(*row))


def is_good_chunk(row: tuple[object, ...]) -> bool:
    """Tell whether a row of ``chunks`` with its checksum is what was written."""
    return _same(row_sum, (row[:13],), row[13])


def _same(checksum: object, values: tuple[object, ...], wanted: object) -> bool:
    try:
        return bool(checksum(*values) == wanted)  # type: ignore[operator]
    except _ERRORS:
        return False

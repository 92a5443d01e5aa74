"""What an index refers to, read by another process than its engine's: for a collector."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kvweave.chunk.check import is_good_chunk
from kvweave.chunk.format import APPLICATION_ID, FORMAT, damaged
from kvweave.chunk.guard import as_ours, lost_of, take_lock
from kvweave.chunk.index import is_shared
from kvweave.chunk.place import is_at, place_of
from kvweave.chunk.rebuild import there
from kvweave.chunk.table import Table
from kvweave.errors import FormatTooNew, InvalidArgument, StoreError


def marks(index: str | Path) -> Iterator[bytes]:
    """Yield the digest of every chunk of an index, as of one moment; it may be open in an engine.

    Each row is checked as it is read, and an index that no engine has open is checked as engines do.
    Raises StoreError, CorruptChunk or FormatTooNew, perhaps after some: then the rest is not known,
    and nothing may be swept.
    """
    if is_shared(index):
        with Table(index) as table:
            yield from table.digests()
        return
    path = Path(index)
    _require(path)
    with as_ours(path):
        is_partial = there(lost_of(path))
    if is_partial:
        hint = "`kvweave fsck --repair --discard-strays` accepts that; put back what you can first"
        raise StoreError(f"{path} was salvaged, and what it lost would be swept", hint=hint)
    try:
        lock = take_lock(path)
    except InvalidArgument:
        yield from _of_open(path)
        return
    os.close(lock)
    with Table(path) as table:
        yield from table.digests()


def _require(path: Path) -> None:
    with as_ours(path):
        if path.is_file():
            return
    raise StoreError(f"there is no index {path}", hint="give index.sqlite of a home")


def _of_open(path: Path) -> Iterator[bytes]:
    with as_ours(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA query_only=1")
        db.execute("BEGIN")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise damaged(path, "it is some other SQLite file, not a kvweave index")
        if version != FORMAT:
            raise FormatTooNew(str(path), version, FORMAT)
        wanted, n = db.execute("SELECT count(*) FROM chunks").fetchone()[0], 0
        for row in db.execute("SELECT * FROM chunks"):
            if not is_good_chunk(row):
                raise damaged(path, f"a chunk's row, #{row[0]}")
            n += 1
            yield row[1]
        if n != wanted:
            raise damaged(path, f"{n} of {wanted} chunks could be read")


def uuid_of(index: str | Path) -> str:
    """Return the uuid of an index, which may be open in an engine. Raises StoreError, also for a copy
    that still says that it is the one it was made of."""
    if is_shared(index):
        with Table(index) as table:
            return table.uuid
    path = Path(index)
    _require(path)
    path = path.resolve()
    with as_ours(path), closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA query_only=1")
        meta = {str(key): str(value) for key, value in db.execute("SELECT key, value FROM meta")}
        here = place_of(path.parent)
    if "uuid" not in meta:
        raise damaged(path, "it does not say which index it is")
    if not is_at(meta.get("place", here), here):
        hint = "open it once (`kvweave ls`), or give the index that it is a copy of"
        raise StoreError(f"{path} is a copy that was never opened", hint=hint, path=str(path))
    return meta["uuid"]

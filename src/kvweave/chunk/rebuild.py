"""A whole new index file from rows: for one of an older format, and for what is left of a damaged one."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

from kvweave.chunk.format import (
    APPLICATION_ID,
    FORMAT,
    PAGE_BYTES,
    SCHEMA,
    damaged,
    meta_sum,
    name_sum,
    row_sum,
    tokens_sum,
)
from kvweave.chunk.guard import found_by
from kvweave.chunk.record import Row, from_row

MOMENT = 60.0  # seconds; no small file takes so long to write


def create(db: sqlite3.Connection, uuid: str) -> None:
    """Make the tables of an empty index."""
    db.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        db.execute(statement)
    for key, value in (("uuid", uuid), ("next_id", 1), ("n_writes", 0)):
        db.execute("INSERT INTO meta VALUES(?,?,?)", (key, value, meta_sum(key, value)))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {FORMAT}")
    db.execute("COMMIT")


def set_meta(db: sqlite3.Connection, key: str, value: int | str) -> None:
    """Write one row of ``meta``, in a transaction that is open."""
    db.execute("INSERT OR REPLACE INTO meta VALUES(?,?,?)", (key, value, meta_sum(key, value)))


def write_index(
    path: Path,
    meta: tuple[str, int, int],
    chunks: Iterable[Row],
    names: Iterable[tuple[str, str, int]],
    tokens: Iterable[tuple[int, bytes]],
    more: Mapping[str, str] | None = None,
) -> None:
    """Make the index ``path`` of these rows, synced; ``meta``: uuid, next id, number of writes, ``more``:
    what else it says of itself.

    Raises OSError and SQLite's errors; then ``path`` is not there.
    """
    path.unlink(missing_ok=True)
    try:
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
            db.execute("PRAGMA journal_mode=OFF")
            create(db, meta[0])
            db.execute("BEGIN")
            marks = ",".join("?" * 14)
            db.executemany(
                f"INSERT INTO chunks VALUES({marks})", ((*row, row_sum(row)) for row in chunks)
            )
            db.executemany(
                "INSERT INTO names VALUES(?,?,?,?)", ((*row, name_sum(*row)) for row in names)
            )
            db.executemany(
                "INSERT INTO tokens VALUES(?,?,?)",
                ((id, tokens_sum(id, data), data) for id, data in tokens),
            )
            set_meta(db, "next_id", meta[1])
            set_meta(db, "n_writes", meta[2])
            for key, value in (more or {}).items():
                set_meta(db, key, value)
            db.execute("COMMIT")
        finally:
            db.close()
        fsync(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def upgrade(db: sqlite3.Connection, path: Path, new: Path, uuid: str) -> None:
    """Write the rows of ``db``, an index of format 1, to ``new``. Raises CorruptChunk."""
    found = found_by(db, "integrity_check")
    if found != "ok":
        raise damaged(path, found)
    spaces, bases, digests = {}, set(), set()
    for row in db.execute("SELECT * FROM chunks"):
        try:
            record = from_row(row)
        except (ValueError, TypeError, IndexError, struct.error) as error:
            raise damaged(path, f"a chunk's row: {error}") from error
        spaces[record.id] = record.namespace
        bases.add(record.base)
        digests.add(record.digest)
    if len(digests) != len(spaces):
        raise damaged(path, "two chunks have the same digest")
    for base in bases - {None} - spaces.keys():
        raise damaged(path, f"#{base}, the base of others, is missing")
    for namespace, name, id in db.execute("SELECT * FROM names"):
        if spaces.get(id) != namespace:
            raise damaged(path, f"{name!r} names #{id}, which is not there")
    left = set(spaces)
    for id, wanted, data in db.execute("SELECT * FROM tokens"):
        if crc32(data) != wanted:
            raise damaged(path, f"crc32 of the tokens of #{id} is {crc32(data)}, not {wanted}")
        left.discard(id)
    for id in left:
        raise damaged(path, f"the tokens of #{id} are missing")
    next_id = db.execute("SELECT value FROM meta WHERE key='next_id'").fetchone()
    highest = max(spaces, default=0)
    write_index(
        new,
        (uuid, max(highest + 1, next_id[0] if next_id else 1), 0),
        db.execute("SELECT * FROM chunks ORDER BY id"),
        db.execute("SELECT * FROM names ORDER BY namespace, name"),
        db.execute("SELECT id, ids FROM tokens ORDER BY id"),
    )


def fsync(path: Path) -> None:
    """Have the disk take what was written to a file or directory. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_json(path: Path, data: object) -> None:
    """Write a file of JSON, as `write_whole` does."""
    write_whole(path, json.dumps(data))


def sum_of(told: dict[str, Any]) -> str:
    """Return what tells numbers and words from those that say something else."""
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


def with_sum(told: dict[str, Any]) -> dict[str, Any]:
    """Return it with its ``sum``, by which `has_its_sum` knows it again."""
    return told | {"sum": sum_of(told)}


def has_its_sum(told: dict[str, Any]) -> bool:
    """Tell whether what was read is what was written, by its ``sum``; a file of before has none."""
    wanted = told.get("sum")
    return wanted is None or wanted == sum_of({k: v for k, v in told.items() if k != "sum"})


def there(path: Path) -> bool:
    """Whether there is such a file. Raises OSError where nobody can tell, which `Path.exists` takes for none
    from Python 3.14 on."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file anew, whole and for good. Raises OSError; then it is what it was."""
    with replacing(path) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that takes another's place, for good, as the block ends; where that fails,
    and behind Ctrl-C, the other is what it was, and nothing lies beside it. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe, a device
        yield path
        return
    path = path.resolve()  # a link stays one
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield new
        fsync(new)
        put_in_place(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def clear(directory: Path) -> None:
    """Remove what `write_json` of processes that died left half written."""
    for path in directory.glob("*.*.tmp"):
        with suppress(OSError):  # a process of another container looks as if it had died
            if time.time() - path.stat().st_mtime > MOMENT and not is_process(
                path.name.split(".")[-2]
            ):
                path.unlink()


def is_process(pid: str) -> bool:
    """Tell whether this is a process; what is no number may be anything."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, OSError):
        pass
    return True


def put_in_place(new: Path, path: Path) -> None:
    """Rename the synced file ``new`` to ``path``, for good. Raises OSError."""
    os.replace(new, path)
    fsync(path.parent)

"""The durable journal of the index: one SQLite file, written by one process at a time.

::

    index.sqlite        chunks(id, ...)  names(namespace, name -> id)  tokens(id, crc32, uint32 LE)
                        meta(next_id)    user_version = FORMAT
    index.sqlite-wal    what was written since the last checkpoint (SQLite's own)
    index.sqlite.lock   held with flock by the process that has it open; its text is that pid

While it is open no other program can read it either. A write that returned survives the death of
the process. After a power cut the newest writes may be missing, but what is there is consistent
(WAL, synchronous=NORMAL).
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.record import Row
from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument, StoreError

FORMAT = 1
APPLICATION_ID = 0x6B76_7765  # "kvwe": tells our file from any other SQLite file
CACHE_KIB = 16_384

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL, n_tokens INT NOT NULL, kind INT NOT NULL,
    namespace TEXT NOT NULL, base INT, deps BLOB, tier INT NOT NULL, n_bytes INT NOT NULL,
    pinned INT NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, n_uses INT NOT NULL);
CREATE TABLE names(
    namespace TEXT NOT NULL, name TEXT NOT NULL, id INT NOT NULL, PRIMARY KEY(namespace, name)
    ) WITHOUT ROWID;
CREATE TABLE tokens(id INTEGER PRIMARY KEY, crc32 INT NOT NULL, ids BLOB NOT NULL);
CREATE TABLE meta(key TEXT PRIMARY KEY, value INT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES('next_id', 1);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""

_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@dataclass(slots=True)
class WriteBatch:
    """Rows to write together: all of them, or none."""

    put_chunks: list[Row] = field(default_factory=list)
    drop_chunks: list[tuple[int]] = field(default_factory=list)
    put_names: list[tuple[str, str, int]] = field(default_factory=list)
    drop_names: list[tuple[str, str]] = field(default_factory=list)
    put_tokens: list[tuple[int, int, bytes]] = field(default_factory=list)
    uses: list[tuple[float, int, int]] = field(default_factory=list)
    next_id: list[tuple[int]] = field(default_factory=list)

    def statements(self) -> Iterator[tuple[str, Sequence[tuple[object, ...]]]]:
        """Yield each statement with its rows, where there are any."""
        if self.drop_names:
            yield "DELETE FROM names WHERE namespace=? AND name=?", self.drop_names
        if self.put_names:
            yield "INSERT OR REPLACE INTO names VALUES(?,?,?)", self.put_names
        if self.drop_chunks:
            yield "DELETE FROM chunks WHERE id=?", self.drop_chunks
            yield "DELETE FROM tokens WHERE id=?", self.drop_chunks
        if self.put_chunks:
            yield (
                "INSERT OR REPLACE INTO chunks VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?)",
                self.put_chunks,
            )
        if self.put_tokens:
            yield "INSERT OR REPLACE INTO tokens VALUES(?,?,?)", self.put_tokens
        if self.uses:
            yield "UPDATE chunks SET last_used=?, n_uses=? WHERE id=?", self.uses
        if self.next_id:
            yield "UPDATE meta SET value=max(value, ?) WHERE key='next_id'", self.next_id


class Journal:
    """The open file. Every method raises StoreError, or CorruptChunk, when SQLite cannot do it."""

    def __init__(self, path: Path, *, busy_timeout: float = 5.0) -> None:
        """Lock and open the file, or make it; raise InvalidArgument when another process has it."""
        self.path = path
        if path.is_dir():
            raise InvalidArgument("path", f"{path} is a directory, wanted a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(path)
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}", path=str(path)) from error
        try:
            with self._explained():
                # autocommit; the Table serialises threads
                self._db = sqlite3.connect(
                    path, timeout=busy_timeout, isolation_level=None, check_same_thread=False
                )
        except BaseException:
            os.close(self._lock)
            raise
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Refuse what is not ours, before a byte of it is changed; make what is not there."""
        db = self._db
        # Ours alone anyway; saying so spares the locks of each write, a tenth of its time.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not is_new and application != APPLICATION_ID:
            raise CorruptChunk(str(self.path), "it is some other SQLite file, not a kvweave index")
        if version > FORMAT:
            raise FormatTooNew(str(self.path), version, FORMAT)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        if is_new:
            db.executescript(_SCHEMA)

    def chunks(self) -> Iterator[Row]:
        """Yield every row of ``chunks``, by id."""
        with self._explained():
            yield from self._db.execute("SELECT * FROM chunks ORDER BY id")

    def names(self) -> Iterator[tuple[str, str, ChunkId]]:
        """Yield every namespace, name and id, sorted."""
        with self._explained():
            yield from self._db.execute("SELECT namespace, name, id FROM names ORDER BY 1, 2")

    def next_id(self) -> int:
        """Return the number below which no id may be given again."""
        with self._explained():
            return int(self._db.execute("SELECT value FROM meta WHERE key='next_id'").fetchone()[0])

    def tokens(self, id: int) -> bytes:
        """Return the tokens of a chunk; raise CorruptChunk when they are not what was written."""
        with self._explained():
            row = self._db.execute("SELECT crc32, ids FROM tokens WHERE id=?", (id,)).fetchone()
        if row is None:
            raise CorruptChunk(str(self.path), f"the tokens of #{id} are missing")
        if crc32(row[1]) != row[0]:
            raise CorruptChunk(
                str(self.path), f"crc32 of the tokens of #{id} is {crc32(row[1])}, not {row[0]}"
            )
        return bytes(row[1])

    def token_ids(self) -> set[int]:
        """Return the ids that have tokens."""
        with self._explained():
            return {row[0] for row in self._db.execute("SELECT id FROM tokens")}

    def damage(self) -> str:
        """Return what SQLite's own check finds wrong with the file, or ""."""
        with self._explained():
            found = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check(10)")]
        return "" if found == ["ok"] else "; ".join(found)

    def write(self, batch: WriteBatch) -> None:
        """Write all rows of the batch, or none and raise StoreError."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            for statement, rows in batch.statements():
                if len(rows) == 1:
                    db.execute(statement, rows[0])
                else:
                    db.executemany(statement, rows)
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:  # a full disk has SQLite roll back by itself
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _explain(error, self.path) from error
            raise

    def sync(self) -> None:
        """Wait until what was written would survive a power cut too."""
        wal = self.path.with_name(self.path.name + "-wal")
        try:
            for path in (wal, self.path.parent):  # the directory: the file may be new in it
                file = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        except FileNotFoundError:
            return  # nothing was written since SQLite put all into the file itself, synced
        except OSError as error:
            raise StoreError(f"cannot sync {wal}: {error}", path=str(wal)) from error

    def close(self) -> None:
        """Close the file and let the lock go; doing it twice does nothing."""
        if self._lock < 0:
            return
        try:
            self._db.close()
        finally:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise SQLite's errors as ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise _explain(error, self.path) from error


def _explain(error: sqlite3.Error, path: Path) -> StoreError:
    # the low byte is the error, the rest a refinement of it
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _CORRUPT:
        return CorruptChunk(str(path), str(error))
    where = {"path": str(path)}
    if code in _BUSY:
        hint = "close the program that has it open, then try again; nothing was changed"
        return StoreError(f"{path} is locked by another program", hint=hint, **where)
    if code == sqlite3.SQLITE_FULL:
        hint = "free some disk space, then try again; nothing was changed"
        return StoreError(f"no space left to write {path}", hint=hint, **where)
    return StoreError(f"cannot use {path}: {error}", hint="nothing was changed", **where)


def _take_lock(path: Path) -> int:
    """Return the locked file descriptor; raise InvalidArgument naming the pid that holds it."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise InvalidArgument(
            "home",
            f"{path.parent} is open in process {pid}",
            hint="stop that process, talk to its server, or give another home",
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock

"""An index that is open in SQLite: the connection, what it is called, and whether it still is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvweave.chunk.format import damaged, meta_sum
from kvweave.chunk.guard import doubt
from kvweave.chunk.log import log_of
from kvweave.chunk.place import Inode, inode_of, is_still
from kvweave.errors import HomeMoved, StoreError

CACHE_KIB = 16_384

T = TypeVar("T")


class OpenIndex:
    """A file and its connection, once there is one. Not to be used by two threads at once."""

    def __init__(self, path: Path, busy_timeout: float) -> None:
        self.path, self._wal, self._busy_timeout = path, log_of(path), busy_timeout
        self._db: sqlite3.Connection | None = None
        self._inode: Inode | None = None  # of what is open

    @property
    def db(self) -> sqlite3.Connection:
        """The connection. Raises StoreError while there is none."""
        if self._db is None:
            raise StoreError(f"{self.path} is not open", hint="close the engine and open it again")
        return self._db

    def _connect(self) -> None:
        # autocommit; the Table serialises threads
        self._db = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )

    def _connected(self) -> sqlite3.Connection:
        if self._db is None:  # what wrote it anew failed
            self._connect()
            self._settings()
        return self.db

    def _sure(self, call: Callable[[sqlite3.Connection], T]) -> T:
        db = self._connected()
        try:
            return call(db)
        except sqlite3.DatabaseError as error:
            doubt(error, self._db, self.path, self._wal)
            raise

    def _settings(self) -> None:
        """Say how it is written, and remember what is open."""
        db = self.db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        # What was removed must be gone, also for who reads the pages one by one.
        db.execute("PRAGMA secure_delete=ON")
        # A checkpoint that SQLite starts by itself keeps to itself what failed.
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cache_spill=OFF")  # nothing is written before a commit
        self._inode = inode_of(self.path)

    def meta(self, key: str, otherwise: str | None = None) -> int | str:
        """Return a value of ``meta``, or ``otherwise`` where there is none. Raises CorruptChunk."""
        row = self.db.execute("SELECT value, sum FROM meta WHERE key=?", (key,)).fetchone()
        if row is None and otherwise is not None:
            return otherwise
        if row is None or row[1] != meta_sum(key, row[0]):
            raise damaged(self.path, f"its {key} is not what was written")
        value: int | str = row[0]
        return value

    def _require_place(self) -> None:
        """Raise HomeMoved where another file is called what this one was: nobody would find this one."""
        if not is_still(self.path, self._inode):
            raise HomeMoved(str(self.path))

    def _abandon(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()  # a log that is another's stays: SQLite looks whether its file was moved

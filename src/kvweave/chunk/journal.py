"""The durable journal of the index: one SQLite file, written by one process at a time.

::

    index.sqlite        chunks(id, ...)  names(namespace, name -> id)  tokens(id, uint32 LE)
                        meta(uuid, next_id, n_writes)    user_version = FORMAT; a checksum a row
    index.sqlite-wal    what was written since the last checkpoint (SQLite's own)
    index.sqlite.seal   how much must be in it: `kvweave.chunk.seal`
    index.sqlite.lock   held with flock by the process that has it open; its text is that pid

Others may read it meanwhile. A write that returned survives the death of the process. After a power
cut the newest writes may be missing, but what is there is consistent (WAL, synchronous=NORMAL), and
what `sync` confirmed is there. What is not as it was written raises CorruptChunk when it is opened.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

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
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.pages import frames
from kvweave.chunk.rebuild import create, fsync, put_in_place, set_meta, upgrade
from kvweave.chunk.record import Row
from kvweave.chunk.seal import Seal
from kvweave.errors import FormatTooNew, InvalidArgument, StoreError

CACHE_KIB = 16_384
CHECKPOINT_BYTES = 4 << 20
"""What the log may grow to before it is put into the file."""

_CORRUPT = (
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_TOOBIG,
)  # fmt: skip
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@dataclass(slots=True)
class WriteBatch:
    """Rows to write together: all of them, or none."""

    put_chunks: list[Row] = field(default_factory=list)
    drop_chunks: list[tuple[int]] = field(default_factory=list)
    put_names: list[tuple[str, str, int]] = field(default_factory=list)
    drop_names: list[tuple[str, str]] = field(default_factory=list)
    put_tokens: list[tuple[int, int, bytes]] = field(default_factory=list)
    uses: list[Row] = field(default_factory=list)
    next_id: list[tuple[int]] = field(default_factory=list)

    def statements(self) -> Iterator[tuple[str, Sequence[tuple[object, ...]]]]:
        """Yield each statement with its rows, where there are any."""
        if self.drop_names:
            yield "DELETE FROM names WHERE namespace=? AND name=?", self.drop_names
        if self.put_names:
            rows = [(*row, name_sum(*row)) for row in self.put_names]
            yield "INSERT OR REPLACE INTO names VALUES(?,?,?,?)", rows
        if self.drop_chunks:
            yield "DELETE FROM chunks WHERE id=?", self.drop_chunks
            yield "DELETE FROM tokens WHERE id=?", self.drop_chunks
        if self.put_chunks:
            yield (
                "INSERT OR REPLACE INTO chunks VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                [(*row, row_sum(row)) for row in self.put_chunks],
            )
        if self.put_tokens:
            yield "INSERT OR REPLACE INTO tokens VALUES(?,?,?)", self.put_tokens
        if self.uses:
            yield (
                "UPDATE chunks SET last_used=?, n_uses=?, sum=? WHERE id=?",
                [(*row[11:], row_sum(row), row[0]) for row in self.uses],
            )
        if self.next_id:
            yield (
                "UPDATE meta SET value=?, sum=? WHERE key='next_id'",
                [(id, meta_sum("next_id", id)) for (id,) in self.next_id],
            )


class Journal:
    """The open file. Every method raises StoreError, or CorruptChunk, when SQLite cannot do it."""

    uuid = ""
    n_writes = 0
    """How often it was written since it was made."""

    def __init__(self, path: Path, *, busy_timeout: float = 5.0) -> None:
        """Lock and open the file, or make it; raise InvalidArgument when another process has it."""
        self.path, self._busy_timeout = path, busy_timeout
        self._wal = path.with_name(path.name + "-wal")
        if path.is_dir():
            raise InvalidArgument("path", f"{path} is a directory, wanted a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(path)
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}", path=str(path)) from error
        self._db: sqlite3.Connection | None = None
        self._is_sure = True  # no sync has failed
        self._sealing = False
        try:
            with self._explained():
                self._seal = Seal(path)
                self._open()
        except BaseException:
            self._abandon()
            raise

    @property
    def db(self) -> sqlite3.Connection:
        """The connection. Raises StoreError while there is none."""
        if self._db is None:
            raise StoreError(f"{self.path} is not open", hint="close the engine and open it again")
        return self._db

    def _open(self) -> None:
        is_new = not self.path.exists()
        self._existed = not is_new
        if (
            is_new and self._wal.exists()
        ):  # of a file that somebody took away: SQLite would delete it
            self._wal.rename(free_name(self.path, "-wal"))
        self.is_whole = not is_new and self._seal.is_whole()
        with self._log_kept():
            self._connect()
            self._prepare()
            if not is_new and not self.is_whole:
                self._check(self._seal)

    def _connect(self) -> None:
        # autocommit; the Table serialises threads
        self._db = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )

    def _prepare(self) -> None:
        """Refuse what is not ours, before a byte of it is changed; make what is not there."""
        db = self.db
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not is_new and application != APPLICATION_ID:
            raise damaged(self.path, "it is some other SQLite file, not a kvweave index")
        if version > FORMAT:
            raise FormatTooNew(str(self.path), version, FORMAT)
        if not is_new and version == 1:
            self._upgrade()
            return
        if not is_new and version != FORMAT:
            raise damaged(self.path, f"its format is said to be {version}")
        if is_new and self._seal.said.n and self._existed:
            raise damaged(self.path, f"its last {self._seal.said.n} writes are missing")
        if is_new:
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self._settings()
        if is_new:
            create(db, uuid4().hex)
        schema = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        if sorted(row[0] for row in schema) != sorted(SCHEMA):
            raise damaged(self.path, "its tables are not those of an index")
        self.uuid, self.n_writes = str(self._meta("uuid")), int(self._meta("n_writes"))

    def _settings(self) -> None:
        db = self.db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        # What was removed must be gone, also for who reads the pages one by one.
        db.execute("PRAGMA secure_delete=ON")
        # A checkpoint that SQLite starts by itself keeps to itself what failed.
        db.execute("PRAGMA wal_autocheckpoint=0")

    def _upgrade(self) -> None:
        """Put a file of this format in the place of one of format 1, which stays until it is done."""
        new = self.path.with_name(self.path.name + ".new")
        upgrade(self.db, self.path, new, uuid4().hex)
        self._replace(new)
        self._prepare()

    def _replace(self, new: Path) -> None:
        """Close, put the synced file ``new`` in the place of this one, and open that."""
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.close()
        self._db = None
        if self._wal.exists() and self._wal.stat().st_size:
            raise StoreError(f"{self.path} is open in another program", hint="close that first")
        try:
            put_in_place(new, self.path)
        finally:
            self._connect()

    def _check(self, seal: Seal) -> None:
        """Raise CorruptChunk when SQLite or the seal say that something is not there."""
        found = self.damage() or seal.missing(self.uuid, self.n_writes)
        if found:
            raise damaged(self.path, found)

    @contextmanager
    def _log_kept(self) -> Iterator[None]:
        """Put a log back that is not whole if the file is refused: SQLite cuts it off."""
        log = self._wal.read_bytes() if self._wal.exists() else b""
        if not log or (self.is_whole_log(log) and len(log) >= 32):
            yield
            return
        aside = self._wal.with_name(self._wal.name + ".aside")
        shutil.copy2(self._wal, aside)
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):
                if self._db is not None:
                    self._db.close()
            self._db = None
            os.replace(aside, self._wal)
            raise
        aside.unlink()

    @staticmethod
    def is_whole_log(log: bytes) -> bool:
        """Tell whether all frames of a log are as they were written."""
        found = list(frames(log))
        return bool(found) and all(frame.whole for frame in found)

    def _meta(self, key: str) -> int | str:
        row = self.db.execute("SELECT value, sum FROM meta WHERE key=?", (key,)).fetchone()
        if row is None or row[1] != meta_sum(key, row[0]):
            raise damaged(self.path, f"its {key} is not what was written")
        value: int | str = row[0]
        return value

    def chunks(self) -> Iterator[Row]:
        """Yield every row of ``chunks``, by id. Raises CorruptChunk for one that was changed."""
        with self._explained():
            for columns in self.db.execute("SELECT * FROM chunks ORDER BY id"):
                row: Row = columns[:-1]
                try:
                    same = row_sum(row) == columns[-1]
                except (struct.error, TypeError, ValueError, AttributeError):
                    same = False
                if not same:
                    raise damaged(self.path, f"a chunk's row, #{row[0]}")
                yield row

    def names(self) -> Iterator[tuple[str, str, ChunkId]]:
        """Yield every namespace, name and id, sorted. Raises CorruptChunk."""
        with self._explained():
            for space, name, id, wanted in self.db.execute("SELECT * FROM names ORDER BY 1, 2"):
                try:
                    same = name_sum(space, name, id) == wanted
                except (TypeError, ValueError, OverflowError):
                    same = False
                if not same:
                    raise damaged(self.path, f"the name {name!r} of #{id}")
                yield space, name, id

    def next_id(self) -> int:
        """Return the number below which no id may be given again."""
        with self._explained():
            return int(self._meta("next_id"))

    def tokens(self, id: int) -> bytes:
        """Return the tokens of a chunk; raise CorruptChunk when they are not what was written."""
        with self._explained():
            row = self.db.execute("SELECT sum, ids FROM tokens WHERE id=?", (id,)).fetchone()
        if row is None:
            raise damaged(self.path, f"the tokens of #{id} are missing")
        if not isinstance(row[1], bytes) or tokens_sum(id, row[1]) != row[0]:
            raise damaged(self.path, f"the checksum of the tokens of #{id} differs")
        return row[1]

    def check_tokens(self) -> None:
        """Raise CorruptChunk unless the tokens of all chunks are what was written."""
        with self._explained():
            ids = [row[0] for row in self.db.execute("SELECT id FROM tokens ORDER BY id")]
            chunks = [row[0] for row in self.db.execute("SELECT id FROM chunks ORDER BY id")]
        if ids != chunks:
            raise damaged(self.path, "it has tokens of other chunks than those it lists")
        for id in ids:
            self.tokens(id)

    def token_ids(self) -> set[int]:
        """Return the ids that have tokens."""
        with self._explained():
            return {row[0] for row in self.db.execute("SELECT id FROM tokens")}

    def damage(self) -> str:
        """Return what SQLite's own check finds wrong with the file, or ""."""
        with self._explained():
            found = [str(row[0]) for row in self.db.execute("PRAGMA integrity_check(10)")]
        return "" if found == ["ok"] else "; ".join(found)

    def write(self, batch: WriteBatch) -> None:
        """Write all rows of the batch, or none and raise StoreError."""
        db, n = self.db, self.n_writes + 1
        try:
            self._begin_sealing()
            db.execute("BEGIN IMMEDIATE")
            for statement, rows in batch.statements():
                if len(rows) == 1:
                    db.execute(statement, rows[0])
                else:
                    db.executemany(statement, rows)
            set_meta(db, "n_writes", n)
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:  # a full disk has SQLite roll back by itself
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error | OSError):
                raise _explain(error, self.path) from error
            raise
        self.n_writes = n
        with suppress(OSError):  # then it says less than it could
            self._seal.wrote(n)
        if n % 32 == 0:
            self._checkpoint()

    def _begin_sealing(self) -> None:
        if not self._sealing:
            self._seal.begin(self.uuid, self.n_writes)
            self._sealing = True

    def _checkpoint(self) -> None:
        """Put a long log into the file. What fails is found again by `sync`."""
        try:
            if self._wal.stat().st_size > CHECKPOINT_BYTES:
                self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.Error):
            self._is_sure = False

    def sync(self) -> None:
        """Wait until what was written would survive a power cut too. Raises StoreError.

        After a failure nobody knows which pages the disk took, and it would confirm the next time
        whatever it lost: the whole file is written anew before anything is confirmed again.
        """
        try:
            if not self._is_sure:
                self._rewrite()
            self._is_sure = False
            if self._wal.exists():  # else SQLite has put all into the file itself, synced
                fsync(self._wal)
            fsync(self.path.parent)  # the file may be new in it
            self._is_sure = True
            if self._sealing:
                self._seal.synced()
        except (OSError, sqlite3.Error) as error:
            hint = "mend or change the disk, then try again: all is written anew before it is confirmed"
            where = str(self.path)
            raise StoreError(f"cannot sync {where}: {error}", hint=hint, path=where) from error

    def _rewrite(self) -> None:
        """Write the index to a new file, check that and put it in the place of this one."""
        if self._db is None:
            self._connect()
        log = self._wal.read_bytes() if self._wal.exists() else b""
        if log and not self.is_whole_log(log):
            raise damaged(self.path, "its log was not written as it should be")
        new = self.path.with_name(self.path.name + ".new")
        new.unlink(missing_ok=True)
        self.db.execute("VACUUM INTO ?", (str(new),))
        fsync(new)
        self._replace(new)
        self._settings()
        found = self.damage()
        if found or self._meta("n_writes") != self.n_writes:
            raise damaged(self.path, found or "its last writes are missing")
        for rows in (self.chunks(), self.names()):
            for _ in rows:
                pass
        self.check_tokens()

    def close(self) -> None:
        """Close the file and let the lock go; doing it twice does nothing."""
        if self._lock < 0:
            return
        try:
            if self._db is not None:
                self._close_sealed(self._db)
        finally:
            self._abandon()

    def _close_sealed(self, db: sqlite3.Connection) -> None:
        with self._explained():
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.close()
            self._db = None
            if (self._sealing or not self.is_whole) and not self._wal.exists():
                self._seal.end(self.uuid, self.n_writes)

    def _abandon(self) -> None:
        """Let go of everything, as it is."""
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock >= 0:
            self._seal.close()
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.path)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise SQLite's errors, and the system's, as ours."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _explain(error, path) from error


def _explain(error: sqlite3.Error | OSError, path: Path) -> StoreError:
    # the low byte is the error, the rest a refinement of it
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _CORRUPT or "decode" in str(error):  # a text that is no UTF-8
        return damaged(path, str(error))
    where = {"path": str(path)}
    if code in _BUSY:
        hint = "close the program that has it open, then try again; nothing was changed"
        return StoreError(f"{path} is locked by another program", hint=hint, **where)
    if code == sqlite3.SQLITE_FULL:
        hint = "free some disk space, then try again; nothing was changed"
        return StoreError(f"no space left to write {path}", hint=hint, **where)
    return StoreError(f"cannot use {path}: {error}", hint="nothing was changed", **where)


def take_lock(path: Path) -> int:
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


def free_name(path: Path, end: str = "") -> Path:
    """Return a name for a damaged file to be kept under: ``index.sqlite.damaged-1``, the first free."""
    n = 1
    while (found := path.with_name(f"{path.name}.damaged-{n}{end}")).exists():
        n += 1
    return found

"""The file of an index: one SQLite file, written by one process at a time.

::

    index.sqlite        chunks(id, ...)  names(namespace, name -> id)  tokens(id, uint32 LE)
                        meta(uuid, next_id, n_writes)    user_version = FORMAT; a checksum a row
    index.sqlite-wal    what was written since the last checkpoint (SQLite's own)
    index.sqlite.seal   how much must be in it: `kvweave.chunk.seal`
    index.sqlite.lock   held with flock by the process that has it open; its text is that pid

Others may read it meanwhile. A write that returned survives the death of the process. After a power
cut the newest writes may be missing, but what is there is consistent (WAL, synchronous=NORMAL), and
what `sync` confirmed is there. What is not as it was written raises CorruptChunk when it is opened.

What waits for the device is done aside: opening, syncs, checkpoints, commits that begin a log (whose
head SQLite syncs) and closing end after `PATIENCE`, and as long again for each `SLOWLY` bytes there are,
whatever the device does.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from kvweave.chunk.background import NoThread, silent, within
from kvweave.chunk.check import check_rows
from kvweave.chunk.format import APPLICATION_ID, FORMAT, PAGE_BYTES, SCHEMA, damaged, meta_sum
from kvweave.chunk.guard import as_ours, free_name, give_lock, take_lock
from kvweave.chunk.pages import frames
from kvweave.chunk.rebuild import create, fsync, put_in_place, set_meta, upgrade
from kvweave.chunk.seal import Seal
from kvweave.errors import FormatTooNew, InvalidArgument, NoSpace, StoreError, is_full, of_system

CACHE_KIB = 16_384
CHECKPOINT_BYTES = 4 << 20
"""What the log may grow to before it is put into the file."""
PATIENCE = 10.0
"""Seconds the device may take."""
SLOWLY = 80 << 20
"""Bytes."""
T = TypeVar("T")


class IndexFile:
    """The open file. Every method raises StoreError, or CorruptChunk, when SQLite cannot do it."""

    uuid = ""
    n_writes = 0
    """How often it was written since it was made."""

    def __init__(self, path: Path, *, busy_timeout: float = 5.0) -> None:
        """Lock and open the file, or make it; raise InvalidArgument when another process has it."""
        self.path, self._busy_timeout = path, busy_timeout
        self._wal = path.with_name(path.name + "-wal")
        self._db: sqlite3.Connection | None = None
        self._is_sure = True  # no sync has failed
        self._is_lost = False  # a call that hangs has the connection
        self._begins = True  # the next commit may begin a log, which SQLite syncs
        self._syncing = threading.Lock()  # held by a sync, also by one that nobody waits for
        self._sealing = False
        try:
            self._lock = within(PATIENCE, self._take, path, give_lock)
        except OSError as error:
            raise of_system(error, "open", path) from error
        try:
            with as_ours(self.path):
                self._alone(self._open)
        except BaseException:
            self._abandon()
            raise

    @property
    def db(self) -> sqlite3.Connection:
        """The connection. Raises StoreError while there is none."""
        if self._db is None or self._is_lost:
            raise StoreError(f"{self.path} is not open", hint="close the engine and open it again")
        return self._db

    def _take(self) -> int:
        if self.path.is_dir():
            raise InvalidArgument("path", f"{self.path} is a directory, wanted a file in it")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.path)
        self._seal = Seal(self.path)
        return lock

    def _alone(self, call: Callable[[], T]) -> T:
        """Do what waits for the device with the connection, which is lost to a call that hangs."""
        seconds = PATIENCE
        with suppress(FileNotFoundError):
            seconds *= 1 + self.path.stat().st_size / SLOWLY
        done = threading.Event()

        def whole() -> T:
            try:
                return call()
            finally:
                done.set()

        try:
            return within(seconds, whole, self.path)
        except NoThread:
            done.set()
            raise
        finally:
            self._is_lost = self._is_lost or not done.is_set()

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
            if is_new:
                self.sync()  # others will be told its uuid: it must not have another one later
            elif not self.is_whole:
                check_rows(self.db, self.path)
                if missing := self._seal.missing(self.uuid, self.n_writes):
                    raise damaged(self.path, missing)

    def _connect(self) -> None:
        # autocommit; the Table serialises threads
        self._begins = True
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
        self.uuid, self.n_writes = str(self.meta("uuid")), int(self.meta("n_writes"))

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

    def meta(self, key: str) -> int | str:
        """Return a value of ``meta``. Raises CorruptChunk."""
        row = self.db.execute("SELECT value, sum FROM meta WHERE key=?", (key,)).fetchone()
        if row is None or row[1] != meta_sum(key, row[0]):
            raise damaged(self.path, f"its {key} is not what was written")
        value: int | str = row[0]
        return value

    def write(self) -> None:
        """Count the transaction that is open, which changes the index; once in each."""
        if not self._sealing:
            self._seal.begin(self.uuid, self.n_writes)
            self._sealing = True
        set_meta(self.db, "n_writes", self.n_writes + 1)

    def commit(self) -> None:
        """Commit the transaction that is open."""
        if self._begins:
            self._alone(lambda: self.db.execute("COMMIT"))
        else:
            self.db.execute("COMMIT")
        self._begins = False

    def wrote(self) -> None:
        """Say that what `write` counted is committed."""
        self.n_writes += 1
        with suppress(OSError):  # then it says less than it could
            self._seal.wrote(self.n_writes)
        if self.n_writes % 32 == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Put a long log into the file. What fails is found again by `sync`."""
        try:
            if self._wal.stat().st_size > CHECKPOINT_BYTES:
                self._begins = True
                self._alone(lambda: self.db.execute("PRAGMA wal_checkpoint(PASSIVE)"))
        except (OSError, sqlite3.Error, StoreError):
            self._is_sure = False

    def sync(self) -> None:
        """Wait until what was written would survive a power cut too. Raises StoreError.

        After a failure nobody knows which pages the disk took, and it would confirm the next time
        whatever it lost: the whole file is written anew before anything is confirmed again.
        """
        if self._syncing.locked():
            raise silent(self.path)
        try:
            if not self._is_sure:
                self._alone(self._rewrite)
            self._is_sure = False
            within(PATIENCE, self._flush, self.path)
            self._is_sure = True
            if self._sealing:
                self._seal.synced()
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            if is_full(error):
                raise NoSpace(f"cannot sync {self.path}", str(self.path)) from error
            hint = "mend or change the disk, then try again: all is written anew before it is confirmed"
            where = str(self.path)
            raise StoreError(f"cannot sync {where}: {error}", hint=hint, path=where) from error

    def _flush(self) -> None:
        with self._syncing:
            if self._wal.exists():  # else SQLite has put all into the file itself, synced
                fsync(self._wal)
            fsync(self.path.parent)  # the file may be new in it

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
        check_rows(self.db, self.path)
        if self.meta("n_writes") != self.n_writes:
            raise damaged(self.path, "its last writes are missing")

    def close(self) -> None:
        """Close the file and let the lock go; doing it twice does nothing."""
        if self._lock < 0:
            return
        try:
            if self._db is not None and not self._is_lost:
                with as_ours(self.path):
                    self._alone(self._close_sealed)
        finally:
            self._abandon()

    def _close_sealed(self) -> None:
        db = self.db
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        self._db = None
        if (self._sealing or not self.is_whole) and not self._wal.exists():
            self._seal.end(self.uuid, self.n_writes)

    def _abandon(self) -> None:
        """Let go of everything, as it is."""
        if self._db is not None and not self._is_lost:
            self._db.close()
        self._db = None
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            try:
                if not self._is_lost:
                    self._seal.close()
            finally:
                try:
                    within(PATIENCE, lambda: give_lock(lock), self.path)
                except NoThread:
                    give_lock(lock)
                except StoreError:  # its thread lets it go when the disk answers
                    pass

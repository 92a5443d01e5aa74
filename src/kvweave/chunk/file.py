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

What may wait for the device is done in a thread of the file's own, and waited for `PATIENCE`, and as long
again for each `SLOWLY` bytes there are, whatever the device does. A small index is read into SQLite's
cache when it is opened; then only commits, checkpoints, syncs and closing wait. A statement that comes too
late is taken back; of a commit nobody knows: when the device answers again, all is looked at anew. The
lock is kept as long as a call hangs that may still write.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from kvweave.chunk.background import UNCHANGED, OneThread, silent, within
from kvweave.chunk.check import check_rows, check_schema, format_of
from kvweave.chunk.format import PAGE_BYTES, damaged
from kvweave.chunk.guard import (
    as_ours,
    found_by,
    free_name,
    give_lock,
    in_doubt,
    take_lock,
    unsynced,
)
from kvweave.chunk.log import LIFE, is_there, kept, log_of, look
from kvweave.chunk.opened import OpenIndex
from kvweave.chunk.pages import is_whole_log
from kvweave.chunk.place import inode_of, is_at, is_still, part, place_of
from kvweave.chunk.rebuild import create, fsync, put_in_place, set_meta, there, upgrade
from kvweave.chunk.rows import UNSURE
from kvweave.chunk.seal import Seal
from kvweave.errors import InvalidArgument, StoreError

WARM_PAGES = 3_000
"""A file of so few pages stays in SQLite's cache, whatever is done to it."""
CHECKPOINT_BYTES = 4 << 20
"""What the log may grow to before it is put into the file."""
PATIENCE = 10.0
"""Seconds the device may take."""
SLOWLY = 80 << 20
"""Bytes."""
UNKNOWN = f"{UNSURE} until the device answers again; look then"
UNSYNCED = "what was written is there, but whether after a power cut too nobody knows; try again"
T = TypeVar("T")


def soon(call: Callable[[], T], path: Path) -> T:
    """Return what ``call`` returns, which uses a file. Raises StoreError when that takes too long."""
    return within(PATIENCE, call, path)


class IndexFile(OpenIndex):
    """The open file. Every method raises StoreError, or CorruptChunk, when SQLite cannot do it."""

    uuid = ""
    was: tuple[str, ...] = ()
    """The uuids of those that it is a copy of."""
    n_writes = 0
    """How often it was written since it was made."""
    next_id = 0
    """As it was opened."""

    def __init__(self, path: Path, *, busy_timeout: float = 5.0) -> None:
        """Lock and open the file, or make it; raise InvalidArgument when another process has it."""
        super().__init__(path, busy_timeout)
        self._life, self._is_told, self._lives = uuid4().hex[:16], False, [""]  # see `log`
        self._is_sure = True  # no sync has failed
        self.is_stale = False  # a call that came too late may have committed
        self._n_failed = 0  # checkpoints
        self._fits = False  # all of it stays in SQLite's cache
        self._is_warm = False  # so no statement but a commit waits for the device
        self._syncing = threading.Lock()  # held by a sync
        self._flushing = threading.Lock()  # and by what it waits for, also when it does no more
        self._turn = threading.Lock()  # of the connection
        self._sealing = False
        self._lock = -1
        self._n_bytes = 0
        self._own: OneThread | None = OneThread(self._back)
        try:
            with as_ours(path):
                self._own.ask(self._take, PATIENCE, path)
                self._own.ask(
                    lambda: in_doubt(self._anew, self.path, self._wal), self._seconds, path
                )
        except BaseException:
            self._end(self._leave)
            raise

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open that may be committed."""
        there = self._own is not None and not self._own.is_late and self._db is not None
        return there and self.db.in_transaction

    def do(
        self, call: Callable[[sqlite3.Connection], T], hint: str = "", *, waits: bool = False
    ) -> T:
        """Return what ``call`` returns, which is given the connection. Raises StoreError when the device
        takes too long, with ``hint`` if it has begun. ``waits``: not only where pages are missing."""
        own, ends = self._own, time.monotonic() + self._seconds
        if own is None:
            raise StoreError(f"{self.path} is closed", hint="open it again")
        if own.is_late or not self._turn.acquire(timeout=self._seconds):
            raise silent(self.path)
        try:
            if self._is_warm and not waits and not own.is_late and own.opener:
                return call(self.db)
            left = max(0.0, ends - time.monotonic())
            return own.ask(lambda: self._sure(call), left, self.path, hint or UNCHANGED)
        finally:
            self._turn.release()

    @property
    def _seconds(self) -> float:
        return PATIENCE * (1 + self._n_bytes / SLOWLY)

    def _back(self) -> None:
        """A call has ended that nobody waited for."""
        self.is_stale = True
        with suppress(sqlite3.Error):
            if self._db is not None and self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _take(self) -> None:
        if self.path.is_dir():
            raise InvalidArgument(
                "path",
                f"{self.path} is a directory, wanted a file in it",
                "move it away, or give another home",
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():  # what lies beside it is beside the file, for all who have it
            self.path = self.path.resolve()
            self._wal = log_of(self.path)
        self._seal = Seal(self.path)
        self._lock = take_lock(self.path)
        self._seal.read()
        for each in (self.path, self._wal, self._seal.path):
            part(each)
        with suppress(FileNotFoundError):
            self._n_bytes = self.path.stat().st_size

    def _anew(self) -> None:
        self._abandon()
        self._open()

    def _open(self) -> None:
        is_new = not there(self.path)
        self._existed = not is_new
        if is_new and there(self._wal):  # SQLite would delete it, as its file was taken away
            self._wal.rename(free_name(self.path, "-wal"))
        is_others, self._lives = look(self.path)
        if is_others:
            if not self._seal.is_whole(alone=True):
                raise damaged(self.path, "the log beside it was written to another index")
            self._wal.rename(free_name(self.path, "-wal"))
        self.is_whole = not is_new and self._seal.is_whole()
        with kept(self._wal, self._abandon):
            self._connect()
            self._prepare()
            if not is_new and not self.is_whole:
                check_rows(self.db, self.path)
                if missing := self._seal.missing(self.uuid, self.n_writes, self.was):
                    raise damaged(self.path, missing)
            self._settle()
        self._read_all()

    def _settle(self) -> None:
        """Be an index of this place. A copy becomes one of its own: what is not in its directory is that
        of the other one."""
        try:
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            self._is_sure = False
        if not is_there(self.path):
            self._lives = str(self.meta(LIFE, "")).split(" ")[:1]
        there, here = str(self.meta("place", "")), place_of(self.path.parent)
        if is_at(there, here):
            return
        is_told = there != "" or not self._existed  # others will be told its uuid: it must stay
        # the same one again when a backup is put back a second time
        uuid = blake2b(f"{self.uuid} {here}".encode(), digest_size=16).hexdigest()
        said = (uuid, (*self.was, self.uuid)) if there else (self.uuid, self.was)
        try:
            self.db.execute("BEGIN IMMEDIATE")
            for key, value in (("uuid", said[0]), ("was", " ".join(said[1])), ("place", here)):
                set_meta(self.db, key, value)
            self._count(self.db)
            self._commit(self.db)
        except (OSError, sqlite3.Error):  # where it is may be said another time
            if is_told:
                raise
            self._back()
            return
        self.uuid, self.was = said
        if is_told:
            self._flush()
            self._seal.begin(self.uuid, self.n_writes)
            self._seal.synced(self.n_writes)

    def _prepare(self) -> None:
        """Refuse what is not ours, before a byte of it is changed; make what is not there."""
        db = self.db
        version = format_of(db, self.path)
        is_new = version == 0
        if version == 1:
            self._upgrade()
            return
        if is_new and self._seal.said.n and self._existed:
            raise damaged(self.path, f"its last {self._seal.said.n} writes are missing")
        if is_new:
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        self._settings()
        if is_new:
            create(db, uuid4().hex)
        check_schema(db, self.path)
        self.uuid, self.n_writes = str(self.meta("uuid")), int(self.meta("n_writes"))
        self.was = tuple(str(self.meta("was", "")).split())
        self.next_id = int(self.meta("next_id"))

    def _read_all(self) -> None:
        """Have a small file in SQLite's cache."""
        self._fits = True
        self._measure()
        try:
            if self._fits:
                self._fits = found_by(self.db, "quick_check") == "ok"
        except sqlite3.DatabaseError:  # who reads what is damaged is told
            self._fits = False

    def _upgrade(self) -> None:
        """Put a file of this format in the place of one of format 1, which stays until it is done."""
        new = self.path.with_name(self.path.name + ".new")
        upgrade(self.db, self.path, new, uuid4().hex)
        self._replace(new)
        self._prepare()

    def _replace(self, new: Path) -> None:
        """Close, put the synced file ``new`` in the place of this one, and open that."""
        self._is_warm = False
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.close()
        self._db = None
        try:
            if there(self._wal) and self._wal.stat().st_size:
                raise StoreError(f"{self.path} is open in another program", hint="close that first")
            put_in_place(new, self.path)
        finally:
            self._inode = None  # it is another one now, or not
            self._connect()
            with suppress(OSError):
                self._inode = inode_of(self.path)

    def write(self) -> None:
        """Count the transaction that is open, which changes the index; once in each."""
        self.do(self._count)

    def _count(self, db: sqlite3.Connection) -> None:
        set_meta(db, "n_writes", self.n_writes + 1)
        if not self._is_told:
            set_meta(db, LIFE, " ".join(dict.fromkeys([self._life, *self._lives])))

    def commit(self) -> None:
        """Commit the transaction that is open. Raises StoreError that says so where nobody knows."""
        self.do(self._commit, UNKNOWN, waits=True)

    def _commit(self, db: sqlite3.Connection) -> None:
        self._require_place()
        if not self._sealing:
            self._seal.begin(self.uuid, self.n_writes)
            self._sealing = True
        db.execute("COMMIT")
        self.n_writes, self._is_told = self.n_writes + 1, True
        with suppress(OSError):  # then it says less than it could
            self._seal.wrote(self.n_writes)
        if self.n_writes % 32 == 0:
            self._checkpoint(db)
        with suppress(sqlite3.Error):
            self._measure()
        # not before: where the log is empty SQLite asks for the file's size each time
        self._is_warm = self._fits

    def _measure(self) -> None:
        n_pages = self.db.execute("PRAGMA page_count").fetchone()[0]
        self._n_bytes, self._fits = n_pages * PAGE_BYTES, self._fits and n_pages < WARM_PAGES

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        """Put a long log into the file. What fails is found again by `sync`."""
        try:
            if self._wal.stat().st_size > CHECKPOINT_BYTES:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.Error):
            self._is_sure, self._n_failed = False, self._n_failed + 1

    def sync(self) -> None:
        """Wait until what was written would survive a power cut too. Raises StoreError.

        After a failure nobody knows which pages the disk took, and it would confirm the next time
        whatever it lost: the whole file is written anew before anything is confirmed again.
        """
        if not self._syncing.acquire(timeout=self._seconds):
            raise silent(self.path, UNSYNCED)
        try:
            self._sync()
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            raise unsynced(error, self.path) from error
        finally:
            self._syncing.release()

    def _sync(self) -> None:
        if self._flushing.locked():
            raise silent(self.path, UNSYNCED)
        if not self._is_sure:
            self.do(self._rewrite, UNSYNCED, waits=True)
        n, failed = self.n_writes, self._n_failed  # others may write meanwhile
        self._is_sure = False
        within(PATIENCE, self._flush, self.path, hint=UNSYNCED)
        self._is_sure = failed == self._n_failed
        if self._sealing:
            self.do(lambda _: self._seal.synced(n), UNSYNCED, waits=True)

    def _flush(self) -> None:
        with self._flushing:
            self._require_place()
            if there(self._wal):  # else SQLite has put all into the file itself, synced
                fsync(self._wal)
            fsync(self.path.parent)  # the file may be new in it

    def _rewrite(self, _: object = None) -> None:
        """Write the index to a new file, check that and put it in the place of this one."""
        self._require_place()
        log = self._wal.read_bytes() if there(self._wal) else b""
        if log and not is_whole_log(log):
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
        self._read_all()

    def close(self) -> None:
        """Close the file and let the lock go; doing it twice does nothing."""
        with as_ours(self.path):
            self._end(self._close_sealed)

    def _end(self, call: Callable[[], None]) -> None:
        own, self._own = self._own, None
        if own is not None and own.opener:
            own.end(call, self._seconds, self.path)

    def _close_sealed(self) -> None:
        try:
            if self._db is not None and is_still(self.path, self._inode):
                self._sure(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
                self._abandon()
                if (self._sealing or not self.is_whole) and not there(self._wal):
                    self._seal.end(self.uuid, self.n_writes)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let go of everything, as it is."""
        if self._lock < 0:
            return
        try:
            self._abandon()
            self._seal.close()
        finally:
            lock, self._lock = self._lock, -1
            give_lock(lock)

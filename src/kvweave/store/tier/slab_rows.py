"""The rows of a slab: which value lies where, in SQLite, written behind by a thread.

::

    slab.sqlite    slots(key, segment, page, n, seq)     user_version = FORMAT

Changes queue up in memory and are committed together (at most `GATHER` seconds later, or when
somebody calls `flush`). Only then ``committed`` is called, so that a slot that a row on disk still
names, or will name, is never written again. Such commits, and flushed ones,
wait for the disk: first for the segments (fdatasync), then for SQLite's log.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvweave.errors import CorruptChunk, FormatTooNew, StoreError
from kvweave.store.tier.base import PAGE
from kvweave.store.tier.slab_segments import Segment

FORMAT = 1
APPLICATION_ID = 0x6B76_736C  # "kvsl"
LATE = "the deadline has passed"
GATHER = 0.05  # seconds that changes wait for others: each commit costs a sync of the disk
RETRY = 0.5  # seconds after a commit that failed
IDLE = 1.0  # seconds without changes after which there is time to tidy up

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE slots(
    key TEXT PRIMARY KEY, segment INT NOT NULL, page INT NOT NULL, n INT NOT NULL, seq INT NOT NULL
    ) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


def pages_of(n: int) -> int:
    """Return the pages that a value of ``n`` bytes takes, its header's included."""
    return 1 + -(-n // PAGE)


class Extent:
    """Where a value lies: a header page, then its bytes."""

    __slots__ = ("checked", "gone", "leases", "loose", "n", "page", "queued", "segment", "seq")

    def __init__(self, segment: Segment, page: int, n: int, seq: int, checked: bool) -> None:
        self.segment = segment
        self.page = page
        self.n = n
        self.seq = seq
        self.checked = checked  # its header was read, or written by us
        self.leases = 0  # readers that have begun and not ended
        self.queued = 0  # changes not committed yet that speak of it
        self.gone = False  # no longer what its key names
        self.loose = False  # gone, and no row on disk names it either

    @property
    def n_pages(self) -> int:
        return pages_of(self.n)


IndexRow = tuple[str, int, int, int, int]  # key, segment, page, bytes, seq


class Change(NamedTuple):
    """What a key names from now on, and what it no longer names."""

    key: str
    now: Extent | None
    before: Extent | None


class SlabIndex:
    """The open index; one thread of its own commits."""

    def __init__(
        self, path: Path, committed: Callable[[Sequence[Change]], None], idle: Callable[[], object]
    ) -> None:
        """Open or make it. Raises StoreError, CorruptChunk or FormatTooNew.

        Called in the committing thread: ``committed`` with the changes of a commit, ``idle`` when
        something was deleted or replaced and nothing has happened since for a while.
        """
        self.path = path
        self._committed = committed
        self._idle = idle
        self._queue: deque[Change] = deque()
        self._n_queued = 0
        self._n_synced = 0
        self._wanted = 0  # of those queued, as far as somebody waits for
        self._dirty: set[Segment] = set()
        self._error, self._n_errors = "", 0
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._asleep = False
        self._closing = False
        self._told = threading.Condition()
        self._using = threading.Lock()  # the connection
        try:
            self._db = _open(path)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise CorruptChunk(str(path), str(error)) from error
            raise StoreError(f"cannot open {path}: {error}", path=str(path)) from error
        self._thread = threading.Thread(target=self._work, name="kvweave-slab-rows", daemon=True)
        self._thread.start()

    def load(self) -> list[IndexRow]:
        """Return every row that is committed, by segment and page."""
        with self._using:
            query = "SELECT key, segment, page, n, seq FROM slots ORDER BY segment, page"
            return self._db.execute(query).fetchall()

    def change(self, key: str, now: Extent | None, before: Extent | None) -> None:
        """Queue a change. The caller's lock orders the calls; this takes no lock and no time."""
        if now is not None:
            now.queued += 1
        if before is not None:
            before.queued += 1
        self._queue.append(Change(key, now, before))
        self._n_queued += 1
        if self._asleep:
            self._asleep = False
            self._wake.set()

    def flush(self, timeout: float | None = None) -> str:
        """Wait until all that was queued would survive a power cut; return "" or why not."""
        end = None if timeout is None else time.monotonic() + timeout
        wanted = self._n_queued
        with self._told:
            if self._closing and self._n_synced < wanted:
                return "the index is closed"
            n_errors = self._n_errors
            self._wanted = max(self._wanted, wanted)
            self._hurry.set()
            self._wake.set()
            while self._n_synced < wanted:
                if self._n_errors != n_errors:
                    return self._error
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return LATE
                self._told.wait(left)
        return ""

    def close(self) -> str:
        """Commit what is queued, end the thread and close; return "" or why that failed."""
        if self._closing:
            return ""
        why = self.flush(timeout=10)
        self._closing = True
        self._hurry.set()
        self._wake.set()
        self._thread.join()
        try:
            self._db.close()
        except sqlite3.Error as error:
            why = why or str(error)
        return why

    def _work(self) -> None:
        tidy = False
        while True:
            self._asleep = True
            if not self._queue and not self._closing and self._wanted <= self._n_synced:
                if not self._wake.wait(IDLE if tidy else None):
                    self._idle()
                    tidy = False
            self._asleep = False
            self._wake.clear()
            if self._closing:
                return
            if not self._queue and self._wanted <= self._n_synced:
                continue
            self._hurry.wait(GATHER)
            self._hurry.clear()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            tidy = tidy or any(change.before is not None for change in batch)
            if not self._commit(batch):
                self._queue.extendleft(reversed(batch))
                self._hurry.wait(RETRY)

    def _commit(self, batch: list[Change]) -> bool:
        """Write changes; what only they named before is given back. False if it cannot be done."""
        wanted = self._n_queued - len(self._queue)  # all up to here are in this batch, or before
        final = {change.key: change.now for change in batch}
        self._dirty |= {slot.segment for slot in final.values() if slot is not None}
        frees = any(change.before is not None for change in batch)
        synced = frees or self._wanted > self._n_synced
        why = ""
        try:
            if synced:
                while self._dirty:
                    next(iter(self._dirty)).sync()
                    self._dirty.pop()
            self._write(final)
            if synced:
                self._sync()
            self._committed(batch)
        except Exception as error:  # whatever it is: others wait for this thread
            why = f"the index cannot be written: {error}"
        with self._told:
            if why:
                self._error = why
                self._n_errors += 1
            elif synced:
                self._n_synced = wanted
            self._told.notify_all()
        return not why

    def _write(self, final: dict[str, Extent | None]) -> None:
        drops = [(key,) for key, slot in final.items() if slot is None]
        puts = [
            (key, slot.segment.number, slot.page, slot.n, slot.seq)
            for key, slot in final.items()
            if slot is not None
        ]
        with self._using:
            db = self._db
            try:
                db.execute("BEGIN IMMEDIATE")
                db.executemany("DELETE FROM slots WHERE key=?", drops)
                db.executemany("INSERT OR REPLACE INTO slots VALUES(?,?,?,?,?)", puts)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _sync(self) -> None:
        """Wait for SQLite's log: with synchronous=NORMAL a commit does not."""
        try:
            file = os.open(f"{self.path}-wal", os.O_RDONLY)
        except FileNotFoundError:
            return  # SQLite has put all of it into the file itself, synced
        try:
            os.fdatasync(file)
        finally:
            os.close(file)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not is_new and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise CorruptChunk(str(path), "it is some other SQLite file, not a slab's index")
        if version > FORMAT:
            raise FormatTooNew(str(path), version, FORMAT)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if is_new:
            db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db

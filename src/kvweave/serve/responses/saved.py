"""The file of what is kept of responses: a server that starts anew on the same home knows it again.

::

    responses.sqlite    kept(namespace, kind, id, used, told, items, sum)   a response, a summary, a conversation
                        items(n, told, sum)                                 each item of a namespace once

A thread of its own writes it, and an answer waits until what it changed is there (`settled`), so a
server that is killed has all that it acknowledged; after a power cut the newest may be missing. A disk
that takes too long is not waited for. Where nothing can be written the server goes on without; all is
written anew when that works again. A row that is not as it was written is not read.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from zlib import crc32

from kvweave.chunk.background import Background, NoThread, within
from kvweave.chunk.guard import as_ours, found_by, free_name, give_lock, in_doubt, take_lock
from kvweave.chunk.rebuild import there
from kvweave.errors import CorruptChunk, FormatTooNew, StoreError
from kvweave.serve.responses.used import now, written

FILE = "responses.sqlite"
FORMAT, APPLICATION_ID = 2, 0x6B767772  # "kvwr"
MOST_WAITING = 20_000  # writes; more than that, and nothing is written down for now
TOGETHER = 512  # writes of one transaction
OPEN_SECONDS, SLOWLY = 10.0, 80 << 20  # and as long again for each so many bytes
CLOSE_SECONDS = 30.0
SCHEMA = (
    "CREATE TABLE kept(namespace TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL,"
    " used REAL NOT NULL, told TEXT NOT NULL, items TEXT NOT NULL, sum INTEGER NOT NULL,"
    " PRIMARY KEY(namespace, kind, id))",
    "CREATE TABLE items(n INTEGER PRIMARY KEY, told TEXT NOT NULL, sum INTEGER NOT NULL)",
)
TABLES = ("kept", "items")
# format 1 had no sums
TAKEN_OVER = (
    "INSERT INTO kept SELECT *, row_sum(namespace, kind, id, told, items) FROM old_kept",
    "INSERT INTO items SELECT *, row_sum(n, told) FROM old_items",
)
Statement: TypeAlias = tuple[str, tuple[Any, ...]]
_Asked: TypeAlias = "tuple[list[Statement], Future[None] | None]"
_Opened: TypeAlias = "tuple[Callable[[], object], sqlite3.Connection, int | None]"
WHERE = "namespace=? AND kind=? AND id=?"
WIPE: Statement = ("PRAGMA wal_checkpoint(TRUNCATE)", ())
log = logging.getLogger("kvweave.serve")


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """A record of the file."""

    namespace: str
    kind: str
    id: str
    used: float
    told: dict[str, Any] | None  # None: it is not as it was written, or is not whole
    numbers: tuple[int, ...]
    items: tuple[dict[str, Any], ...]


class SavedResponses:
    """The open file. Its methods return at once; what they write comes later, in their order.

    Items are written before the record that has them, and go after it, so what is there is whole
    wherever writing ends.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; one that is damaged is put aside.

        Raises InvalidArgument when another process has it, FormatTooNew, StoreError.
        """
        self.path = path
        self.is_behind = False
        """Whether something could not be written, and all has to be (`rewrite`)."""
        with as_ours(path):
            self._unlock, self._db, last = within(OPEN_SECONDS, self._locked, path, _let_go)
        self._next = (last or 0) + 1
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._writer: Background | None = None

    def _locked(self) -> _Opened:
        lock = take_lock(self.path)
        unlock = weakref.finalize(self, give_lock, lock)
        try:
            db = self._opened()
            self._seconds = OPEN_SECONDS * (1 + self.path.stat().st_size / SLOWLY)
            return unlock, db, db.execute("SELECT max(n) FROM items").fetchone()[0]
        except BaseException:
            unlock()
            raise

    # ---- reading

    def load(self) -> Iterator[SavedRecord]:
        """Yield all records, those that were used least recently first; what has one number is one.

        Called before anything is written; items that no record has are removed. Raises StoreError.
        """
        with as_ours(self.path):
            texts, kept, numbers = within(self._seconds, self._rows, self.path)
        wanted = {n for each in numbers for n in each or ()}
        items = {n: json.loads(texts[n]) for n in wanted if n in texts}
        for (space, kind, id, used, told, *_), own in zip(kept, numbers, strict=True):
            if own is None or not all(n in items for n in own):
                log.warning("%s: %s %s is not whole, and is not read", self.path, kind, id)
                self.write((f"DELETE FROM kept WHERE {WHERE}", (space, kind, id)))
                yield SavedRecord(space, kind, id, now(), None, (), ())
                continue
            held, used = tuple(items[n] for n in own), used if isinstance(used, float) else now()
            yield SavedRecord(space, kind, id, used, json.loads(told), tuple(own), held)

    def _rows(self) -> tuple[dict[int, str], list[Any], list[list[int] | None]]:
        rows = self._db.execute("SELECT n, told, sum FROM items").fetchall()
        texts: dict[int, str] = {n: told for n, told, sum in rows if row_sum(n, told) == sum}
        kept = self._db.execute("SELECT * FROM kept ORDER BY used").fetchall()
        numbers = [
            json.loads(row[5]) if row_sum(*row[:3], *row[4:6]) == row[6] else None for row in kept
        ]
        wanted = {n for each in numbers for n in each or ()}
        lost = [(n,) for n, *_ in rows if n not in wanted]
        self._db.executemany("DELETE FROM items WHERE n=?", lost)
        return texts, kept, numbers

    # ---- writing

    def number(self) -> int:
        """Return the number of a new item."""
        self._next += 1
        return self._next - 1

    def write(self, *statements: Statement) -> None:
        """Write this down, some time."""
        if self.is_behind:
            return
        if self._waiting.qsize() > MOST_WAITING:
            self._fell_behind("the disk is too slow")
            return
        self._put(list(statements))

    def rewrite(self, statements: Sequence[Statement]) -> None:
        """Write all anew, after something could not be written."""
        self.is_behind = False
        clear: list[Statement] = [("DELETE FROM kept", ()), ("DELETE FROM items", ())]
        self._put([*clear, *statements])

    def settled(self) -> Future[None]:
        """Return what is done once all that was given to be written is, or cannot be."""
        done: Future[None] = Future()
        if self._writer is None or self.is_behind:
            done.set_result(None)
        else:
            self._waiting.put(([], done))
        return done

    def wipe(self) -> None:
        """Have nothing left in SQLite's log of what was removed, once that is written."""
        if self._writer is not None and not self.is_behind:
            self._put([WIPE])

    def close(self) -> None:
        """Write what waits, and close the file."""
        if self._writer is not None:
            self._waiting.put(None)
            if not self._writer.join(CLOSE_SECONDS):
                log.warning("%s does not answer: what was not written yet is lost", self.path)
                return  # what hangs has the file, and the lock while the process lives
        with suppress(sqlite3.Error, StoreError):
            within(CLOSE_SECONDS, self._close, self.path)

    def _close(self) -> None:
        try:
            self._db.close()
        finally:
            self._unlock()

    def _put(self, statements: list[Statement]) -> None:
        try:
            if self._writer is None:
                self._writer = Background(self._write, "kvweave-responses")
        except NoThread as error:
            self._fell_behind(error.message)
            return
        self._waiting.put((statements, None))

    def _write(self) -> None:
        """Write what comes until there is None."""
        while (first := self._waiting.get()) is not None:
            together, ends = [first], False
            with suppress(queue.Empty):
                while len(together) < TOGETHER and not ends:
                    more = self._waiting.get_nowait()
                    ends = more is None
                    together += [] if more is None else [more]
            statements = [statement for each, _ in together for statement in each]
            try:
                self._transact([each for each in statements if each is not WIPE])
                if WIPE in statements:
                    self._db.execute(*WIPE)
            except Exception as error:  # memory too: nobody else writes
                self._fell_behind(str(error) or repr(error))
            for _, done in together:
                if done is not None and done.set_running_or_notify_cancel():
                    done.set_result(None)
            if ends:
                return

    def _transact(self, statements: Sequence[Statement]) -> None:
        if not statements:
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for sql, given in statements:
                self._db.execute(sql, given)
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _fell_behind(self, why: str) -> None:
        if not self.is_behind:
            log.warning("%s: responses are kept in memory only for now: %s", self.path, why)
        self.is_behind = True

    # ---- opening

    def _opened(self) -> sqlite3.Connection:
        try:
            wal = self.path.with_name(self.path.name + "-wal")
            return in_doubt(self._connect, self.path, wal)
        except (sqlite3.DatabaseError, CorruptChunk) as error:
            if isinstance(error, sqlite3.OperationalError):  # of the machine, not of the file
                raise
            aside = free_name(self.path)
            log.warning("%s is damaged (%s): it is put aside as %s", self.path, error, aside.name)
            for end in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    self.path.with_name(self.path.name + end).rename(f"{aside}{end}")
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        log_, is_new = self.path.with_name(self.path.name + "-wal"), not there(self.path)
        if is_new and there(log_):  # of a file that somebody took away: SQLite would delete it
            log_.rename(free_name(self.path, "-wal"))
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # text: its owner's alone
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda text: text.decode(errors="replace")  # then its sum is another
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        n_tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if n_tables and application != APPLICATION_ID:
            raise CorruptChunk(str(self.path), "it is another kind of file")
        if version > FORMAT:
            raise FormatTooNew(str(self.path), version, FORMAT)
        if n_tables and version < 1:
            raise CorruptChunk(str(self.path), f"its format is said to be {version}")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA secure_delete=ON")  # what is forgotten is gone from the file too
        if n_tables and found_by(db, "integrity_check") != "ok":
            self._index_again(db)
        if not n_tables or version < FORMAT:
            self._make(db, from_older=bool(n_tables))
        tables = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        if sorted(row[0] for row in tables) != sorted(SCHEMA):
            raise CorruptChunk(str(self.path), "its tables are not those of such a file")

    def _index_again(self, db: sqlite3.Connection) -> None:
        """What finds rows is made of them; by one that is damaged a row that is written is not found again."""
        found = found_by(db, "quick_check")
        if found == "ok":  # the rows are
            log.warning("%s: what finds its rows is damaged, and is made again", self.path)
            try:
                db.execute("REINDEX")
                found = found_by(db, "integrity_check")
            except sqlite3.IntegrityError as error:
                found = str(error)
        if found != "ok":
            raise CorruptChunk(str(self.path), "SQLite finds faults in it")

    def _make(self, db: sqlite3.Connection, *, from_older: bool) -> None:
        """Make the tables, with what is in those of format 1."""
        db.create_function("row_sum", -1, row_sum, deterministic=True)
        older = TABLES if from_older else ()
        try:
            db.execute("BEGIN IMMEDIATE")
            for statement in (
                *(f"ALTER TABLE {name} RENAME TO old_{name}" for name in older),
                *SCHEMA,
                *(TAKEN_OVER if from_older else ()),
                *(f"DROP TABLE old_{name}" for name in older),
            ):
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if from_older and error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # not of the machine
                raise CorruptChunk(str(self.path), str(error)) from error
            raise


def _let_go(made: _Opened) -> None:
    unlock, db, _ = made
    db.close()
    unlock()


class KeptRecord(Protocol):
    """What a record of the file is made of."""

    used: float

    @property
    def id(self) -> str:
        """Its name, among those of its kind."""

    def saved(self) -> dict[str, Any]:
        """Return it without its items, as JSON."""


class NamespaceFile:
    """The part of the file that is one namespace's; without a file nothing is written."""

    def __init__(self, saved: SavedResponses | None = None, namespace: str = "") -> None:
        self._saved, self._namespace = saved, namespace

    def put(self, text: str) -> int:
        """Write an item, as JSON; return its number."""
        if self._saved is None:
            return 0
        n = self._saved.number()
        self._saved.write(item_row(n, text))
        return n

    def drop(self, n: int) -> None:
        """Remove an item."""
        self._write("DELETE FROM items WHERE n=?", n)

    def put_record(self, kind: str, record: KeptRecord, items: Sequence[int]) -> None:
        """Write a record, or what has become of it."""
        if self._saved is not None:
            self._saved.write(self.row(kind, record, items))

    def drop_record(self, kind: str, id: str) -> None:
        """Remove a record."""
        self._write(f"DELETE FROM kept WHERE {WHERE}", self._namespace, kind, id)

    def use_record(self, kind: str, record: KeptRecord) -> None:
        """Note when a record was used."""
        given = (written(record.used), self._namespace, kind, record.id)
        self._write(f"UPDATE kept SET used=? WHERE {WHERE}", *given)

    def row(self, kind: str, record: KeptRecord, items: Sequence[int]) -> Statement:
        """Return what writes a record."""
        told, numbers = json.dumps(record.saved()), json.dumps(list(items))
        named = (self._namespace, kind, record.id)
        given = (*named, written(record.used), told, numbers, row_sum(*named, told, numbers))
        return "INSERT OR REPLACE INTO kept VALUES(?,?,?,?,?,?,?)", given

    def _write(self, sql: str, *given: Any) -> None:
        if self._saved is not None:
            self._saved.write((sql, given))


def item_row(n: int, text: str) -> Statement:
    """Return what writes an item, as JSON."""
    return "INSERT OR REPLACE INTO items VALUES(?,?,?)", (n, text, row_sum(n, text))


def row_sum(*values: object) -> int:
    """Return a checksum of what a row says; when it was used last is not in it."""
    return crc32("\0".join(map(str, values)).encode(errors="surrogatepass"))

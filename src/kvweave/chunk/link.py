"""The connections of an index in PostgreSQL: its tables, its transactions, and what others say."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import errors

from kvweave.chunk.background import Background, Opener, within
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.lease import Lease
from kvweave.chunk.levels import Holders
from kvweave.chunk.rows import ALL, UNSURE
from kvweave.chunk.timed import TimedConnection
from kvweave.errors import ChunkNotFound, FormatTooNew, ModelMismatch, StoreError

FORMAT = 1
LEASE_SECONDS = 30.0
"""How long an engine's holds count after it was last heard of."""
CONNECT_SECONDS = 5
AGAIN_SECONDS = 0.5
"""How long is waited for a server that did not answer just now."""
ANSWER_SECONDS = 10.0
"""How long an answer may take, and as long again for each `_SLOWLY` rows of it."""
_SLOWLY = 100_000
_TOGETHER = 2000  # chunks asked for in one query
_MOST_TOLD = 7000  # bytes of a NOTIFY; 8000 are allowed
_MODEL = "model TEXT NOT NULL DEFAULT ''"  # of an engine; indexes of before have no such column

_SCHEMA = """
CREATE TABLE IF NOT EXISTS kvweave_meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS kvweave_engines(
    id BIGSERIAL PRIMARY KEY, seen TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(), {model});
CREATE TABLE IF NOT EXISTS kvweave_chunks(
    id BIGSERIAL PRIMARY KEY, digest BYTEA NOT NULL UNIQUE, n_tokens BIGINT NOT NULL,
    kind SMALLINT NOT NULL, namespace TEXT NOT NULL, base BIGINT REFERENCES kvweave_chunks(id),
    pinned BOOLEAN NOT NULL, created FLOAT8 NOT NULL, last_used FLOAT8 NOT NULL,
    n_uses BIGINT NOT NULL, maker BIGINT NOT NULL, sum BIGINT NOT NULL, tokens BYTEA NOT NULL);
CREATE INDEX IF NOT EXISTS kvweave_chunks_base ON kvweave_chunks(base) WHERE base IS NOT NULL;
CREATE TABLE IF NOT EXISTS kvweave_names(
    namespace TEXT COLLATE "C", name TEXT COLLATE "C",
    id BIGINT NOT NULL REFERENCES kvweave_chunks(id), PRIMARY KEY(namespace, name));
CREATE INDEX IF NOT EXISTS kvweave_names_id ON kvweave_names(id);
CREATE TABLE IF NOT EXISTS kvweave_holds(
    engine BIGINT REFERENCES kvweave_engines(id) ON DELETE CASCADE,
    id BIGINT REFERENCES kvweave_chunks(id), context TEXT, PRIMARY KEY(engine, id, context));
CREATE INDEX IF NOT EXISTS kvweave_holds_id ON kvweave_holds(id);
"""
log = logging.getLogger("kvweave.chunk")
UNKNOWN = f"{UNSURE} until the server answers again; look then"
ALIVE = "e.seen > clock_timestamp() - make_interval(secs => %(lease)s)"


class Link:
    """One connection for statements, and one, in a thread, that hears and is heard of."""

    is_shared = True
    was: tuple[str, ...] = ()

    def __init__(self, url: str, *, lock_timeout: float = 5.0) -> None:
        """Raises StoreError when the server does not answer, FormatTooNew."""
        self._url, self._lock_timeout, self._opener = url, lock_timeout, Opener()
        self.where = re.sub(r"//([^:@/]*):[^@]*@", r"//\1:***@", url)
        self._level, self._model = 0, ""
        self._changed: set[ChunkId] = set()
        self.met: dict[ChunkId, bytes] = {}  # digests of chunks that something is remembered of
        self._highest = ChunkId(0)  # of all that were met
        self._went_back = False  # whether the server is at an earlier time than we know of
        self._inbox: deque[ChunkId] = deque()
        self.held: Holders = {}
        self._db: TimedConnection | None = None
        self._failed = -LEASE_SECONDS  # when it was asked in vain last
        self._lease: Lease | None = None
        self._stop = Event()
        self._unsure = Event()  # whether a commit was that nobody knows of
        self._db = self._connect()
        self.uuid = self._prepare()
        self._lease = self._leased()
        self._thread = Background(partial(self._listen, self._lease), "kvweave-index")

    def _leased(self) -> Lease:
        assert self._db is not None
        try:
            return Lease(self._db)
        except psycopg.Error as error:
            self._db.close()
            raise self._lost(error) from error

    @property
    def _engine(self) -> int:
        return 0 if self._lease is None else self._lease.number

    def _connect(self) -> TimedConnection:
        again = time.monotonic() - self._failed < LEASE_SECONDS
        seconds = AGAIN_SECONDS if again else CONNECT_SECONDS
        try:  # looking up a host name has no deadline of its own
            db = within(seconds, self._connected, self.where, TimedConnection.close)
        except (psycopg.Error, StoreError) as error:
            self._failed = time.monotonic()
            raise self._lost(error) from error
        self._failed = -LEASE_SECONDS
        return db

    def _connected(self) -> TimedConnection:
        db = TimedConnection.connect(
            self._url, autocommit=True, connect_timeout=max(2, int(CONNECT_SECONDS))
        )
        db.ends = time.monotonic() + ANSWER_SECONDS
        db.execute(f"SET lock_timeout = {int(self._lock_timeout * 1000)}")
        db.execute("SET synchronous_commit = on")
        # for locks of who is gone
        for name, value in (("idle", 10), ("interval", 5), ("count", 3)):
            db.execute(f"SET tcp_keepalives_{name} = {value}")
        return db

    def _connected_again(self) -> TimedConnection:
        """Connect to what is still the same index. Raises StoreError, from then on each time where it
        was put back: it gives ids a second time, and all that is known here goes by ids."""
        db = self._connect()
        try:
            if self._is_same(db):
                return db
        except psycopg.Error as error:
            db.close()
            raise self._lost(error) from error
        db.close()
        raise self._put_back()

    def _is_same(self, db: TimedConnection) -> bool:
        """Tell whether no chunk that was met is another one now, or will be."""
        highest, met = self._highest, dict(self.met)  # first: more may be added meanwhile
        db.ends = time.monotonic() + ANSWER_SECONDS
        query = "SELECT c.last_value, e.last_value FROM kvweave_chunks_id_seq c, kvweave_engines_id_seq e"
        last = db.execute(query).fetchone()
        if last is None or last[0] < highest or last[1] < self._engine:
            return False
        query, ids = "SELECT id, digest FROM kvweave_chunks WHERE id=ANY(%s)", list(met)
        for start in range(0, len(ids), _TOGETHER):
            db.ends = time.monotonic() + ANSWER_SECONDS
            for id, digest in db.execute(query, (ids[start : start + _TOGETHER],)):
                if met.get(id, digest) != digest:
                    return False
        return True

    def meet(self, id: ChunkId, digest: bytes) -> None:
        """Note whose id this is, as long as something is remembered of it. Raises StoreError."""
        self.met[self.still(id, digest)] = digest
        self._highest = max(self._highest, id)

    def still(self, id: ChunkId, digest: bytes) -> ChunkId:
        """Return an id that was read with this digest. Raises StoreError where it was another's."""
        if self.met.get(id, digest) != digest:
            raise self._put_back()
        return id

    def later(self, id: ChunkId) -> ChunkId:
        """Return an id that was given just now. Raises StoreError where it, or a later one, was before."""
        if id <= self._highest:
            raise self._put_back()
        return id

    def forget(self, id: ChunkId) -> None:
        """As `IndexRows.forget`."""
        if id not in self.held:
            self.met.pop(id, None)

    def _prepare(self) -> str:
        if self._one("SELECT to_regclass('kvweave_meta')")[0] is None:
            self._make()
        meta = dict(self._all("SELECT key, value FROM kvweave_meta"))
        if int(meta["format"]) > FORMAT:
            raise FormatTooNew(self.where, int(meta["format"]), FORMAT)
        with suppress(StoreError):  # somebody else is at it
            self._run(
                "DELETE FROM kvweave_engines e WHERE e.seen < clock_timestamp()"
                " - make_interval(secs => %s)",
                10 * LEASE_SECONDS,
            )
        return str(meta["uuid"])

    def _make(self) -> None:
        with self._alone():
            self._run(_SCHEMA.format(model=_MODEL))
            for key, value in (("uuid", uuid4().hex), ("format", str(FORMAT))):
                self._run(
                    "INSERT INTO kvweave_meta VALUES(%s, %s) ON CONFLICT DO NOTHING", key, value
                )

    def claim(self, model: str) -> None:
        """Say whose tokens are written from now on: names and ids are shared, and another model would
        read them as other texts. Raises ModelMismatch."""
        with self._alone():
            there = "SELECT 1 FROM pg_attribute WHERE attrelid='kvweave_engines'::regclass"
            if self._one(f"{there} AND attname='model'") is None:  # this takes all locks
                self._run(f"ALTER TABLE kvweave_engines ADD COLUMN {_MODEL}")
            others = self._named(
                f"SELECT model FROM kvweave_engines e WHERE model NOT IN ('', %(model)s) AND {ALIVE}",
                model=model,
            )
            if others:
                raise ModelMismatch("the model of an engine on this index", model, others[0][0])
            self._run("UPDATE kvweave_engines SET model=%s WHERE id=%s", model, self._engine)
        self._model = model

    # --- transactions ---

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Do all of a block, or none of it, while no other engine is in one."""
        self.open(1)
        try:
            self._run("SELECT pg_advisory_xact_lock(7455871)")
            yield
            self._run("COMMIT")
            self._level = 0
        except BaseException:
            self.rollback(1)
            raise

    def open(self, level: int) -> None:
        while self._level < level:
            self._run("BEGIN" if self._level == 0 else f"SAVEPOINT s{self._level + 1}")
            self._level += 1

    def release(self, level: int) -> None:
        if self._level >= level:
            self._run(f"RELEASE SAVEPOINT s{level}")
            self._level = level - 1

    def rollback(self, level: int) -> None:
        if self._level < level:
            return
        self._level = level - 1
        if level == 1:
            self._changed.clear()
        if self._db is None or self._db.closed:
            return  # the server takes back what was not committed
        if level == 1:
            self._run("ROLLBACK")
        else:
            self._run(f"ROLLBACK TO SAVEPOINT s{level}")

    def commit(self, n_freed: int) -> None:
        if not self._level:
            return
        told = ",".join(map(str, self._changed))
        told = told if len(told) < _MOST_TOLD else str(ALL)
        mine = self._one(
            "SELECT pg_current_xact_id_if_assigned()::text, pg_notify(%s, %s)",
            f"kvweave_{self.uuid}",
            f"{self._engine}:{told}",
        )[0]
        try:
            self._run("COMMIT")
        except StoreError:
            if mine is None or (self._db is not None and not self._db.closed):
                raise
            self._level = 0  # nobody knows whether it was the question or the answer that was lost
            try:
                came = self._one("SELECT pg_xact_status(%s::xid8)", mine)[0]
            except StoreError:
                came = "unknown"
            if came == "aborted":
                raise
            if came != "committed":
                self._unsure.set()
                self._inbox.append(ALL)
                raise StoreError(f"the index {self.where} does not answer", hint=UNKNOWN) from None
        self._level = 0
        self._changed.clear()

    def changed(self) -> Iterable[ChunkId]:
        ids: set[ChunkId] = set()
        while self._inbox:
            ids.add(self._inbox.popleft())
        return ids

    def close(self) -> None:
        if not self._opener:
            return
        self._stop.set()
        self._thread.join(2 * AGAIN_SECONDS)
        with suppress(StoreError):  # else its lease ends by itself
            self._run("DELETE FROM kvweave_engines WHERE id=%s", self._engine)
        if self._db is not None:
            self._db.close()

    # --- how ---

    def _listen(self, lease: Lease) -> None:
        """Hear what others change, and have them know that this engine lives."""
        while not self._stop.is_set():
            try:
                with self._connected() as db:
                    db.execute(f"LISTEN kvweave_{self.uuid}")
                    self._inbox.append(ALL)  # what was said meanwhile, nobody heard
                    while not self._stop.is_set():
                        db.ends = time.monotonic() + ANSWER_SECONDS
                        renewed = lease.renew(db, self._model, partial(self._is_same, db))
                        if renewed == "lost":  # whoever asks next is told
                            self._went_back = True
                            return
                        if renewed == "anew":
                            self._unsure.set()
                        if self._unsure.is_set():
                            self._hold_again(db)
                        for _ in range(max(1, int(LEASE_SECONDS / 4 / 0.2))):
                            db.ends = time.monotonic() + ANSWER_SECONDS
                            for notice in db.notifies(timeout=0.2):
                                self._hear(notice.payload)
                            if self._stop.is_set():
                                break
            except Exception as error:  # who is not heard of is taken for dead, and its chunks go
                if not isinstance(error, psycopg.Error):
                    log.warning("%s: listening begins anew: %r", self.where, error)
                self._stop.wait(0.5)

    def _hear(self, said: str) -> None:
        engine, _, ids = said.partition(":")
        if engine != str(self._engine) or self._unsure.is_set():
            try:
                self._inbox.extend([ChunkId(int(id)) for id in ids.split(",") if id])
            except ValueError:  # no engine's words
                self._inbox.append(ALL)

    def _hold_again(self, db: psycopg.Connection[Any]) -> None:
        """Hold again what is still there: others took this engine for dead, or a release may have come
        to be that was taken back here."""
        for id, contexts in list(self.held.items()):
            for context in list(contexts):
                db.execute(
                    "INSERT INTO kvweave_holds SELECT %s, id, %s FROM kvweave_chunks WHERE id=%s"
                    " ON CONFLICT DO NOTHING",
                    (self._engine, context, id),
                )

    def _one(self, query: str, *values: object, chunk: int | None = None) -> Any:
        return self._run(query, *values, chunk=chunk).fetchone()

    def _all(self, query: str, *values: object, n_rows: int = 0) -> list[Any]:
        found: list[Any] = self._execute(query, values or None, None, n_rows).fetchall()
        return found

    def _named(self, query: str, **values: object) -> list[Any]:
        cursor = self._execute(query, {**values, "lease": LEASE_SECONDS}, None)
        found: list[Any] = cursor.fetchall() if cursor.description else []
        return found

    def _run(self, query: str, *values: object, chunk: int | None = None) -> Any:
        return self._execute(query, values or None, chunk)

    def _execute(self, query: str, values: Any, chunk: int | None, n_rows: int = 0) -> Any:
        self._opener.require(self.where)
        if self._went_back:
            raise self._put_back()
        ends = time.monotonic() + ANSWER_SECONDS * (1 + n_rows / _SLOWLY)
        for again in (True, False):
            if self._db is None or self._db.closed:
                if self._level:
                    raise self._lost(None)
                self._db = self._connected_again()
            self._db.ends = ends
            try:
                return self._db.execute(query, values)
            except errors.ForeignKeyViolation as error:
                raise ChunkNotFound(f"#{chunk}") from error
            except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
                raise StoreError(
                    f"another engine is changing the same in {self.where}", hint="try again"
                ) from error
            except psycopg.Error as error:
                # Outside of a transaction a statement may be said again.
                late = time.monotonic() > ends
                if late or not (again and self._db.closed and not self._level):
                    self._failed = time.monotonic() if late else self._failed
                    raise self._lost(error) from error
        raise AssertionError

    def _lost(self, error: Exception | None) -> StoreError:
        reason = " ".join(str(error or "the connection was lost").split())
        hint = "is the server running, and the address right? nothing was changed; try again then"
        return StoreError(f"the index {self.where} does not answer: {reason}", hint=hint)

    def _put_back(self) -> StoreError:
        self._went_back = True
        self._stop.set()  # the number of this engine may be another's by now
        if self._db is not None:
            self._db.close()  # nothing of what was begun stays, nor its locks
        hint = "nothing was changed; close this engine and start it anew"
        return StoreError(f"the index {self.where} was put back to an earlier time", hint=hint)

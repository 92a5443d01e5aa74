"""The rows of an index in SQLite: in a file, or in memory only."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from kvweave.chunk.check import check_rows, is_good_chunk
from kvweave.chunk.file import IndexFile
from kvweave.chunk.format import damaged, name_sum, row_sum, tokens_sum
from kvweave.chunk.guard import as_ours
from kvweave.chunk.identity import KINDS, TIERS, ChunkId
from kvweave.chunk.levels import Holders
from kvweave.chunk.rebuild import create, set_meta
from kvweave.chunk.record import Record, from_row, to_row
from kvweave.chunk.rows import ALL, ChunkFacts, GroupSize
from kvweave.errors import InvalidArgument, StoreError

TOGETHER = 500
"""IndexRows of one statement, and of one step of a pass over all."""

_CHUNK = (
    "SELECT c.*, (SELECT group_concat(n.name || char(10) || n.sum, char(10)) FROM names n"
    " WHERE n.id=c.id) FROM chunks c WHERE c.id"
)
_UNKEPT = (
    "SELECT id FROM chunks c WHERE NOT pinned AND NOT EXISTS(SELECT 1 FROM names n WHERE n.id=c.id)"
    " AND NOT EXISTS(SELECT 1 FROM chunks o WHERE o.base=c.id) AND c.id"
)
_CHANGE = (
    "UPDATE chunks SET deps=?, tier=?, n_bytes=?, pinned=?, last_used=?, n_uses=?, sum=? WHERE id=?"
)
_MARKS = ",".join("?" * 14)


class SqliteRows:
    """The rows of `kvweave.chunk.file`; without a path, of nothing that lasts. See `IndexRows`."""

    is_shared = False
    was: tuple[str, ...] = ()

    def __init__(self, path: Path | None, *, busy_timeout: float = 5.0) -> None:
        """Raises what `IndexFile` raises."""
        self._file = None if path is None else IndexFile(path, busy_timeout=busy_timeout)
        self._path = path or Path("memory")
        self.where = str(self._path)
        self._level, self._closed, self._kept_next_id = 0, False, 0
        self.held: Holders = {}
        self._memory: sqlite3.Connection | None = None
        if self._file is None:
            self.uuid = uuid4().hex
            self._memory = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            create(self._memory, self.uuid)
            self._next_id = 1
            return
        self.uuid, self.was = self._file.uuid, self._file.was
        try:
            with as_ours(self._file.path):
                self._kept_next_id = self._file.next_id
                """Below which the file knows by itself that ids were given."""
                highest = self._one("SELECT max(id) FROM chunks")[0] or 0
            self._next_id = max(self._kept_next_id, highest + 1)
        except BaseException:
            self._file.close()
            raise

    @property
    def db(self) -> sqlite3.Connection:
        """The connection."""
        if self._closed:
            raise InvalidArgument("index", "it is closed", "open it again")
        return self._file.db if self._memory is None else self._memory  # type: ignore[union-attr]

    # --- transactions ---

    def open(self, level: int) -> None:
        if self._level:
            self._require_open()  # a savepoint outside of a transaction would be one of its own
        while self._level < level:
            self._do("BEGIN IMMEDIATE" if self._level == 0 else f"SAVEPOINT s{self._level + 1}")
            self._level += 1
            if self._level == 1 and self._file is not None:
                self._guarded(self._file.write)

    def release(self, level: int) -> None:
        if self._level >= level:
            self._require_open()
            self._do(f"RELEASE s{level}")
            self._level = level - 1

    def rollback(self, level: int) -> None:
        if self._level < level:
            return
        self._level = level - 1
        if self._is_open:  # a full disk has SQLite roll back by itself, and what came too late is
            if level == 1:
                self._do("ROLLBACK")
            else:
                self._do(f"ROLLBACK TO s{level}")
                self._do(f"RELEASE s{level}")

    def commit(self, n_freed: int) -> None:
        if not self._level:
            return
        self._require_open()
        next_id = self._next_id if n_freed and self._file is not None else 0
        # The highest rows may be gone: then the file must say itself which ids were given.
        if self._kept_next_id < next_id:
            self._make(lambda db: set_meta(db, "next_id", next_id))
        if self._file is None:
            self._do("COMMIT")
        else:
            self._guarded(self._file.commit)
        self._level, self._kept_next_id = 0, max(next_id, self._kept_next_id)

    @property
    def _is_open(self) -> bool:
        where = self._memory if self._file is None else self._file
        return where is not None and where.in_transaction

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreError(f"{self.where} took back what was written", hint="try again")

    def changed(self) -> Iterable[ChunkId]:
        if self._file is None or not self._file.is_stale:
            return ()
        self._file.is_stale = False
        return (ALL,)

    # --- reading ---

    def count(self) -> int:
        return int(self._one("SELECT count(*) FROM chunks")[0])

    def chunk(self, id: ChunkId) -> Record | None:
        row = self._one(f"{_CHUNK}=?", id)
        return None if row is None else self._record(row)

    def fresh(self, record: Record) -> bool:
        return True

    def share(self, id: ChunkId) -> bool:
        return True

    def by_digest(self, digest: bytes) -> ChunkId | None:
        row = self._one("SELECT id FROM chunks WHERE digest=?", digest)
        return None if row is None else row[0]

    def records(self, ids: Sequence[ChunkId]) -> Iterator[Record]:
        return map(self._record, self._in(_CHUNK, ids))

    def named(self, namespace: str, names: Sequence[str]) -> dict[str, ChunkId]:
        query, found = "SELECT name, id, sum FROM names WHERE namespace=? AND name", {}
        for name, id, wanted in self._in(query, names, namespace):
            if name_sum(namespace, name, id) != wanted:
                raise damaged(self._path, f"the name {name!r} of #{id}")
            found[name] = ChunkId(id)
        return found

    def tokens(self, id: ChunkId, n_tokens: int) -> bytes:
        row = self._one("SELECT sum, ids FROM tokens WHERE id=?", id)
        if row is None:
            raise damaged(self._path, f"the tokens of #{id} are missing")
        good = isinstance(row[1], bytes) and len(row[1]) == 4 * n_tokens
        if not good or tokens_sum(id, row[1]) != row[0]:
            raise damaged(self._path, f"the checksum of the tokens of #{id} differs")
        return bytes(row[1])

    def chunks(self) -> Iterator[Record]:
        last = 0
        while rows := self._all(f"{_CHUNK}>? ORDER BY c.id LIMIT {TOGETHER}", last):
            yield from map(self._record, rows)
            last = rows[-1][0]

    def facts(self) -> Iterator[ChunkFacts]:
        last = 0
        query = "SELECT id, digest, n_bytes, tier FROM chunks WHERE id>? ORDER BY id LIMIT 10000"
        while rows := self._all(query, last):
            for id, digest, n_bytes, tier in rows:
                yield ChunkFacts(id, digest, n_bytes, TIERS[tier])
            last = rows[-1][0]

    def sizes(self, namespace: str, but: Sequence[ChunkId]) -> list[GroupSize]:
        query = (
            "SELECT kind, tier, count(*), sum(n_tokens), sum(n_bytes) FROM chunks WHERE namespace=?"
            " AND id NOT IN (SELECT value FROM json_each(?)) GROUP BY kind, tier"
        )
        return [
            GroupSize(KINDS[kind], TIERS[tier], *rest)
            for kind, tier, *rest in self._all(query, namespace, json.dumps(list(but)))
        ]

    def digests(self) -> Iterator[bytes]:
        # One statement: nothing of this connection comes in between.
        return iter([row[0] for row in self._all("SELECT digest FROM chunks")])

    def known(self, digests: Sequence[bytes]) -> dict[bytes, ChunkId]:
        return dict(self._in("SELECT digest, id FROM chunks WHERE digest", digests))

    def names(self, namespace: str, prefix: str) -> list[str]:
        query, values = "SELECT name FROM names WHERE namespace=?", [namespace]
        if prefix:  # names end before the last character there is
            query += " AND name>=? AND name<=?"
            values += [prefix, prefix + chr(0x10FFFF)]
        return [row[0] for row in self._all(query, *values)]

    def newest_names(self, namespace: str, n: int) -> list[str]:
        query = "SELECT namespace, name FROM names INDEXED BY names_id ORDER BY id DESC LIMIT ?"
        return [name for space, name in self._all(query, n) if space == namespace]

    def namespaces(self) -> list[str]:
        return sorted(row[0] for row in self._all("SELECT DISTINCT namespace FROM chunks"))

    def children(self, ids: Sequence[ChunkId]) -> dict[ChunkId, int]:
        query = "SELECT base, count(*) FROM chunks WHERE base"
        return dict(self._in(query, ids, end="GROUP BY base"))

    def unkept(self) -> list[ChunkId]:
        return [row[0] for row in self._all(f"{_UNKEPT} > 0 ORDER BY id")]

    def is_kept(self, id: ChunkId) -> bool:
        return self._one(f"{_UNKEPT} = ?", id) is None

    def contexts(self, ids: Sequence[ChunkId]) -> dict[ChunkId, list[str]]:
        return {}

    # --- writing ---

    def add(self, record: Record, data: bytes) -> ChunkId | None:
        record.id = ChunkId(self._next_id)
        self._next_id += 1
        row = to_row(record)
        self._do(f"INSERT INTO chunks VALUES({_MARKS})", *row, row_sum(row))
        self._do("INSERT INTO tokens VALUES(?,?,?)", record.id, tokens_sum(record.id, data), data)
        return record.id

    def change(self, record: Record) -> None:
        row = to_row(record)
        self._do(_CHANGE, *row[6:10], *row[11:], row_sum(row), record.id)

    def change_facts(self, records: Iterable[tuple[Record, int]]) -> None:
        for record, _ in sorted(records, key=lambda item: item[0].id):
            self.change(record)

    def forget(self, id: ChunkId) -> None:
        """Do nothing: no id of this file is given twice while it is open."""

    def drop(self, id: ChunkId) -> bool:
        self._do("DELETE FROM chunks WHERE id=?", id)
        self._do("DELETE FROM tokens WHERE id=?", id)
        return True

    def bind(self, namespace: str, name: str, id: ChunkId) -> bool:
        row = (namespace, name, id)
        self._do("INSERT INTO names VALUES(?,?,?,?)", *row, name_sum(*row))
        return True

    def unbind(self, namespace: str, name: str) -> bool:
        self._do("DELETE FROM names WHERE namespace=? AND name=?", namespace, name)
        return True

    def claim(self, model: str) -> None:
        """Do nothing: no other engine has it open."""

    def hold(self, id: ChunkId, context: str, n: int) -> None:
        """Do nothing: what this process holds, its Table knows."""

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def check(self) -> None:
        self._make(lambda db: check_rows(db, self._path))

    def close(self) -> None:
        if self._file is None:
            self._make(lambda db: db.close())
            self._closed = True
            return
        try:
            if self._kept_next_id < self._next_id:
                highest = self._one("SELECT max(id) FROM chunks")[0] or 0
                if highest + 1 < self._next_id:  # the last ones were given to nobody
                    self.open(1)
                    self.commit(1)
        finally:
            self._closed = True
            self._file.close()

    # --- how ---

    def _record(self, row: tuple[Any, ...]) -> Record:
        if not is_good_chunk(row):
            raise damaged(self._path, f"a chunk's row, #{row[0]}")
        names: list[str] = []
        parts = row[14].split("\n") if row[14] else ()
        for name, wanted in zip(parts[::2], parts[1::2], strict=True):
            if str(name_sum(row[4], name, row[0])) != wanted:
                raise damaged(self._path, f"the name {name!r} of #{row[0]}")
            names.append(name)
        return from_row(row[:13], tuple(sorted(names)))

    def _in(
        self, query: str, values: Sequence[object], *before: object, end: str = ""
    ) -> Iterator[Any]:
        for at in range(0, len(values), TOGETHER):
            part = values[at : at + TOGETHER]
            marks = ",".join("?" * len(part))
            yield from self._all(f"{query} IN ({marks}) {end}", *before, *part)

    def _one(self, query: str, *values: object) -> Any:
        return self._make(lambda db: db.execute(query, values).fetchone())

    def _all(self, query: str, *values: object) -> list[Any]:
        found: list[Any] = self._make(lambda db: db.execute(query, values).fetchall())
        return found

    def _do(self, statement: str, *values: object) -> None:
        self._make(lambda db: db.execute(statement, values) and None)

    def _make(self, call: Callable[[sqlite3.Connection], Any]) -> Any:
        try:
            return call(self.db) if self._file is None or self._closed else self._file.do(call)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._refuse(error)

    def _guarded(self, call: Callable[[], object]) -> None:
        with as_ours(self._path):
            call()

    def _refuse(self, error: Exception) -> NoReturn:
        with as_ours(self._path):
            raise error
        raise AssertionError

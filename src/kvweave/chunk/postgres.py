"""The rows of an index in PostgreSQL, which several engines on several machines share.

::

    kvweave_chunks(id, digest unique, ...)  kvweave_names(namespace, name -> id)
    kvweave_engines(id, seen)    one for each engine that has it open; a lease
    kvweave_holds(engine, id, context)    what its contexts hold; worth nothing when the lease is over

The server's constraints decide races: a digest and a name are unique, and a chunk cannot be deleted
that a name, a chunk or a hold refers to. Tier, size and deps are each engine's own and stay here.
A commit tells the other engines (NOTIFY) which chunks changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from kvweave.chunk.identity import KINDS, TIERS, ChunkId, TierName
from kvweave.chunk.link import ALIVE, Link
from kvweave.chunk.record import KIND_CODE, Record
from kvweave.chunk.rows import ChunkFacts, GroupSize, size_of
from kvweave.errors import ChunkNotFound, CorruptChunk

_STEP = 2000
_CHUNK = (
    "SELECT c.id, c.digest, c.n_tokens, c.kind, c.namespace, c.base, c.pinned, c.created,"
    " c.last_used, c.n_uses, ARRAY(SELECT name FROM kvweave_names n WHERE n.id=c.id ORDER BY name)"
    " FROM kvweave_chunks c WHERE c.id"
)
_UNKEPT = f"""SELECT c.id FROM kvweave_chunks c WHERE NOT pinned
    AND NOT EXISTS(SELECT 1 FROM kvweave_names n WHERE n.id=c.id)
    AND NOT EXISTS(SELECT 1 FROM kvweave_chunks o WHERE o.base=c.id)
    AND NOT EXISTS(SELECT 1 FROM kvweave_holds h JOIN kvweave_engines e ON e.id=h.engine
        WHERE h.id=c.id AND {ALIVE})"""
_MASK = (1 << 63) - 1


def tokens_sum(digest: bytes, data: bytes) -> int:
    """Return the checksum of a chunk's tokens."""
    return xxh3_64_intdigest(data, int.from_bytes(digest[:8])) & _MASK


class PostgresRows(Link):
    """See `IndexRows`."""

    def __init__(self, url: str, *, lock_timeout: float = 5.0) -> None:
        """Raises what `Link` raises."""
        super().__init__(url, lock_timeout=lock_timeout)
        self._facts: dict[ChunkId, tuple[TierName, int, tuple[ChunkId, ...]]] = {}

    # --- reading ---

    def count(self) -> int:
        return int(self._one("SELECT count(*) FROM kvweave_chunks")[0])

    def chunk(self, id: ChunkId) -> Record | None:
        row = self._one(f"{_CHUNK}=%s", id)
        return None if row is None else self._record(row)

    def fresh(self, record: Record) -> bool:
        row = self._one(f"{_CHUNK}=%s FOR NO KEY UPDATE OF c", record.id)
        if row is None:
            return False
        self.still(record.id, bytes(row[1]))
        record.pinned, record.names = row[6], tuple(row[10])
        return True

    def share(self, id: ChunkId) -> bool:
        row = self._one("SELECT digest FROM kvweave_chunks WHERE id=%s FOR KEY SHARE", id)
        return row is not None and self.still(id, bytes(row[0])) == id

    def by_digest(self, digest: bytes) -> ChunkId | None:
        row = self._one("SELECT id FROM kvweave_chunks WHERE digest=%s", digest)
        return None if row is None else self.still(row[0], digest)

    def records(self, ids: Sequence[ChunkId]) -> Iterator[Record]:
        return map(self._record, self._all(f"{_CHUNK}=ANY(%s)", list(ids)))

    def named(self, namespace: str, names: Sequence[str]) -> dict[str, ChunkId]:
        query = (
            "SELECT n.name, n.id, c.digest FROM kvweave_names n JOIN kvweave_chunks c ON c.id=n.id"
            " WHERE n.namespace=%s AND n.name=ANY(%s)"
        )
        found = self._all(query, namespace, list(names))
        return {name: self.still(id, bytes(digest)) for name, id, digest in found}

    def tokens(self, id: ChunkId, n_tokens: int) -> bytes:
        row = self._one("SELECT digest, sum, tokens FROM kvweave_chunks WHERE id=%s", id)
        if row is None:
            raise ChunkNotFound(f"#{id}")
        data = bytes(row[2])
        self.still(id, bytes(row[0]))
        if len(data) != 4 * n_tokens or tokens_sum(bytes(row[0]), data) != row[1]:
            raise CorruptChunk(self.where, f"the checksum of the tokens of #{id} differs")
        return data

    def chunks(self) -> Iterator[Record]:
        last = 0
        while rows := self._all(f"{_CHUNK}>%s ORDER BY c.id LIMIT {_STEP}", last):
            yield from map(self._record, rows)
            last = rows[-1][0]

    def facts(self) -> Iterator[ChunkFacts]:
        last = 0
        query = f"SELECT id, digest FROM kvweave_chunks WHERE id>%s ORDER BY id LIMIT {_STEP}"
        while rows := self._all(query, last):
            for id, digest in rows:
                tier, n_bytes, _ = self._facts.get(id, (TIERS[-1], 0, ()))
                yield ChunkFacts(id, digest, n_bytes, tier)
            last = rows[-1][0]

    def sizes(self, namespace: str, but: Sequence[ChunkId]) -> list[GroupSize]:
        return [size_of(x) for x in self.chunks() if x.namespace == namespace and x.id not in but]

    def digests(self) -> Iterator[bytes]:
        query = "SELECT digest FROM kvweave_chunks"
        return iter([bytes(row[0]) for row in self._all(query, n_rows=self.count())])

    def known(self, digests: Sequence[bytes]) -> dict[bytes, ChunkId]:
        query = "SELECT digest, id FROM kvweave_chunks WHERE digest=ANY(%s)"
        found = [(bytes(digest), id) for digest, id in self._all(query, list(digests))]
        return {digest: self.still(id, digest) for digest, id in found}

    def names(self, namespace: str, prefix: str) -> list[str]:
        query = (
            "SELECT name FROM kvweave_names WHERE namespace=%s AND starts_with(name, %s) ORDER BY 1"
        )
        return [row[0] for row in self._all(query, namespace, prefix)]

    def newest_names(self, namespace: str, n: int) -> list[str]:
        query = "SELECT name FROM kvweave_names WHERE namespace=%s ORDER BY id DESC LIMIT %s"
        return [row[0] for row in self._all(query, namespace, n)]

    def namespaces(self) -> list[str]:
        return sorted(row[0] for row in self._all("SELECT DISTINCT namespace FROM kvweave_chunks"))

    def children(self, ids: Sequence[ChunkId]) -> dict[ChunkId, int]:
        query = "SELECT base, count(*) FROM kvweave_chunks WHERE base=ANY(%s) GROUP BY base"
        return dict(self._all(query, list(ids)))

    def unkept(self) -> list[ChunkId]:
        # What another engine just added has no name yet.
        query = (
            f"{_UNKEPT} AND NOT EXISTS(SELECT 1 FROM kvweave_engines e WHERE e.id=c.maker"
            f" AND e.id<>%(mine)s AND {ALIVE}) ORDER BY c.id"
        )
        return [row[0] for row in self._named(query, mine=self._engine)]

    def is_kept(self, id: ChunkId) -> bool:
        return not self._named(f"{_UNKEPT} AND c.id=%(id)s", id=id)

    def contexts(self, ids: Sequence[ChunkId]) -> dict[ChunkId, list[str]]:
        query = (
            "SELECT DISTINCT h.id, h.context FROM kvweave_holds h JOIN kvweave_engines e ON"
            f" e.id=h.engine WHERE h.id=ANY(%(ids)s) AND e.id<>%(mine)s AND {ALIVE} ORDER BY 1, 2"
        )
        found: dict[ChunkId, list[str]] = {}
        for id, context in self._named(query, ids=list(ids), mine=self._engine):
            found.setdefault(id, []).append(context)
        return found

    # --- writing ---

    def add(self, record: Record, data: bytes) -> ChunkId | None:
        query = (
            "INSERT INTO kvweave_chunks(digest, n_tokens, kind, namespace, base, pinned, created,"
            " last_used, n_uses, maker, sum, tokens) VALUES(%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s)"
            " ON CONFLICT DO NOTHING RETURNING id"
        )
        row = self._one(
            query, record.digest, record.n_tokens, KIND_CODE[record.kind], record.namespace,
            record.base, record.pinned, record.created, record.last_used, record.n_uses,
            self._engine, tokens_sum(record.digest, data), data, chunk=record.base,
        )  # fmt: skip
        if row is None:
            return None
        record.id = self.later(ChunkId(row[0]))
        self.meet(record.id, record.digest)
        self._facts[record.id] = (record.tier, record.n_bytes, record.deps)
        self._changed.add(record.id)
        return record.id

    def change(self, record: Record) -> None:
        self._run("UPDATE kvweave_chunks SET pinned=%s WHERE id=%s", record.pinned, record.id)
        self._changed.add(record.id)

    def change_facts(self, records: Iterable[tuple[Record, int]]) -> None:
        for record, n in sorted(records, key=lambda item: item[0].id):
            self._facts[record.id] = (record.tier, record.n_bytes, record.deps)
            if n:
                self._run(
                    "UPDATE kvweave_chunks SET n_uses=n_uses+%s, last_used=%s WHERE id=%s",
                    n, record.last_used, record.id,
                )  # fmt: skip

    def drop(self, id: ChunkId) -> bool:
        self._run("SAVEPOINT drop")
        try:
            self._named(
                "DELETE FROM kvweave_holds h USING kvweave_engines e"
                f" WHERE h.id=%(id)s AND e.id=h.engine AND NOT {ALIVE}",
                id=id,
            )
            query = "DELETE FROM kvweave_chunks WHERE id=%s AND NOT pinned AND digest=coalesce(%s, digest)"
            n = self._run(query, id, self.met.get(id)).rowcount
        except ChunkNotFound:  # something refers to it since
            n = 0
            self._run("ROLLBACK TO SAVEPOINT drop")
        self._run("RELEASE SAVEPOINT drop")
        if n:
            self._changed.add(id)
        return bool(n)

    def bind(self, namespace: str, name: str, id: ChunkId) -> bool:
        query = "INSERT INTO kvweave_names VALUES(%s,%s,%s) ON CONFLICT DO NOTHING RETURNING id"
        if self._one(query, namespace, name, id, chunk=id) is None:
            return False
        self._changed.add(id)
        return True

    def unbind(self, namespace: str, name: str) -> bool:
        query = "DELETE FROM kvweave_names WHERE namespace=%s AND name=%s RETURNING id"
        row = self._one(query, namespace, name)
        if row is not None:
            self._changed.add(row[0])
        return row is not None

    def hold(self, id: ChunkId, context: str, n: int) -> None:
        if n:
            query = "INSERT INTO kvweave_holds VALUES(%s,%s,%s) ON CONFLICT DO NOTHING"
            self._run(query, self._engine, id, context, chunk=id)
        else:
            query = "DELETE FROM kvweave_holds WHERE engine=%s AND id=%s AND context=%s"
            self._run(query, self._engine, id, context)

    def forget(self, id: ChunkId) -> None:
        super().forget(id)
        self._facts.pop(id, None)

    def sync(self) -> None:
        """Do nothing: the server syncs what it commits."""

    def check(self) -> None:
        last, query = 0, "SELECT id, digest, n_tokens, sum, tokens FROM kvweave_chunks WHERE id>%s"
        while rows := self._all(f"{query} ORDER BY id LIMIT {_STEP}", last):
            for id, digest, n, total, data in rows:
                if len(data) != 4 * n or tokens_sum(bytes(digest), bytes(data)) != total:
                    raise CorruptChunk(self.where, f"the checksum of the tokens of #{id} differs")
            last = rows[-1][0]

    # --- how ---

    def _record(self, row: tuple[Any, ...]) -> Record:
        id, digest, n_tokens, kind, namespace, base, pinned, created, last_used, n_uses, names = row
        self.meet(id, bytes(digest))
        tier, n_bytes, deps = self._facts.get(id, (TIERS[-1], 0, ()))
        return Record(
            id, bytes(digest), n_tokens, KINDS[kind], namespace, base, deps, tier, n_bytes, pinned,
            created, last_used, n_uses, tuple(names),
        )  # fmt: skip

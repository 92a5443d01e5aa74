"""What a Table asks of the database that keeps its rows; SQLite and PostgreSQL answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.levels import Holders
from kvweave.chunk.record import Record

ALL = ChunkId(-1)
"""Stands for every chunk, where it is not known which ones changed."""


class ChunkFacts(NamedTuple):
    """What tiers ask about each chunk when they start."""

    id: ChunkId
    digest: bytes
    n_bytes: int
    tier: str


class GroupSize(NamedTuple):
    """What the chunks of one kind on one tier take."""

    kind: str
    tier: str
    n: int
    n_tokens: int
    n_bytes: int


def size_of(record: Record) -> GroupSize:
    """Return what one chunk takes."""
    return GroupSize(record.kind, record.tier, 1, record.n_tokens, record.n_bytes)


UNSURE = "whether it was written nobody knows"
"""How the hint of an error begins behind which a commit may have come to be."""


class IndexRows(Protocol):
    """The rows of one index. All methods raise StoreError; after an error that was no refusal of one
    row, the transaction can only be rolled back.

    Transactions are levels, the outermost is 1: ``open`` begins what is not begun, the others do
    nothing for a level that nothing was written in.
    """

    uuid: str
    was: tuple[str, ...]
    """The uuids of those that it is a copy of."""
    where: str
    """What messages call it."""
    is_shared: bool
    """Whether other engines may change it meanwhile."""
    held: Holders
    """What contexts of this engine hold; the Table's own."""

    def claim(self, model: str) -> None:
        """Say whose tokens are written from now on. Raises ModelMismatch where an engine of another
        model has it open."""

    def open(self, level: int) -> None:
        """Begin the transactions up to ``level`` that are not begun."""

    def release(self, level: int) -> None:
        """Join a transaction to the one around it."""

    def rollback(self, level: int) -> None:
        """Take back what was written since ``level`` began."""

    def commit(self, n_freed: int) -> None:
        """Write all for good, of which ``n_freed`` chunks are gone."""

    def changed(self) -> Iterable[ChunkId]:
        """Return chunks that others changed since the last call; or ALL."""

    def count(self) -> int:
        """Return how many chunks there are."""

    def chunk(self, id: ChunkId) -> Record | None:
        """Return the record of a chunk, or None."""

    def fresh(self, record: Record) -> bool:
        """Bring a record up to date before it is changed, and keep others from it until the end of the
        transaction; False when it is gone."""

    def share(self, id: ChunkId) -> bool:
        """Keep others from removing a chunk until the end of the transaction; False when it is gone."""

    def by_digest(self, digest: bytes) -> ChunkId | None:
        """Return the chunk with this digest, or None."""

    def records(self, ids: Sequence[ChunkId]) -> Iterator[Record]:
        """Yield the records of those chunks that there are."""

    def named(self, namespace: str, names: Sequence[str]) -> dict[str, ChunkId]:
        """Return the chunks of those ``names`` that there are."""

    def tokens(self, id: ChunkId, n_tokens: int) -> bytes:
        """Return the tokens of a chunk. Raises CorruptChunk."""

    def chunks(self) -> Iterator[Record]:
        """Yield every record, by id."""

    def facts(self) -> Iterator[ChunkFacts]:
        """Yield the facts of every chunk, by id."""

    def sizes(self, namespace: str, but: Sequence[ChunkId]) -> list[GroupSize]:
        """Return what the chunks of a namespace take, but for some of them."""

    def digests(self) -> Iterator[bytes]:
        """Yield every digest as of one moment."""

    def known(self, digests: Sequence[bytes]) -> dict[bytes, ChunkId]:
        """Return the ids of those digests that there are."""

    def names(self, namespace: str, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, sorted."""

    def newest_names(self, namespace: str, n: int) -> list[str]:
        """Return some names of the newest chunks."""

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a chunk, sorted."""

    def children(self, ids: Sequence[ChunkId]) -> dict[ChunkId, int]:
        """Return of how many chunks these are the base, where there are some."""

    def unkept(self) -> list[ChunkId]:
        """Return the chunks without name, pin, child, or holder in another engine."""

    def is_kept(self, id: ChunkId) -> bool:
        """Tell whether a name, a pin, a child or another engine keeps a chunk."""

    def contexts(self, ids: Sequence[ChunkId]) -> dict[ChunkId, list[str]]:
        """Return the contexts of other engines that hold chunks."""

    def add(self, record: Record, data: bytes) -> ChunkId | None:
        """Write a new chunk and return its id; None when somebody else just added this digest."""

    def change(self, record: Record) -> None:
        """Write what changed of a record."""

    def change_facts(self, records: Iterable[tuple[Record, int]]) -> None:
        """Write tier, size, deps and uses, of which so many are new."""

    def forget(self, id: ChunkId) -> None:
        """Note that nothing is remembered of a chunk any more, but by a context that holds it."""

    def drop(self, id: ChunkId) -> bool:
        """Remove a chunk; False when somebody else keeps it."""

    def bind(self, namespace: str, name: str, id: ChunkId) -> bool:
        """Write a name; False when another engine just did."""

    def unbind(self, namespace: str, name: str) -> bool:
        """Remove a name; False when another engine just did."""

    def hold(self, id: ChunkId, context: str, n: int) -> None:
        """Say that a context of this engine holds a chunk ``n`` times."""

    def sync(self) -> None:
        """Wait until all that was committed would survive a power cut."""

    def check(self) -> None:
        """Raise CorruptChunk when anything in it contradicts anything."""

    def close(self) -> None:
        """Let go of the database."""

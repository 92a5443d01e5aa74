"""Whose canonical KV stands for a part: its own chunk's, or that of the same tokens after this base.

::

    #7  docs/faq after base A          context  [base B][docs/faq][...]
    #9  the same tokens after B        placed is #9's KV where there is some, else #7's, approximate

A chunk is of one base: `#9` is another chunk, which no name leads to. It is made while there is time
(`Bases.rebased`) and kept as long as the first one is. KV of one base never counts as another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvweave.chunk.identity import ChunkId, ModelFingerprint, chunk_digest
from kvweave.chunk.record import Record
from kvweave.chunk.table import Table
from kvweave.config import BaseMode
from kvweave.weave.parts import Part

HOLDER = "||base"  # of no namespace: who keeps chunks that were made for other bases
MOST = 4  # bases beside its own that a chunk is computed after


@dataclass(frozen=True, slots=True)
class Standing:
    """Which chunk's canonical KV may stand for a part: its own, unless ``lent`` has its uid; None
    there: none may."""

    lent: Mapping[int, ChunkId | None] = field(default_factory=dict)

    def kv(self, part: Part) -> ChunkId:
        """Return the chunk whose KV it is, if any is placed."""
        return self.lent.get(part.uid) or part.id

    def may(self, part: Part) -> bool:
        """Tell whether canonical KV may be placed at all."""
        return self.lent.get(part.uid, part.id) is not None


OWN = Standing()


class Bases:
    """The chunks of one table by base; ``tier`` tells where canonical KV is."""

    def __init__(
        self, table: Table, tier: Callable[[ChunkId], str], model: ModelFingerprint
    ) -> None:
        self._table, self._tier, self._model = table, tier, model
        self._made: dict[ChunkId, set[ChunkId]] = {}  # for other bases, by the first chunk

    def standing(self, parts: Sequence[Part], mode: BaseMode, *, swaps: bool) -> Standing:
        """Return whose KV stands for parts whose chunks were computed after another base than the
        first part. Without ``swaps`` it is always their own: of rows that are kept beside."""
        lent: dict[int, ChunkId | None] = {}
        for part in parts[1:]:
            record = self._foreign(part, parts[0].id)
            if record is None:
                continue
            twin = self.twin(record, parts[0].id) if swaps else None
            if twin is not None and self._tier(twin) != "none":
                lent[part.uid] = twin
            elif mode == "own":
                lent[part.uid] = None
        return Standing(lent) if lent else OWN

    def twin(self, record: Record, base: ChunkId) -> ChunkId | None:
        """Return the chunk of the same tokens after ``base``, if there is one."""
        digest = self._digest(record, base)
        known = None if digest is None else self._table.find_digest(digest)
        return None if known is None else known.id

    def rebased(self, parts: Sequence[Part]) -> list[ChunkId]:
        """Give the tokens of parts of another base an id after this one; return those that have no
        canonical KV yet, for who has time to compute it."""
        found: list[ChunkId] = []
        for part in parts[1:]:
            record = self._foreign(part, parts[0].id)
            twin = None if record is None else self._made_for(record, parts[0].id)
            if twin is not None and self._tier(twin) == "none":
                found.append(twin)
        return list(dict.fromkeys(found))

    def foreign(self, parts: Sequence[Part]) -> set[int]:
        """Return the chunks of parts that were computed after another base than the first part."""
        return {int(p.id) for p in parts[1:] if self._foreign(p, parts[0].id) is not None}

    def drop(self, id: ChunkId) -> None:
        """Let go of what was made for other bases of a chunk that is gone."""
        for twin in self._made.pop(id, ()):
            self._table.release(twin, HOLDER)

    @contextmanager
    def rebasing(self, contexts: Iterable[Sequence[Part]]) -> Iterator[None]:
        """Do that for all these while their KV is computed; where that fails, let go of what was made
        and got none."""
        there = {id for made in self._made.values() for id in made}
        try:
            for parts in contexts:
                self.rebased(parts)
            yield
        except BaseException:
            for made in self._made.values():
                for twin in [id for id in made - there if self._tier(id) == "none"]:
                    made.discard(twin)
                    self._table.release(twin, HOLDER)
            raise

    def _made_for(self, record: Record, base: ChunkId) -> ChunkId | None:
        digest, made = self._digest(record, base), self._made.setdefault(record.id, set())
        if digest is None or not self._is_base(record, base):
            return None
        known = self._table.find_digest(digest)
        if known is not None and (known.id in made or known.names):
            return known.id
        if len(made) >= MOST:
            return None
        tokens = self._table.tokens(record.id).tolist()
        with self._table.transaction():
            id, _ = self._table.add(
                tokens, digest=digest, kind=record.kind, namespace=record.namespace, base=base
            )
            self._table.hold(id, HOLDER)
        made.add(id)
        return id

    def _is_base(self, record: Record, base: ChunkId) -> bool:
        """Tell whether ``base`` may be one: computed after nothing, for all or for this namespace."""
        below = self._table.get(base)
        return below.base is None and below.namespace in ("", record.namespace)

    def _foreign(self, part: Part, base: ChunkId) -> Record | None:
        """Return the record of a part whose chunk was computed after another base."""
        record = None if part.virtual else self._table.get(part.id)
        return None if record is None or record.base in (None, base) else record

    def _digest(self, record: Record, base: ChunkId) -> bytes | None:
        """Return the digest of a chunk's tokens after ``base``; None for a thinned chunk, whose rows
        are another thing."""
        tokens, space = self._table.tokens(record.id).tolist(), record.namespace
        assert record.base is not None
        own = self._table.get(record.base).digest
        if record.digest != chunk_digest(self._model, own, tokens, space):
            return None
        return chunk_digest(self._model, self._table.get(base).digest, tokens, space)

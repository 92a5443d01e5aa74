"""How much a namespace may store."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.engine import Engine
from kvweave.errors import OverQuota


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of every namespace; None is no bound.

    A chunk counts with the KV of all its tokens, wherever that rests now, and however many names
    it has; chunks that only a context holds count too.
    """

    n_bytes: int | None = None
    n_chunks: int | None = None

    def check(self, engine: Engine, namespace: str, sizes: list[int], replaces: str = "") -> None:
        """Raise OverQuota unless chunks of these sizes (tokens) may be stored.

        ``replaces`` is a name that one of them takes away. Takes one pass over all chunks.
        """
        if self.n_bytes is None and self.n_chunks is None:
            return
        mine = [record for record in engine.table if record.namespace == namespace]
        old = engine.table.lookup(replaces, namespace) if replaces else None
        if old is not None and old.n_names == 1 and not engine.table.contexts_of(old.id):
            mine = [record for record in mine if record.id != old.id]
        if self.n_chunks is not None and len(mine) + len(sizes) > self.n_chunks:
            raise OverQuota("chunks", len(sizes), len(mine), self.n_chunks)
        row = engine.runner.row_bytes
        used, needed = sum(r.n_tokens for r in mine) * row, sum(sizes) * row
        if self.n_bytes is not None and used + needed > self.n_bytes:
            raise OverQuota("bytes of KV", needed, used, self.n_bytes)

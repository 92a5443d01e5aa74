"""What the shelf asks the index about chunks, and what it tells it."""

from __future__ import annotations

import time
from contextlib import suppress

from kvweave.chunk.identity import ChunkId, chunk_digest
from kvweave.chunk.table import Table
from kvweave.errors import CorruptChunk, ModelMismatch
from kvweave.keep.base import Facts
from kvweave.run.base import Backend
from kvweave.store.level import Level
from kvweave.store.mover import LOOKING
from kvweave.store.ram import Stretches
from kvweave.store.record.transfer import Expected
from kvweave.store.shelf import Shelf
from kvweave.weave.thinning import named_by, rows_kept, thinned_by

SECONDS_A_TOKEN = 1e-3  # of prefill; policies compare costs only with each other


class Ties:
    """The index of one shelf, and what the model's rows are like."""

    def __init__(self, table: Table, backend: Backend) -> None:
        self.table, self._backend = table, backend
        self._shapes = tuple(layer.shape for layer in backend.layers)
        self._dtype = backend.dtype

    def bind(self, shelf: Shelf) -> None:
        """Have ``shelf`` tell the index, and ask it for facts."""
        self.shelf = shelf
        shelf.facts, shelf.on_tier, shelf.on_in_context = self._facts, self._tier, self._deps
        shelf.mover.told = self.table.flush

    def about(self, id: int) -> Expected:
        """Return what a chunk's record on a tier must be of."""
        record = self.table.get(ChunkId(id))
        keep, n = thinned_by(self._backend, self.table, record.id), record.n_tokens
        n_rows = None if keep is None else rows_kept(keep, n, self._backend)
        return Expected(record.digest.hex(), n, self._shapes, self._dtype, n_rows)

    def is_pinned(self, id: int) -> bool:
        """Tell whether a chunk must stay."""
        return self.table.get(ChunkId(id)).pinned

    def mend(self, is_partial: bool = False) -> None:
        """After a restart: what was only in memory has no KV now; unnamed chunks are gone.

        An index that ``is_partial`` lost chunks when it was salvaged: their KV stays for now.

        What was said to be on a tier that others use too is believed to be there still. Raises
        ModelMismatch for an index of another model's chunks; then no tier is touched.
        """
        self.table.collect()
        self._require_model()
        known = {fact.digest.hex(): int(fact.id) for fact in self.table.facts()}
        levels = self.shelf.mover.levels
        for level in levels:
            if level.owned:
                level.adopt(known, keep=is_partial)
        shared = {level.place: level for level in reversed(levels) if not level.owned}
        copied: set[Level] = set()
        for record in list(self.table):
            if record.tier in shared and self.shelf.tier(record.id) == "none":
                level = shared[record.tier]
                level.presume(int(record.id), record.digest.hex(), record.n_bytes)
                copied |= {level} if self.table.was else set()
            tier = self.shelf.tier(record.id)
            if record.tier != tier or record.deps:
                size = record.n_bytes if record.tier == tier else 0
                self.table.update(record.id, tier=tier, n_bytes=size, deps=())  # type: ignore[arg-type]
        for level in copied:  # what the other index was told to be durable this one relies on too
            level.records.register(time.monotonic() + LOOKING)

    def _require_model(self) -> None:
        """Raise ModelMismatch unless all engines that have the index open are of this model, and the
        first chunk that was made of tokens is: its digest is of both. A home's ``model.json`` may be
        gone, a shared index has none."""
        self.table.claim(self._backend.fingerprint.digest().hex())
        for record in self.table:
            below = b"" if record.base is None else self.table.get(record.base).digest
            with suppress(CorruptChunk):
                if self.table.is_virtual(record.id):
                    continue
                tokens = self.table.tokens(record.id).tolist()
                mine = self._backend.fingerprint
                whole = chunk_digest(mine, below, tokens, record.namespace)
                if record.digest != whole and named_by(whole, record.digest) is None:
                    said = record.digest.hex()
                    raise ModelMismatch(f"the digest of #{record.id}", whole.hex(), said)
                return

    def _facts(self, id: int) -> Facts:
        record = self.table.get(ChunkId(id))
        return Facts(record.n_tokens * SECONDS_A_TOKEN, record.kind, self.shelf.session)

    def _tier(self, id: int, tier: str, size: int) -> None:
        self.table.happened(ChunkId(id), tier=tier, n_bytes=size)  # type: ignore[arg-type]

    def _deps(self, id: int, seen: Stretches) -> None:
        deps = dict.fromkeys(ChunkId(dep) for dep, *_ in seen)
        self.table.happened(ChunkId(id), deps=tuple(deps))

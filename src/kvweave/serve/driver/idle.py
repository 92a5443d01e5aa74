"""What is computed when there is nothing better to do: canonical KV that the next prune will want."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, KVWeaveError
from kvweave.run.loop import Task
from kvweave.serve.driver.tasks import Tasks
from kvweave.weave.maker import Maker

log = logging.getLogger("kvweave.serve")
TOKENS = 256  # of one batch: what a request may have to wait for


class Idle:
    """Chunks that have no canonical KV yet, the first ones first."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._ids: deque[ChunkId] = deque()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: Iterable[ChunkId]) -> None:
        """Queue chunks; from any thread."""
        self._ids.extend(ids)

    def clear(self) -> None:
        """Forget what waits."""
        self._ids.clear()

    def work(self, beside: Tasks | None) -> None:
        """Compute one small batch, now or beside others; what is gone or does not fit is left."""
        batch, n_tokens = [], 0
        while n_tokens < TOKENS and self._ids:
            id = self._ids.popleft()
            try:
                n_tokens += self._maker.table.get(id).n_tokens
                batch.append(id)
            except ChunkNotFound:
                continue
        if not batch:
            return
        try:
            if beside is None:
                self._maker.canonicalise(batch)
            else:
                beside.begin(self._one_by_one(batch))
        except KVWeaveError as error:
            log.info("no canonical KV for %s chunks: %s", len(batch), error)

    def _one_by_one(self, ids: Sequence[ChunkId]) -> Task[None]:
        for id in ids:
            try:
                yield from self._maker.computing(id)
            except KVWeaveError as error:
                log.info("no canonical KV for #%s: %s", id, error)

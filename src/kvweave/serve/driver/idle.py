"""What is computed when there is nothing better to do: canonical KV that the next prune will want."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, KVWeaveError
from kvweave.run.loop import Task
from kvweave.serve.driver.tasks import Tasks
from kvweave.weave.maker import Maker

log = logging.getLogger("kvweave.serve")
TOKENS = 256  # of one batch


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

    def work(self, tasks: Tasks) -> None:
        """Begin one small batch, in the steps of whoever comes; what is gone or does not fit is left."""
        batch, n_tokens = list[ChunkId](), 0
        while n_tokens < TOKENS and len(batch) < len(self._ids):
            id = self._ids[len(batch)]
            with contextlib.suppress(ChunkNotFound):
                n_tokens += self._maker.table.get(id).n_tokens
            batch.append(id)
        behind = [id for id in batch if self._waits(id)]
        for some in (*([id] for id in batch if id not in behind), behind):
            tasks.begin(self._one_by_one(some))
        for _ in batch:  # now: others count what is here or under way
            self._ids.popleft()

    def _waits(self, id: ChunkId) -> bool:
        """Tell whether the base of a chunk is to be computed first."""
        with contextlib.suppress(ChunkNotFound):
            base = self._maker.table.get(id).base
            return base is not None and self._maker.shelf.tier(base) == "none"
        return False

    def _one_by_one(self, ids: Sequence[ChunkId]) -> Task[None]:
        for id in ids:
            try:
                yield from self._maker.computing(id)
            except KVWeaveError as error:
                log.info("no canonical KV for #%s: %s", id, error)

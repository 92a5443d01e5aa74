"""Looking ahead: what waiting answers will use stays in memory, or comes there while others run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.errors import KVWeaveError
from kvweave.serve.driver.work import AnswerJob

log = logging.getLogger("kvweave.serve")

AHEAD = 4  # waiting answers that are looked at
PART = 4  # a quarter of the memory, at most, is filled for them at a time


class Ahead:
    """Tells the shelf what comes next. Used in the driver's thread only."""

    def __init__(self) -> None:
        self._jobs: list[AnswerJob] = []

    def look(self, engine: Engine, jobs: Sequence[AnswerJob]) -> None:
        """Note ``jobs``, the next to begin first, and begin to load what those seen for the first
        time use. An engine without a level below memory has nothing to load, and is left alone."""
        if not engine.shelf.mover.levels or self._jobs == [*jobs]:
            return
        self._jobs = [*jobs]
        new = [job for job in jobs if job.uses is None]
        for job in new:
            job.uses = _uses(engine, job)
        engine.shelf.upcoming(id for job in jobs for id in job.uses or ())
        try:
            engine.shelf.begin(_away(engine, [id for job in new for id in job.uses or ()]))
        except KVWeaveError as error:  # no room: they are loaded when their turn comes
            log.debug("not brought ahead: %s", error)


def _uses(engine: Engine, job: AnswerJob) -> list[int]:
    """Return the chunks of a request; what is wrong with it is told when its turn comes."""
    try:
        return list(job.wants(engine))
    except Exception as error:
        log.debug("not looked ahead: %s", error)
        return []


def _away(engine: Engine, ids: Sequence[int]) -> Iterator[int]:
    """Yield those that rest below memory, as far as the room for them lasts."""
    room = engine.shelf.budget // PART
    for id in dict.fromkeys(ids):
        if engine.shelf.tier(id) in ("none", engine.shelf.memory):
            continue
        room -= engine.table.get(ChunkId(id)).n_tokens * engine.runner.row_bytes
        if room < 0:
            return
        yield id

"""What the next request of a conversation will edit, edited while nobody waits.

A client that declares a rule sends the whole history each time, and the server edits it by that rule.
So it knows, from the moment its answer is out, what of that history the next request will no longer
want. Of one that edits by itself it may have learned (`kvweave.serve.chat.learned`). This is worked out
step by step, with the code that the request is read with; then the rows are made exact as any
(`kvweave.serve.driver.refining`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvweave.errors import KVWeaveError
from kvweave.serve.driver.fair import FairQueue
from kvweave.serve.reuse.find import Wanted
from kvweave.serve.reuse.pooled import PooledContext

if TYPE_CHECKING:
    from kvweave.serve.reuse.pool import Sessions

log = logging.getLogger("kvweave.serve")
MOST = 16  # of one namespace that may wait
WorkedOut = Generator[None, None, Wanted | None]
WayOn = Callable[[], WorkedOut]


@dataclass(frozen=True, slots=True)
class Anticipation:
    """What may be done ahead for one conversation.

    ``ways`` are those in which it may go on: the likely one first, others that may come as well. Each
    works out, step by step, what a context then begins with; None where nobody can know.
    """

    tenant: str
    session: PooledContext  # what the last answer left
    version: int  # of its context, then
    began: str  # what the conversation began with: of two that did so alike, the later counts
    ways: Sequence[WayOn]
    sure: bool = True  # as long as all ways agree; else only a copy is edited
    rule: str = ""  # what edits, in words


class Anticipating:
    """Does what may be done ahead, one bounded step after the other (`kvweave.serve.driver.work.Rest`).

    A context that holds what is likely is made beside the one there is. Where there is no room for
    two, that one is edited, but only if however the conversation goes on it will be.
    """

    def __init__(self, sessions: Sessions, enabled: bool = True) -> None:
        self.sessions, self.enabled = sessions, enabled
        self.seconds = 0.0
        """In steps; the passes that make rows exact are not of these."""
        self.n_failed = 0
        self._lock = threading.RLock()  # guards the queue
        self._queue: FairQueue[Anticipation] = FairQueue()
        # by namespace and beginning, as long as it waits or is under way
        self._latest: dict[tuple[str, str], Anticipation] = {}
        self._now: Generator[None, None, None] | None = None

    def note(self, anticipation: Anticipation) -> None:
        """Queue one, in the place of what waits for an earlier answer of the conversation; of too
        many of one namespace the oldest goes. From any thread."""
        if not self.enabled:
            return
        tenant = anticipation.tenant
        with self._lock:
            self._latest[tenant, anticipation.began] = anticipation
            while self._queue.count(tenant) >= MOST:
                self._forget(self._queue.take_of(tenant))
            self._queue.put(tenant, anticipation)

    def _forget(self, given: Anticipation) -> None:
        if self._is_latest(given):
            del self._latest[given.tenant, given.began]

    def _is_latest(self, given: Anticipation) -> bool:
        return self._latest.get((given.tenant, given.began)) is given

    def is_due(self) -> bool:
        """Tell whether there may be something to do."""
        return self._now is not None or bool(self._queue)

    def rest(self) -> None:
        """Do one step. What goes wrong is noted without what it was about, and left."""
        started = time.perf_counter()
        work, self._now = self._now, None
        with self.guarded():
            if work is None:
                with self._lock:
                    work = self._counted(self._queue.take())
            try:
                next(work)
                self._now = work
            except StopIteration:
                pass
        self.seconds += time.perf_counter() - started

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Note what goes wrong inside: nobody waits for it, and the contexts are as they were."""
        try:
            yield
        except Exception as error:
            self.n_failed += 1
            level = logging.INFO if isinstance(error, KVWeaveError) else logging.ERROR
            log.log(level, "nothing was edited ahead: %s", type(error).__name__)

    def _counted(self, given: Anticipation) -> Generator[None, None, None]:
        try:
            yield from self._steps(given)
        finally:
            with self._lock:
                self._forget(given)

    def _steps(self, given: Anticipation) -> Generator[None, None, None]:
        session, ahead, ways = given.session, self.sessions.ahead, given.ways

        def is_there() -> bool:
            return self._is_latest(given) and ahead.is_there(session, given.version)

        if not is_there():
            return
        wanted = yield from ways[0]()
        if wanted is None or not is_there() or not ahead.changes(session, wanted):
            return
        yield
        beside = ahead.has_room(session)
        if not (beside or given.sure):
            return
        for way in ways[1:] if not beside else ():
            other = yield from way()
            if other is None or not np.array_equal(other.tokens(), wanted.tokens()):
                return
            yield
        if is_there() and ahead.has_room(session) >= beside:
            ahead.edit(session, wanted, beside=beside, rule=given.rule)

"""What crosses between asyncio and the driver's thread: events one way, calls and jobs the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvweave.engine import Engine
from kvweave.run.loop import Task
from kvweave.run.sample import Choice
from kvweave.weave.answer import Answer
from kvweave.weave.turn import Turn

log = logging.getLogger("kvweave.serve")


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to an answer."""

    index: int  # of the turn
    text: str  # may be empty: a token can be part of a character
    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Finished:
    """A turn ended; no more deltas of it come."""

    index: int
    answer: Answer


Event = Delta | Finished
Begin = Callable[[Engine], Sequence[Turn] | Task[Sequence[Turn]]]
Done = Callable[[Engine, list[Answer]], None]
Wants = Callable[[Engine], Iterable[int]]


def nothing(engine: Engine, answers: list[Answer]) -> None:
    """Do nothing when an answer ends."""


def unknown(engine: Engine) -> Iterable[int]:
    """Tell of no chunks that an answer will use."""
    return ()


def abandon(turn: Turn) -> None:
    """Let a turn go, and its context as far as that can be put back."""
    try:
        turn.abandon()
    except Exception:
        log.exception("a context could not be put back")


class Rest(Protocol):
    """What may be done while nobody asks, one bounded step after the other."""

    def is_due(self) -> bool:
        """Tell whether there may be something."""
        ...

    def rest(self) -> Task[None] | None:
        """Do one step, or return it."""
        ...


class Sink:
    """Hands objects to the event loop that waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    def put(self, item: Event | BaseException | None) -> None:
        """Hand over an event, an error to raise, or None for the end."""
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            log.debug("an event loop ended before its answer")


class TaskWaiter(Protocol):
    """Who waits for a task."""

    @property
    def urgent(self) -> bool:
        """Whether what it waits for is an answer."""
        ...

    @property
    def given_up(self) -> bool:
        """Whether nobody does any more."""
        ...

    def tell(self, error: Exception | None, result: Any = None) -> None:
        """Take what came of it."""
        ...

    def closed(self) -> None:
        """It was given up, and is closed."""
        ...


@dataclass(eq=False, slots=True)
class DriverCall:
    """Work to be run once between two steps, and who waits for its result."""

    work: Callable[[Engine], Any]
    future: asyncio.Future[Any]
    urgent: bool = False

    @property
    def given_up(self) -> bool:
        """Whether whoever called was cancelled."""
        return self.future.cancelled()

    def closed(self) -> None:
        """Nobody has to be told."""

    def tell(self, error: Exception | None, result: object = None) -> None:
        """Settle the future, unless nobody waits for it any more."""

        def settle() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        try:
            self.future.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:
            log.debug("an event loop ended before its call")


@dataclass(eq=False, slots=True)
class AnswerJob:
    """One answer of one or more turns."""

    tenant: str
    begin: Begin
    done: Done
    sink: Sink
    wants: Wants = unknown
    uses: list[int] | None = None  # the chunks it will use, once that was looked at
    cancelled: bool = False
    begun: bool = False  # its turns are there
    asked: float = field(default_factory=time.monotonic)
    waited: float = 0.0  # seconds in the queue
    turns: list[Turn] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Beginning:
    """An answer whose beginning takes passes of the model."""

    job: AnswerJob
    begun: Callable[[AnswerJob, Exception | None, Sequence[Turn]], None]
    gone: Callable[[AnswerJob], None]
    urgent: bool = True

    @property
    def given_up(self) -> bool:
        """Whether its reader has gone."""
        return self.job.cancelled

    def tell(self, error: Exception | None, result: Any = None) -> None:
        """Go on with its turns, or with what it failed of."""
        self.begun(self.job, error, result or ())

    def closed(self) -> None:
        """Let the answer go."""
        self.gone(self.job)

"""What crosses between asyncio and the driver's thread: events one way, calls and jobs the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvweave.engine import Engine
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
Begin = Callable[[Engine], Sequence[Turn]]
Done = Callable[[Engine, list[Answer]], None]
Wants = Callable[[Engine], Iterable[int]]


def nothing(engine: Engine, answers: list[Answer]) -> None:
    """Do nothing when an answer ends."""


def unknown(engine: Engine) -> Iterable[int]:
    """Tell of no chunks that an answer will use."""
    return ()


class Rest(Protocol):
    """What may be done while nobody asks, one bounded step after the other."""

    def is_due(self) -> bool:
        """Tell whether there may be something."""
        ...

    def rest(self) -> None:
        """Do one step."""
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


@dataclass(eq=False, slots=True)
class DriverCall:
    """Work to be run once between two steps, and who waits for its result."""

    work: Callable[[Engine], Any]
    future: asyncio.Future[Any]

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
    asked: float = field(default_factory=time.monotonic)
    waited: float = 0.0  # seconds in the queue
    turns: list[Turn] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)

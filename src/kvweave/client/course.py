"""A verb without its transport: a course of orders, each of which is answered with what came of it.

A generator yields what is to be sent. A wire (`kvweave.client.wires`) carries it out, one that blocks
or one that is awaited, so each verb is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvweave.errors import Unreachable

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Course = Generator["Order", Any, T]
# what it takes to read an answer that is JSON, and not of those words
OTHER_WORDS = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


class Order:
    """What a verb asks its wire to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send(Order):
    """Send a request; the `httpx.Response` comes back. With ``open`` its body is yet to be read."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True, slots=True)
class Read(Order):
    """Read some more of what was opened: bytes, none at the end."""


@dataclass(frozen=True, slots=True)
class Emit(Order):
    """Hand text to who reads the stream."""

    text: str


@dataclass(frozen=True, slots=True)
class Pause(Order):
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class AtOnce(Order):
    """Go several courses at the same time; their results come back, in order. One that fails stops
    the others."""

    several: Sequence[Journey[Any]]


@dataclass(frozen=True, slots=True)
class HangUp(Order):
    """Close the stream of a course that is under way."""

    running: Journey[Any]


@dataclass(frozen=True, slots=True)
class Disconnect(Order):
    """Close all connections."""


class Journey(Generic[T]):
    """A course on its way: the next order, or the result."""

    def __init__(self, course: Course[T]) -> None:
        self._course = course
        self.results: list[T] = []  # one, once the course has ended
        self.order: Order | None = None
        self._answer: Any = None  # the last one
        self.stopped = False
        self.response: httpx.Response | None = None  # what is open
        self.chunks: Any = None  # its bytes
        self.pieces: Callable[[], Any] = _nothing  # the generator that goes the course, weakly
        self.scope: Any = None  # of the order that is awaited now

    def begin(self) -> None:
        """Go to the first order."""
        self._advance(lambda: next(self._course))

    def send(self, result: object) -> None:
        """Go on with what came of the order. Raises Unreachable for what no kvweave server answers."""
        if hasattr(result, "status_code"):
            self._answer = result
        try:
            self._advance(lambda: self._course.send(result))
        except OTHER_WORDS as error:
            at = "the server" if self._answer is None else str(self._answer.url.join("/"))[:-1]
            raise Unreachable(at, "what answers there is no kvweave server") from error

    def throw(self, error: Exception) -> None:
        """Go on with what went wrong."""
        self._advance(lambda: self._course.throw(error))

    def stop(self) -> None:
        """Go no further, as soon as the order under way has ended; a wire may break that off."""
        self.stopped = True
        if self.scope is not None:
            self.scope.cancel()

    def close(self) -> None:
        """Let the course clean up."""
        self._course.close()

    def _advance(self, take: Callable[[], Order]) -> None:
        try:
            self.order = take()
        except StopIteration as end:
            self.order = None
            self.results.append(end.value)


def _nothing() -> None:
    return None

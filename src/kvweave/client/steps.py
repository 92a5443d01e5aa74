"""A verb without its transport: steps that say what to send, and are sent what came of it.

A generator of commands is run by a wire (`kvweave.client.wires`), one that blocks or one that is
awaited. So each verb is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Steps = Generator["Command", Any, T]


class Command:
    """What a verb asks its wire to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send(Command):
    """Send a request; the `httpx.Response` comes back. With ``open`` its body is yet to be read."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True, slots=True)
class Read(Command):
    """Read some more of what was opened: bytes, none at the end."""


@dataclass(frozen=True, slots=True)
class Piece(Command):
    """Hand text to who reads the stream."""

    text: str


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Together(Command):
    """Take several walks at the same time; their results come back, in order. One that fails stops
    the others."""

    walks: Sequence[Walk[Any]]


@dataclass(frozen=True, slots=True)
class HangUp(Command):
    """Close the stream of a walk."""

    walk: Walk[Any]


@dataclass(frozen=True, slots=True)
class Disconnect(Command):
    """Close all connections."""


class Walk(Generic[T]):
    """Steps on their way: the next command, or the result."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.results: list[T] = []  # one, once the steps have ended
        self.command: Command | None = None
        self.stopped = False
        self.response: httpx.Response | None = None  # what is open
        self.chunks: Any = None  # its bytes
        self.pieces: Any = None  # the generator that walks, where pieces are read
        self.scope: Any = None  # of the command that is awaited now

    def begin(self) -> None:
        """Go to the first command."""
        self._advance(lambda: next(self._steps))

    def send(self, result: object) -> None:
        """Go on with what came of the command."""
        self._advance(lambda: self._steps.send(result))

    def throw(self, error: Exception) -> None:
        """Go on with what went wrong."""
        self._advance(lambda: self._steps.throw(error))

    def stop(self) -> None:
        """Go no further, as soon as the command under way has ended; a wire may break that off."""
        self.stopped = True
        if self.scope is not None:
            self.scope.cancel()

    def close(self) -> None:
        """Let the steps clean up."""
        self._steps.close()

    def _advance(self, take: Callable[[], Command]) -> None:
        try:
            self.command = take()
        except StopIteration as end:
            self.command = None
            self.results.append(end.value)

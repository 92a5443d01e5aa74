"""One answer of a server's context, read whole or piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from kvweave.client import parse
from kvweave.client.course import Course, HangUp, Journey
from kvweave.client.faces import Awaited, Blocking, Verb
from kvweave.client.settle import settle
from kvweave.client.wires import Wire
from kvweave.errors import InvalidArgument, KVWeaveError, Unreachable
from kvweave.weave.answer import Answer


class TurnVerbs:
    """An answer that begins when it is read. `run` waits for all of it, `stream` yields pieces,
    `cancel` hangs up, which stops it in the server."""

    def __init__(self, wire: Wire, path: str, verb: str, body: Mapping[str, object]) -> None:
        self._wire: Any = wire
        self._peer = wire.peer
        self._path, self._verb, self._body = path, verb, body
        self._running: Journey[Answer] | None = None
        self._answer: Answer | None = None

    @Verb
    def cancel(self) -> Course[None]:
        """Hang up; the server stops, and what it had written stays as a chunk."""
        if self._running is not None:
            yield HangUp(self._running)

    def _run(self) -> Journey[Answer]:
        self._running = Journey(self.course())
        return self._running

    def finish(self) -> Answer:
        """Return the answer once it was read to its end. Raises InvalidArgument before."""
        if self._answer is None:
            raise InvalidArgument("finish", "the answer did not end", "read all of stream() first")
        return self._answer

    def course(self) -> Course[Answer]:
        """The course of the whole answer, for other verbs' use."""
        peer = self._peer
        yield from settle(peer, self._path)
        try:
            last = yield from peer.events(f"{self._path}:{self._verb}", self._body)
            if "answer" not in last:
                raise Unreachable(peer.url, "the stream ended without an answer")
            self._answer = parse.answer(last["answer"])
            return self._answer
        except BaseException as error:
            refused = isinstance(error, KVWeaveError) and not isinstance(error, Unreachable)
            if not refused:  # no request here: this may run when garbage is collected
                peer.left.add(self._path)
            raise


class RemoteTurn(TurnVerbs, Blocking):
    """An answer of a `RemoteContext`."""

    def run(self) -> Answer:
        """Return the whole answer."""
        self._wire.finish(self._run())
        return self.finish()

    def stream(self) -> Generator[str]:
        """Yield text as it comes; closing the iterator cancels."""
        pieces: Generator[str] = self._wire.stream(self._run())
        return pieces


class AsyncRemoteTurn(TurnVerbs, Awaited):
    """An answer of an `AsyncRemoteContext`."""

    async def run(self) -> Answer:
        """Return the whole answer."""
        await self._wire.finish(self._run())
        return self.finish()

    def stream(self) -> AsyncGenerator[str]:
        """Yield text as it comes; closing the iterator, or cancelling the task, cancels the answer."""
        pieces: AsyncGenerator[str] = self._wire.stream(self._run())
        return pieces

"""One answer of a server's context, read whole or piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from kvweave.client import parse
from kvweave.client.http import Http
from kvweave.errors import InvalidArgument
from kvweave.weave.answer import Answer


class RemoteTurn:
    """An answer that begins when it is read. `run` waits for all of it, `stream` yields pieces,
    `cancel` hangs up, which stops it in the server."""

    def __init__(self, http: Http, context: str, verb: str, body: Mapping[str, object]) -> None:
        self._http, self._context, self._verb, self._body = http, context, verb, body
        self._events: Generator[dict[str, Any]] | None = None
        self._answer: Answer | None = None

    def run(self) -> Answer:
        """Return the whole answer."""
        for _ in self.stream():
            pass
        return self.finish()

    def stream(self) -> Generator[str]:
        """Yield text as it comes; closing the iterator cancels."""
        path = f"{self._context}:{self._verb}"
        self._events = self._http.events(path, {**self._body, "stream": True})
        try:
            for event in self._events:
                if "answer" in event:
                    self._answer = parse.answer(event["answer"])
                elif event.get("text"):
                    yield str(event["text"])
        finally:
            self._hang_up()

    def cancel(self) -> None:
        """Hang up; the server stops, and what it had written stays as a chunk."""
        if self._events is not None:
            self._hang_up()

    def finish(self) -> Answer:
        """Return the answer once it was read to its end. Raises InvalidArgument before."""
        if self._answer is None:
            raise InvalidArgument("finish", "the answer did not end", "read all of stream() first")
        return self._answer

    def _hang_up(self) -> None:
        assert self._events is not None
        if self._answer is None:  # no request here: this may run when garbage is collected
            self._http.left.add(self._context)
        self._events.close()

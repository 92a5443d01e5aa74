"""The text of a running answer as an iterator, which may be let go of anywhere.

Who forgets an iterator does not choose when it ends: the collector does, in the midst of any verb and in
any thread. What an answer ends in is edits, so it waits until no verb is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from kvweave.interrupts import HELD
from kvweave.verbs import Gate


class BeingRead(Protocol):
    """What an iterator asks of the answer it reads; a `Turn`."""

    gate: Gate

    def step(self) -> bool:
        """Drive it a step further; False where it needs no more."""
        ...

    def read_out(self) -> object:
        """End it when it is complete."""
        ...

    def cancel(self) -> object:
        """Stop here; what was generated stays."""
        ...

    def abandon(self) -> None:
        """Stop here; nothing stays."""
        ...


class Pieces(Generator[str, None, None]):
    """Drives ``turn`` and yields what is ``fresh`` of it; ``then`` is called when the answer is over,
    whatever ended it.

    Closing it, or letting go of it, cancels the answer: what was generated stays. What is thrown in
    gives the answer up. Within a callback of a verb neither can be, so a close waits for the verb's end.
    """

    def __init__(self, turn: BeingRead, fresh: list[str]) -> None:
        self._turn, self._fresh, self._over = turn, fresh, False
        self.then: Callable[[], None] = lambda: None

    def send(self, value: None) -> str:
        """Return the next piece. Raises InvalidArgument within a callback, where nothing is lost; and
        when the answer was given up."""
        self._turn.gate.require_outside("stream")
        if self._over:
            raise StopIteration
        try:
            while not self._fresh and self._turn.step():
                pass
            if self._fresh:
                return self._fresh.pop(0)
        except BaseException:
            self._stop(self._turn.abandon)
            raise
        self._stop(self._turn.read_out)
        raise StopIteration

    def throw(
        self, kind: Any, value: BaseException | object = None, trace: TracebackType | None = None
    ) -> str:
        """Give the answer up, and raise what is thrown."""
        self._turn.gate.require_outside("stream")
        if not self._over:
            self._stop(self._turn.abandon)
        return super().throw(kind, value, trace)

    def close(self) -> None:
        """Cancel the answer if it runs; raises what it ended in."""
        if self._turn.gate.calls_back:
            self._turn.gate.soon(self._left)
        else:
            self._close()

    def __del__(self) -> None:
        turn = getattr(self, "_turn", None)
        if turn is not None and not self._over:
            turn.gate.soon(self._left)

    def _left(self) -> None:
        with suppress(Exception):  # nobody is there to hear of it; the context is put back
            self._close()

    def _close(self) -> None:
        if not self._over:
            self._stop(self._turn.cancel)

    def _stop(self, how: Callable[[], object]) -> None:
        with HELD:
            self._over = True
            try:
                how()
            finally:
                self.then()

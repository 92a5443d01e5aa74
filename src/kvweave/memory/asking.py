"""An answer of a memory under way. All of it is one step: the room that was made, what was recalled, the
message and the answer stay, or none of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

from kvweave.weave.turn import Turn


class Asking:
    """``turn`` is driven by whoever drives the loop; then `end` closes the step."""

    def __init__(self, turn: Turn, step: ExitStack) -> None:
        self.turn, self._step = turn, step

    def end(self) -> None:
        """Close the step of a turn that has ended: of one that failed nothing stays."""
        error = self.turn.error
        if error is None and not self.turn.ended:
            error = RuntimeError("the answer was given up")
        if error is None:
            self._step.close()
        else:
            self._step.__exit__(type(error), error, error.__traceback__)

    def stream(self) -> Generator[str]:
        """Yield the text as it comes, then `end`. Closing the iterator cancels: what was generated
        stays."""
        pieces = self.turn.stream()
        pieces.then = self.end
        return pieces

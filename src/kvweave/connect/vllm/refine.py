"""Prompts that were answered over approximate rows, prefilled while vLLM has nothing to do.

Who does it is vLLM: whoever calls is handed the beginning of such a prompt, a little longer each time, and
asks for it as anybody would. Its blocks stand under vLLM's own keys then, and the next turn of that
conversation is computed over exact rows, at what it costs a conversation that was never edited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave.connect.vllm.ahead import DONE, MORE, SLICE_SECONDS
from kvweave.connect.vllm.asks import PromptAsk

MOST_PROMPTS = 4  # the latest: who does not go on with one soon may have edited it
MOST_ROWS = 2048  # of a piece, by its time
MOST_PIECES = 64  # of a prompt: with each, vLLM is sent and hashes all of it up to there

# tokens that are to be prefilled, and the salt of their cache
Prefill = tuple[list[int], str | None]


@dataclass(slots=True)
class PromptAhead:
    """A prompt, of which vLLM has the first ``n`` rows exactly."""

    ask: PromptAsk
    n: int

    def goes_on_from(self, other: PromptAhead) -> bool:
        """Tell whether it begins with the other prompt, in the same cache."""
        tokens, mine = other.ask.tokens, self.ask
        return other.ask.salt == mine.salt and mine.tokens[: len(tokens)] == tokens


class PromptsAhead:
    """Prompts that wait for a prefill. Used in the worker's thread only."""

    def __init__(self, size: int, says: Callable[[], int], on: bool = True) -> None:
        """``size``: tokens of a block. ``says``: MORE where nobody else runs, or LATER. ``on``: else nothing
        waits."""
        self.size, self.says, self.on = size, says, on
        self._rows = self._handed = size  # of a piece: as many as take a slice, and the last one's
        self._waiting: list[PromptAhead] = []  # the latest last

    def note(self, ask: PromptAsk, n: int) -> None:
        """A prompt was answered over rows of which the first ``n`` were vLLM's own."""
        if not self.on:
            return
        new = PromptAhead(ask, n)
        before = [each for each in self._waiting if new.goes_on_from(each)]
        new.n = max(n, *(each.n for each in before)) if before else n
        self._waiting = [each for each in self._waiting if each not in before]
        self._waiting = [*self._waiting, new][-MOST_PROMPTS:]

    def next(self, seconds: float) -> Prefill | int:
        """Return what is to be prefilled, or DONE or LATER. ``seconds``: that the last one took, 0 for none."""
        if seconds:  # whatever is said now: it is told once
            fit = int(self._handed * min(2.0, SLICE_SECONDS / seconds))
            self._rows = min(MOST_ROWS, max(self.size, fit // self.size * self.size))
        if not self._waiting:
            return DONE
        if (said := self.says()) != MORE:
            return said
        prompt = self._waiting[-1]
        tokens, start = prompt.ask.tokens, prompt.n // self.size * self.size
        self._handed = max(self._rows, len(tokens) // MOST_PIECES // self.size * self.size)
        prompt.n = min(len(tokens), start + self._handed)
        if len(tokens) - prompt.n < self.size:  # what no whole block is left of is cached by nobody
            self._waiting.pop()
        return list(tokens[: prompt.n]), prompt.ask.salt

"""What becomes of turns that leave the window: summarisers, each a callable of a `Segment`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.memory.beside import beside
from kvweave.run.loop import Task
from kvweave.run.sampling import Sampling
from kvweave.weave.context import Context
from kvweave.weave.parts import TextOrTokens

PROMPT = (
    "Summarise the conversation above in a few short sentences. Keep names, numbers, decisions and "
    "what is still open. Write only the summary."
)


@dataclass(frozen=True, slots=True)
class Said:
    """One message or summary that leaves the context; ``text`` is "" without a tokenizer."""

    kind: Kind
    name: str
    text: str
    tokens: tuple[int, ...]
    id: ChunkId = field(default=ChunkId(0), repr=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """What one summary stands for, the oldest first; ``limit`` bounds the tokens of the summary as
    it will stand in the context, which `count` tells of a text."""

    said: tuple[Said, ...]
    limit: int
    count: Callable[[TextOrTokens], int] = field(repr=False)

    def cut(self, text: str) -> str:
        """Return as many words of a text as fit."""
        if self.count(text) <= self.limit:
            return text
        ends = [match.end() for match in re.finditer(r"\S+", text)]
        low, high = 0, len(ends)  # so many words fit, so many do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high)
                if self.count(text[: ends[middle - 1]]) <= self.limit
                else (low, middle)
            )
        return text[: ends[low - 1]] if low else ""


class Summariser(Protocol):
    """Makes one text (or token ids) of many. Any function of a `Segment` is one.

    What is empty or over ``segment.limit`` is refused by the memory, and nothing has changed then.
    """

    def __call__(self, segment: Segment) -> TextOrTokens:
        """Return the summary."""
        ...


class FirstSentences:
    """Keeps sentences as they are: of each message the first ``n`` (None: all), in order, the newest
    messages first to be served, until the limit is reached.

    With ``pattern`` only what it matches is kept, each match a sentence of its own: the way for
    texts whose facts have a form. No model is needed; what is kept is kept word by word, the rest
    is not in the summary at all.
    """

    def __init__(self, n: int | None = 1, pattern: str | None = None) -> None:
        if n is not None and n < 1:
            raise InvalidArgument("n", f"{n} sentences", "give 1 or more, or None for all")
        self.n, self.pattern = n, None if pattern is None else re.compile(pattern)

    def __call__(self, segment: Segment) -> str:
        """Return the sentences that fit."""
        kept: list[str] = []
        for said in reversed(segment.said):
            found = [s for s in dict.fromkeys(self._sentences(said.text)) if s not in kept]
            n = self.n if said.kind != "summary" else None  # a summary's sentences were chosen once
            for sentence in reversed(found[:n]):
                if segment.count(" ".join([sentence, *kept])) > segment.limit:
                    return " ".join(kept) or segment.cut(sentence)
                kept.insert(0, sentence)
        return " ".join(kept)

    def _sentences(self, text: str) -> list[str]:
        if self.pattern is not None:
            return [match[0].strip() for match in self.pattern.finditer(text)]
        found = re.findall(r"[^.!?\n]+[.!?]*", text)
        return [sentence.strip() for sentence in found if sentence.strip()]


class AskModel:
    """Asks the model itself, in its own chat template, over the messages' chunks as they are: their
    KV is placed, not computed again. Where it says nothing, the first sentences stand for the rest:
    a conversation goes on whatever its model is worth.

    Worth as much as the model is: the bundled one was never taught to summarise and keeps nothing
    (docs/memory.md counts); its memory lives by recall alone.
    """

    def __init__(self, engine: Engine, context: Context, prompt: str = PROMPT) -> None:
        self.engine, self.context, self.prompt = engine, context, prompt

    def __call__(self, segment: Segment) -> str:
        """Return what the model says. Raises ContextTooLong, and InvalidArgument without a
        tokenizer."""
        return self.engine.loop.finish(self.writing(segment))

    def writing(self, segment: Segment) -> Task[str]:
        """As a call, as a task of the loop: others go on meanwhile."""
        maker = self.engine.maker
        with beside(self.engine, self.context, "summary") as context:
            with context.edit():
                for said in segment.said:
                    context.append_chunk(f"#{said.id}")
                context.append(maker.message("user", self.prompt))
                context.append(maker.chat.header())
            turn = context.begin(Sampling(max_tokens=segment.limit))
            yield turn.request
            answer = turn.finish()
        return segment.cut(answer.text.strip()) or FirstSentences()(segment)

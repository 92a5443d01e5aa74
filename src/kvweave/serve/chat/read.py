"""From a driver's events to what they tell of each answer: text, reasoning, calls, and its end."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from kvweave.run.sample import Choice
from kvweave.serve.chat.parse import (
    AnswerParser,
    CalledTool,
    ContentText,
    ReasoningText,
    ResponseForm,
    Written,
)
from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.reuse.said import AssistantSaid, ToolUse, normal
from kvweave.weave.answer import Answer

End = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToldEvent:
    """What one event says of one answer."""

    index: int  # of the answer
    pieces: list[Written]
    choices: list[Choice]  # the tokens, end tokens left out
    end: End | None = None  # None while it goes on
    stopped_by: str | None = None  # the stop string that ended it
    thought: bool = False  # whether the tokens are of reasoning


@dataclass(slots=True)
class ReadAnswer:
    """What was read of one answer up to now."""

    parser: AnswerParser
    lead: str  # white space still to be left out at its front
    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)
    n_tokens: int = 0
    most: int | None = None  # calls that are told
    n_thought: int = 0  # tokens of reasoning
    end: End | None = None

    def add(self, pieces: Sequence[Written]) -> list[Written]:
        """Take pieces in; return those the client gets."""
        told: list[Written] = []
        for piece in pieces:
            if isinstance(piece, CalledTool):
                if self.most is not None and piece.number >= self.most:
                    continue
                self.calls.append(piece)
            elif isinstance(piece, ReasoningText):
                self.reasoning += piece.text
            else:
                n = _n_common(self.lead, piece.text)
                self.lead = self.lead[n:] if n == len(piece.text) else ""
                piece = ContentText(piece.text[n:])
                self.content += piece.text
            if isinstance(piece, CalledTool) or piece.text:
                told.append(piece)
        return told


class AnswerReader:
    """Reads the answers of one request. What it reads is the same in any thread."""

    def __init__(
        self,
        form: ResponseForm | None,
        tools: Sequence[Mapping[str, Any]],
        ends: frozenset[int],
        *,
        parallel: bool = True,
    ) -> None:
        """``ends`` are the tokens that end an answer; of calls that are not ``parallel`` the first
        one is told."""
        self.form, self.tools, self.ends, self.most = form, tools, ends, None if parallel else 1
        self._secret = uuid.uuid4().hex
        self.answers: dict[int, ReadAnswer] = {}

    def take(self, event: Event, front: str, lead: str) -> ToldEvent:
        """Take in an event of an answer behind ``front``; see `Prompt`."""
        index = event.index
        if index not in self.answers:
            self.answers[index] = ReadAnswer(self._parser(index, front), lead, most=self.most)
        known = self.answers[index]
        if isinstance(event, Finished):
            answer = event.answer
            pieces = known.add(known.parser.end(answer.finish == "stop"))
            known.n_tokens = len(answer.tokens)
            known.end = _end_of(answer, known)
            return ToldEvent(index, pieces, [], known.end, answer.stopped_by)
        thought = known.parser.thinks
        found = known.parser.feed(event.text)
        thought |= any(isinstance(piece, ReasoningText) for piece in found)
        known.n_thought += len(event.choices) * thought
        choices = [choice for choice in event.choices if choice.token not in self.ends]
        return ToldEvent(index, known.add(found), choices, thought=thought)

    def said(self, index: int, answer: Answer, front: str) -> AssistantSaid | None:
        """Return a whole answer as it will come back; None if some of it was not told."""
        known = ReadAnswer(self._parser(index, front), "")
        known.add(known.parser.feed(answer.text))
        known.add(known.parser.end(answer.finish == "stop"))
        if self.most is not None and len(known.calls) > self.most:
            return None
        calls = [ToolUse(c.id, c.name, normal(c.arguments) or "{}") for c in known.calls]
        return AssistantSaid(known.content.strip(), known.reasoning.strip(), tuple(calls))

    def _parser(self, index: int, front: str) -> AnswerParser:
        return AnswerParser(self.form, front, self.tools, lambda n: self._id(index, n))

    def _id(self, index: int, n: int) -> str:
        made = blake2b(f"{self._secret}/{index}/{n}".encode(), digest_size=16).hexdigest()
        # Mistral's templates take nothing longer
        nine = self.form is not None and self.form.name.startswith("mistral")
        return made[:9] if nine else f"call_{made[:24]}"


def _end_of(answer: Answer, known: ReadAnswer) -> End:
    if answer.finish != "stop":
        return "length"
    return "tool_calls" if known.calls else "stop"


def _n_common(a: str, b: str) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n

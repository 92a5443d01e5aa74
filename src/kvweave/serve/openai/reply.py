"""The bodies of one response of OpenAI's endpoints, whole or piece by piece."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvweave.run.sample import BROKEN, Choice
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.parse import CalledTool, ContentText, ReasoningText, Written
from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from kvweave.serve.state import ServerState
from kvweave.serve.stream import Reply


@dataclass(slots=True)
class ChoiceSoFar:
    """What has come of one choice so far."""

    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    n_tokens: int = 0
    finish: str | None = None


class ResponseBuilder(Reply):
    """Builds the bodies of one request's response."""

    def __init__(self, state: ServerState, asked: Asked, body: GenerationRequest) -> None:
        self.state, self.asked, self.body = state, asked, body
        self.is_chat = isinstance(body, ChatRequest)
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.streams = body.stream
        self._begun: set[int] = set()
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.written: dict[int, ChoiceSoFar] = {}
        self.ttft: float | None = None
        self.ledgers: list[object] = []  # of the conversations that have their answers

    # ---- events

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Take in an event; return the chunks of the stream that tell of it."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.asked.arrived
        index, written = event.index, self.of(event.index)
        if isinstance(event, Finished):
            self.ledgers.append(event.answer.usage["ledger"])
            written.n_tokens = len(event.answer.tokens)
        chunks = self._chat_chunks(event) if self.is_chat else self._text_chunks(event)
        if index not in self._begun:
            self._begun.add(index)
            if self.is_chat:
                chunks.insert(0, self.role(index))
            elif self.echo(index):
                chunks.insert(0, self.piece(index, self.echo(index), []))
        if written.finish is not None:
            last = self.piece(index, None, [], written.finish)
            chunks.append(last | (self.extension if self.is_complete else {}))
        return chunks

    def _text_chunks(self, event: Event) -> list[dict[str, Any]]:
        written = self.of(event.index)
        if isinstance(event, Finished):
            written.finish = "stop" if event.answer.finish == "stop" else "length"
            return []
        ends = self.state.driver.engine.runner.ends
        choices = [choice for choice in event.choices if choice.token not in ends]
        written.choices += choices
        written.text += event.text
        if not event.text and not (choices and self.logprobs(choices)):
            return []
        return [self.piece(event.index, event.text, choices)]

    def _chat_chunks(self, event: Event) -> list[dict[str, Any]]:
        told, written = self.asked.read(event), self.of(event.index)
        written.finish = told.end
        written.choices += told.choices
        deltas = [delta for piece in told.pieces for delta in self._deltas(piece)]
        if told.choices and not deltas and self.logprobs(told.choices):
            deltas = [{"content": ""}]
        chunks = []
        for i, delta in enumerate(deltas):
            made = {"index": event.index, "delta": delta, "finish_reason": None}
            made["logprobs"] = self.logprobs(told.choices) if not i and told.choices else None
            chunks.append(self._piece([made]))
        return chunks

    def _deltas(self, piece: Written) -> list[dict[str, Any]]:
        if isinstance(piece, ContentText):
            return [{"content": piece.text}]
        if isinstance(piece, ReasoningText):
            return [reasoning(piece.text)] if self.tells_reasoning else []
        function = {"name": piece.name, "arguments": ""}
        first = {"index": piece.number, "id": piece.id, "type": "function", "function": function}
        rest = {"index": piece.number, "function": {"arguments": piece.arguments}}
        return [{"tool_calls": [first]}, {"tool_calls": [rest]}]

    @property
    def tells_reasoning(self) -> bool:
        """Whether the client gets what the model thinks."""
        return not isinstance(self.body, ChatRequest) or self.body.include_reasoning is not False

    def of(self, index: int) -> ChoiceSoFar:
        """Return what has come of a choice."""
        return self.written.setdefault(index, ChoiceSoFar())

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        n_ended = sum(written.finish is not None for written in self.written.values())
        return n_ended == self.asked.n * len(self.asked.prompts)

    @property
    def usage(self) -> dict[str, object]:
        """What is charged, for all choices."""
        return self.asked.usage(sum(written.n_tokens for written in self.written.values()))

    @property
    def extension(self) -> dict[str, object]:
        """What only this server tells."""
        told = self.asked.report(self.ttft)
        if left := self.body.ignored(self.state):
            told["ignored"] = left
        return {"kvweave": told | ({"ledger": self.ledgers[0]} if len(self.ledgers) == 1 else {})}

    # ---- bodies

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = []
        for index, written in sorted(self.written.items()):
            choice: dict[str, Any] = {"index": index, "finish_reason": written.finish}
            if self.is_chat:
                choice["message"] = self._message(index)
            else:
                choice["text"] = self.echo(index) + written.text
            choice["logprobs"] = self.logprobs(written.choices)
            choices.append(choice)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": self.usage} | self.extension

    def _message(self, index: int) -> dict[str, Any]:
        """Return a whole answer of a chat."""
        assert self.asked.reader is not None
        read = self.asked.reader.answers[index]
        made: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
        if read.calls:
            made["content"] = read.content or None
            made["tool_calls"] = [_call(call) for call in read.calls]
        if read.reasoning and self.tells_reasoning:
            made |= reasoning(read.reasoning)
        return made

    def piece(
        self, index: int, text: str | None, choices: list[Choice], finish: str | None = None
    ) -> dict[str, Any]:
        """Return one chunk of a stream."""
        made: dict[str, Any] = {"index": index, "finish_reason": finish}
        if self.is_chat:
            made["delta"] = {} if text is None else {"content": text}
        else:
            made["text"] = text or ""
        made["logprobs"] = self.logprobs(choices) if choices else None
        return self._piece([made])

    def role(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a chat's stream: it says who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._piece(
            [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}]
        )

    def last(self) -> list[dict[str, Any]]:
        """Return the last chunk of a stream, if the usage was asked for; it has no choices."""
        if not self.body.include_usage:
            return []
        return [self._piece([]) | {"usage": self.usage} | self.extension]

    def echo(self, index: int) -> str:
        """Return the prompt in front of a completion, where the client wants it."""
        if not isinstance(self.body, CompletionRequest) or not self.body.echo:
            return ""
        prompt = self.asked.opened[index // self.asked.n].prompt
        return "".join(segment.text for segment in prompt.segments)

    def logprobs(self, choices: list[Choice]) -> dict[str, Any] | None:
        """Return log-probabilities in the endpoint's own shape; None when not asked for."""
        if isinstance(self.body, ChatRequest):
            if not self.body.logprobs:
                return None
            return {"content": [self._token(choice) for choice in choices], "refusal": None}
        if not isinstance(self.body, CompletionRequest) or self.body.logprobs is None:
            return None
        texts = [self._text(choice.token) for choice in choices]
        return {
            "tokens": texts,
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": [{self._text(t): p for t, p in choice.top} for choice in choices],
            "text_offset": list(accumulate(map(len, texts), initial=0))[: len(texts)],
        }

    def _token(self, choice: Choice) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in choice.top]
        return self._entry(choice.token, choice.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        whole = None if BROKEN in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": logprob, "bytes": whole}

    def _text(self, token: int) -> str:
        tokenizer = self.state.driver.engine.runner.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        made = self._frame("chat.completion.chunk" if self.is_chat else "text_completion", choices)
        return made | ({"usage": None} if self.body.include_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.state.fingerprint,
            "choices": choices,
        }


def reasoning(text: str) -> dict[str, Any]:
    """Return thinking under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: CalledTool) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}

"""``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, as OpenAI's clients expect them.

Tools go through the model's chat template; what the model answers comes back as text, calls of
tools are not parsed out of it. Messages may have parts ``{"type": "chunk", "name": "docs/faq"}``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvweave.run.sample import BROKEN, Choice
from kvweave.serve.access import Tenant
from kvweave.serve.answers import Asked, MakePrompt, Service
from kvweave.serve.common import STREAMED
from kvweave.serve.problems import make, problem_of
from kvweave.serve.render import Prompt, PromptSegment
from kvweave.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from kvweave.serve.strict import StrictRoute
from kvweave.serve.text import tokens_of
from kvweave.serve.work import Delta, Event, Finished


@dataclass(slots=True)
class Written:
    """What has come of one choice so far."""

    lead: str = ""  # white space still to be left out at its front
    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    n_tokens: int = 0
    finish: str | None = None

    def add(self, text: str) -> str:
        """Take new text and return what of it the client gets."""
        n = 0
        while n < min(len(self.lead), len(text)) and self.lead[n] == text[n]:
            n += 1
        if text:
            self.lead = self.lead[n:] if n == len(text) else ""
        self.text += text[n:]
        return text[n:]


class ResponseBuilder:
    """Builds the bodies of one request's response."""

    def __init__(self, service: Service, asked: Asked, body: GenerationRequest) -> None:
        self.service, self.asked, self.body = service, asked, body
        self.is_chat = isinstance(body, ChatRequest)
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self.id, self.created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        self.written: dict[int, Written] = {}
        self.ttft: float | None = None

    # ---- events

    def take(self, event: Event) -> tuple[int, str, list[Choice]]:
        """Take in an event; return the choice's index and what is new of it."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.asked.arrived
        written = self.of(event.index)
        if isinstance(event, Finished):
            answer = event.answer
            written.finish = "stop" if answer.finish == "stop" else "length"
            written.n_tokens = len(answer.tokens)
            return event.index, "", []
        ends = self.service.driver.engine.runner.ends
        choices = [choice for choice in event.choices if choice.token not in ends]
        written.choices += choices
        return event.index, written.add(event.text), choices

    def of(self, index: int) -> Written:
        """Return what has come of a choice."""
        if index not in self.written:
            lead = self.asked.opened[index // self.asked.n].prompt.lead if self.is_chat else ""
            self.written[index] = Written(lead)
        return self.written[index]

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
        return {"kvweave": self.asked.report(self.ttft)}

    # ---- bodies

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = []
        for index, written in sorted(self.written.items()):
            choice: dict[str, Any] = {"index": index, "finish_reason": written.finish}
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": written.text, "refusal": None}
            else:
                choice["text"] = self.echo(index) + written.text
            choice["logprobs"] = self.logprobs(written.choices)
            choices.append(choice)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": self.usage} | self.extension

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

    def last(self) -> dict[str, Any]:
        """Return the last chunk of a stream, if the usage was asked for; it has no choices."""
        return self._piece([]) | {"usage": self.usage} | self.extension

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
        tokenizer = self.service.driver.engine.runner.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        made = self._frame("chat.completion.chunk" if self.is_chat else "text_completion", choices)
        return made | ({"usage": None} if self.body.include_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.options.model_name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }


def make_router(service: Service) -> APIRouter:
    """Return the routes of one server."""
    router = APIRouter(tags=["openai"], route_class=StrictRoute)
    started = int(time.time())
    name = service.options.model_name
    model = {"id": name, "object": "model", "created": started, "owned_by": "kvweave"}

    @router.get("/v1/models")
    def models(tenant: Tenant) -> dict[str, Any]:
        """List the one model there is."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{wanted:path}", response_model=None)
    def one_model(wanted: str, tenant: Tenant) -> dict[str, Any] | Response:
        """Describe the model."""
        return model if wanted == name else _no_model(wanted, name)

    @router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat(body: ChatRequest, tenant: Tenant) -> Response:
        """Answer a conversation; what of it is known is found again, at any position.

        Tools are shown to the model by its chat template; the answer is text, calls are not parsed.
        """
        if body.model != name:
            return _no_model(body.model, name)
        logprobs = (body.top_logprobs or 0) if body.logprobs else 0
        sampling = body.sampling(1 if body.limit is None else body.limit, logprobs)
        messages, tools = body.plain_messages(), body.plain_tools()
        how, n = body.how, body.n_choices
        prompts = [lambda service: service.renderer.render(messages, tools)]
        private = body.store is False
        asked = Asked(service, tenant, prompts, sampling, body.limit, how, n, private=private)
        return await _respond(ResponseBuilder(service, asked, body))

    @router.post("/v1/completions", response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, tenant: Tenant) -> Response:
        """Continue text or tokens."""
        if body.model != name:
            return _no_model(body.model, name)
        limit = 16 if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, body.logprobs or 0)
        prompts = [_completion_prompt(prompt) for prompt in body.prompts()]
        how, n = body.how, body.n_choices
        private = body.store is False
        asked = Asked(service, tenant, prompts, sampling, limit, how, n, False, private)
        return await _respond(ResponseBuilder(service, asked, body))

    return router


def _no_model(wanted: str, name: str) -> Response:
    return make(
        404, f"no model {wanted!r}", code="model_not_found", param="model", hint=f"it is {name!r}"
    ).response


def _completion_prompt(given: str | list[int]) -> MakePrompt:
    """Return what makes the prompt; a BOS the engine begins with anyway is not put twice."""

    def prompt(service: Service) -> Prompt:
        engine, base = service.driver.engine, service.sessions.engine_base
        tokens = tokens_of(engine, given)
        begin = [] if base is None else [int(t) for t in engine.table.tokens(base)]
        text = given if isinstance(given, str) else service.assembler.text(tokens)
        if begin and tokens[: len(begin)] == begin:
            tokens = tokens[len(begin) :]
        segment = PromptSegment("document", text, "prompt", True, tokens=tuple(tokens))
        return Prompt((segment,) if tokens else (), "", "")

    return prompt


async def _respond(reply: ResponseBuilder) -> Response:
    """Answer whole or as a stream; errors before the first token have their status.

    A client that goes away cancels this; closing the events cancels the answer.
    """
    events = reply.service.answer(reply.asked)
    try:
        if not reply.body.stream:
            async for event in events:
                reply.take(event)
            return JSONResponse(reply.whole())
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(
        _stream(reply, first, events),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _stream(
    reply: ResponseBuilder, first: Event, events: AsyncGenerator[Event, None]
) -> AsyncIterator[str]:
    """Yield server-sent events; the answer is cancelled when nobody reads them any more."""
    begun: set[int] = set()
    try:
        event: Event | None = first
        while event is not None:
            for piece in _pieces(reply, event, begun):
                yield _sse(piece)
            event = await anext(events, None)
        if reply.body.include_usage:
            yield _sse(reply.last())
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent: it can only be said here
        yield _sse(problem_of(error).body)
    finally:
        await events.aclose()


def _pieces(
    reply: ResponseBuilder, event: Delta | Finished, begun: set[int]
) -> list[dict[str, Any]]:
    index, text, choices = reply.take(event)
    pieces = []
    if index not in begun:
        begun.add(index)
        if reply.is_chat:
            pieces.append(reply.role(index))
        elif reply.echo(index):
            pieces.append(reply.piece(index, reply.echo(index), []))
    if isinstance(event, Finished):
        piece = reply.piece(index, None, [], reply.of(index).finish)
        pieces.append(piece | (reply.extension if reply.is_complete else {}))
    elif text or (choices and reply.logprobs(choices)):
        pieces.append(reply.piece(index, text, choices))
    return pieces


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

"""``/v1/contexts/NAME:generate`` and ``:ask``: an answer whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, StrictInt
from starlette.responses import Response

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.serve.access import Tenant
from kvweave.serve.common import (
    ERRORS,
    MAX_STOPS,
    STREAMED,
    STRICT,
    Int,
    PathRef,
    Serving,
    Stops,
    The,
)
from kvweave.serve.contexts import Nats, require_idle
from kvweave.serve.problems import problem_of
from kvweave.serve.strict import StrictRoute
from kvweave.serve.text import tokens_of
from kvweave.serve.work import Delta, Event, Finished
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.session import Turn
from kvweave.weave.special import PlainText

router = APIRouter(
    prefix="/v1/contexts", tags=["contexts"], responses=ERRORS, route_class=StrictRoute
)

Count = Annotated[Int, Field(ge=0, le=2**31)]


class Sampled(BaseModel):
    """How to choose tokens, and when to stop; see `kvweave.Sampling`."""

    model_config = STRICT

    max_tokens: Annotated[Int, Field(ge=1, le=2**31)] = 256
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    seed: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    stop_tokens: Annotated[list[StrictInt], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    logprobs: Annotated[Int, Field(ge=0, le=100)] = 0
    ignore_eos: bool = False
    max_drift: Nats | None = None
    stream: bool = False
    content: str | None = None  # `ask`: the user's message; null answers what is there


@router.post("/{name:path}:generate", response_model=None, responses=STREAMED)
async def generate(tenant: Tenant, the: The, name: PathRef, body: Sampled) -> Response:
    """Continue a context; the new text becomes its last part."""
    if body.content is not None:
        raise InvalidArgument("content", "generate takes none", "use :ask, or :append first")
    return await _respond(body, _Asked(the, tenant, name, body, chat=False).events())


@router.post("/{name:path}:ask", response_model=None, responses=STREAMED)
async def ask(tenant: Tenant, the: The, name: PathRef, body: Sampled) -> Response:
    """Add a user's message and the model's answer; both become chunks."""
    return await _respond(body, _Asked(the, tenant, name, body, chat=True).events())


class _Asked:
    """One answer of one context."""

    def __init__(self, the: Serving, tenant: str, name: str, body: Sampled, *, chat: bool) -> None:
        self.the, self.tenant, self.name, self.body, self.chat = the, tenant, name, body, chat
        options = body.model_dump(exclude={"max_tokens", "stream", "content"})
        options["stop_tokens"] = tuple(body.stop_tokens)
        self.sampling, self.max_drift = request_from(body.max_tokens, options)
        self.known: set[int] = set()  # uids of parts before the one that is answered

    def events(self) -> AsyncGenerator[Event, None]:
        return self.the.driver.answer(self.tenant, self.begin, self.done, self.wants)

    def begin(self, engine: Engine) -> list[Turn]:
        context = engine.get_context(self.name, self.tenant)
        require_idle(self.the, context)
        sizes = [self.body.max_tokens]
        if self.body.content is not None:
            sizes.append(len(tokens_of(engine, self.body.content)))
        self.the.quota.check(engine, self.tenant, sizes)
        before = context.snapshot()
        try:
            if self.body.content is not None:
                context.message("user", PlainText(self.body.content))
            self.known = {part.uid for part in context.parts[:-1]}
            return [context.begin(self.sampling, self.max_drift, chat=self.chat)]
        except BaseException:
            context.restore(before)
            raise

    def wants(self, engine: Engine) -> list[int]:
        return [int(part.id) for part in engine.get_context(self.name, self.tenant).parts]

    def done(self, engine: Engine, answers: list[Answer]) -> None:
        parts = engine.get_context(self.name, self.tenant).parts
        new = [part.id for part in parts if part.uid not in self.known]
        self.the.driver.later(new)
        for id in new:
            self.the.on_stored(self.tenant, id)


def answer_of(answer: Answer) -> dict[str, Any]:
    """Return an answer, JSON-ready."""
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "finish": answer.finish,
        "usage": answer.usage,
        "plan": answer.plan.to_dict(),
        "choices": [asdict(choice) for choice in answer.choices],
    }


async def _respond(body: Sampled, events: AsyncGenerator[Event, None]) -> Response:
    """Answer whole or as a stream; what goes wrong before the first token has its status."""
    if not body.stream:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Finished):
                    return JSONResponse(answer_of(event.answer))
        raise RuntimeError("an answer ended without a word")
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(
        _stream(first, events),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _stream(first: Event, events: AsyncGenerator[Event, None]) -> AsyncIterator[str]:
    """Yield ``{"text": ...}`` for each piece, at last ``{"answer": ...}`` and ``[DONE]``."""
    try:
        event: Event | None = first
        while event is not None:
            if isinstance(event, Delta):
                if event.text:
                    yield _sse({"text": event.text})
            else:
                answer = answer_of(event.answer)
                short = {key: answer[key] for key in ("finish", "usage", "plan")}
                yield _sse(short | {"answer": answer})
            event = await anext(events, None)
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent: it can only be said here
        yield _sse(problem_of(error).body)
    finally:
        await events.aclose()


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

"""``/v1/contexts/NAME:generate`` and ``:ask``: an answer whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool, StrictInt
from starlette.responses import Response

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.loop import Task
from kvweave.run.sampling import MAX_BIASED
from kvweave.serve.driver.work import Delta, Event
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.routes.base import (
    ERRORS,
    MAX_STOPS,
    STREAMED,
    STRICT,
    Int,
    Num,
    Stops,
)
from kvweave.serve.routes.contexts import Nats, Share
from kvweave.serve.routes.named import NamedContext, OnContext
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.stream import Reply, respond
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.parts import Part
from kvweave.weave.special import PlainText
from kvweave.weave.turn import Turn

router = APIRouter(
    prefix="/v1/contexts", tags=["contexts"], responses=ERRORS, route_class=StrictRoute
)

Count = Annotated[Int, Field(ge=0, le=2**31)]
Penalty = Annotated[Num, Field(ge=-2, le=2)]


class Sampled(BaseModel):
    """How to choose tokens, and when to stop; see `kvweave.Sampling`."""

    model_config = STRICT

    max_tokens: Annotated[Int, Field(ge=1, le=2**31)] = 256
    temperature: Annotated[Num, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[Num, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    seed: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    stop_tokens: Annotated[list[StrictInt], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    logprobs: Annotated[Int, Field(ge=0, le=100)] = 0
    ignore_eos: StrictBool = False
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[Num, Field(gt=0, allow_inf_nan=False)] = 1.0
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_BIASED)] = Field(
        default_factory=dict
    )
    min_tokens: Count = 0
    shown: Annotated[list[StrictInt], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    max_drift: Nats | None = None
    stream: StrictBool = False
    content: str | None = None  # `ask`: the user's message; null answers what is there


@router.post("/{name:path}:generate", response_model=None, responses=STREAMED)
async def generate(here: OnContext, body: Sampled) -> Response:
    """Continue a context; the new text becomes its last part."""
    if body.content is not None:
        raise InvalidArgument("content", "generate takes none", "use :ask, or :append first")
    return await answered(OneTurn(here, body, chat=False))


@router.post("/{name:path}:ask", response_model=None, responses=STREAMED)
async def ask(here: OnContext, body: Sampled) -> Response:
    """Add a user's message and the model's answer; both become chunks."""
    return await answered(OneTurn(here, body, chat=True))


class OneTurn:
    """One answer of one context."""

    def __init__(
        self, here: NamedContext, body: Sampled, *, chat: bool, but: tuple[str, ...] = ()
    ) -> None:
        self.here, self.body, self.chat = here, body, chat
        options = body.model_dump(exclude={"max_tokens", "stream", "content", *but})
        options |= {"stop_tokens": tuple(body.stop_tokens), "shown": tuple(body.shown)}
        self.sampling, self.max_drift = request_from(body.max_tokens, options)
        self.version: int | None = None  # once the answer is there
        self.known: set[int] = set()  # uids of parts before the one that is answered
        self.told: tuple[Part, tuple[int, dict[str, int]]] | None = (
            None  # the message; names before
        )

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield what comes of it."""
        events, event = await self.here.free(self.first)
        try:
            while event is not None:
                yield event
                event = await anext(events, None)
        finally:
            await events.aclose()

    async def first(self) -> tuple[AsyncGenerator[Event, None], Event | None]:
        """Begin the answer, and return its events but the first, and the first."""
        driver = self.here.the.driver
        events = driver.answer(self.here.tenant, self.begin, self.done, self.wants)
        try:
            return events, await anext(events, None)
        except BaseException:
            await events.aclose()
            raise

    def begin(self, engine: Engine) -> list[Turn] | Task[list[Turn]]:
        """Add the message, and queue the answer; in the driver's thread."""
        context = self.here.open(engine)
        sizes = [self.body.max_tokens]
        if self.body.content is not None:
            sizes.append(len(tokens_of(engine, self.body.content)))
        self.here.the.quota.check(engine, self.here.tenant, sizes)
        said, counts = self.body.content, context.names.counts()
        with nullcontext() if said is None else context.telling(PlainText(said)):
            self.here.the.quota.check_parts(len(context.parts))
            self.known = {part.uid for part in context.parts[:-1]}
            self.told = None if said is None else (context.parts[-1], counts)
            return [context.begin(self.sampling, self.max_drift, chat=self.chat)]

    def wants(self, engine: Engine) -> list[int]:
        """Return the chunks that it will use."""
        return [int(part.id) for part in engine.get_context(self.here.name, self.here.tenant).parts]

    def done(self, engine: Engine, answers: list[Answer]) -> None:
        """Have canonical KV computed of what is new, and let it be found. With an answer that failed its
        message goes."""
        context, table = engine.get_context(self.here.name, self.here.tenant), engine.table
        if self.told is not None and not answers:
            said, counts = self.told  # others have seen its version, so that is not given again
            context.drop(said, mode="forget")
            left = table.lookup(said.name, self.here.tenant)
            if left is not None and left.id == said.id:
                table.unbind(said.name, self.here.tenant)
                context.names.reset(counts)
        parts, self.version = context.parts, context.history.version
        new = [part.id for part in parts if part.uid not in self.known]
        self.here.the.driver.later(new)
        for id in new:
            self.here.the.library.note(self.here.tenant, id)


async def answered(turn: OneTurn) -> Response:
    """Return the answer, whole or as a stream; a whole one carries the version it leaves."""
    response = await respond(turn.events(), AnswerReply(turn.body.stream))
    if turn.version is not None and not turn.body.stream:
        response.headers["ETag"] = f'"{turn.version}"'
    return response


def answer_of(answer: Answer) -> dict[str, Any]:
    """Return an answer, JSON-ready."""
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "finish": answer.finish,
        "usage": answer.usage,
        "plan": answer.plan.to_dict(),
        "choices": [asdict(choice) for choice in answer.choices],
        "stopped_by": answer.stopped_by,
    }


class AnswerReply(Reply):
    """``{"text": ...}`` for each piece, at last ``{"answer": ...}``."""

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.answer: dict[str, Any] = {}

    def take(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Delta):
            return [{"text": event.text}] if event.text else []
        self.answer = answer_of(event.answer)
        return [
            {key: self.answer[key] for key in ("finish", "usage", "plan")} | {"answer": self.answer}
        ]

    def whole(self) -> dict[str, Any]:
        return self.answer

"""``/v1/memory/NAME:ask``: room is made, what the message calls for is recalled, and it is answered."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kvweave.engine import Engine
from kvweave.memory.asking import Asking
from kvweave.run.loop import Task
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.memories import OpenMemory
from kvweave.serve.routes.base import ERRORS, STREAMED
from kvweave.serve.routes.named import NamedContext, OnContext
from kvweave.serve.routes.remembered import MemoryAsked
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.routes.turns import OneTurn, answered
from kvweave.weave.answer import Answer
from kvweave.weave.special import PlainText
from kvweave.weave.turn import Turn

router = APIRouter(prefix="/v1/memory", tags=["memory"], responses=ERRORS, route_class=StrictRoute)


@router.post("/{name:path}:ask", response_model=None, responses=STREAMED)
async def ask_memory(here: OnContext, body: MemoryAsked) -> Response:
    """Make room, recall what the message calls for, and answer it: all of it one step."""
    return await answered(_MemoryTurn(here, body))


class _MemoryTurn(OneTurn):
    """One answer of one memory."""

    def __init__(self, here: NamedContext, body: MemoryAsked) -> None:
        super().__init__(here, body, chat=True, but=("recall", "question"))
        self.content = PlainText(body.content)
        self.recall = None if body.recall == "none" else body.recall
        self.question = None if body.question is None else PlainText(body.question)
        self.under_way: tuple[OpenMemory, Asking] | None = None

    def begin(self, engine: Engine) -> Task[list[Turn]]:
        context, memories = self.here.open(engine), self.here.the.memories
        each = memories.get(context)
        n = len(tokens_of(engine, self.content))
        if self.question is not None:
            tokens_of(engine, self.question)
        memories.check(each, n, self.body.max_tokens)
        known = {part.uid for part in context.parts}
        asked = self.sampling, self.max_drift
        asking = yield from each.memory.beginning(self.content, asked, self.recall, self.question)
        self.under_way = each, asking
        try:
            memories.check(each, self.body.max_tokens)  # with what became of turns that left
        except BaseException:
            asking.turn.abandon()
            asking.end()
            raise
        self.known = known
        return [asking.turn]

    def done(self, engine: Engine, answers: list[Answer]) -> None:
        assert self.under_way is not None
        each, asking = self.under_way
        asking.end()
        super().done(engine, answers)
        self.here.the.memories.touch(each)

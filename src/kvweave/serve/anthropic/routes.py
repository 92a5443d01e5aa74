"""``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from kvweave.serve.anthropic.compact import without_summaries
from kvweave.serve.anthropic.course import AnswerCourse, MessageCourse
from kvweave.serve.anthropic.schemas import CountRequest, MessagesRequest
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.named import other_model
from kvweave.serve.routes.base import ERRORS, STREAMED, BetaQuery, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.stream import respond

# in Anthropic's shape, see `Problem`
REFUSED: dict[int | str, dict[str, Any]] = {
    529 if status == 503 else status: {"description": about["description"]}
    for status, about in ERRORS.items()
}
router = APIRouter(tags=["anthropic"], responses=REFUSED, route_class=StrictRoute)


@router.post("/v1/messages", response_model=None, responses=STREAMED)
async def messages(
    body: MessagesRequest, tenant: Tenant, state: The, beta: BetaQuery = None
) -> Response:
    """Answer a conversation; what of it is known is found again, at any position.

    ``context_management`` clears old results and thinking before the model sees them, or has it
    write a summary first.
    """
    if (refused := other_model(state, body.model)) is not None:
        return refused
    body.check()
    course = AnswerCourse(state, tenant, body)
    return await respond(course.events(), course.reply)


@router.post("/v1/messages/count_tokens", response_model=None)
async def tokens(
    body: CountRequest, tenant: Tenant, state: The, beta: BetaQuery = None
) -> dict[str, Any] | Response:
    """Say how many tokens the prompt of such a request has, before and after it is edited."""
    if (refused := other_model(state, body.model)) is not None:
        return refused
    body.check()
    course = MessageCourse(state, tenant, body)
    left, applied = await course.edited()
    n = await course.count(left)
    if applied is None:
        return {"input_tokens": n}
    n_before = await course.count(without_summaries(body.messages))
    return {"input_tokens": n, "context_management": {"original_input_tokens": n_before}}

"""``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's clients expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from kvweave.run.sample import Sampling
from kvweave.serve.anthropic.blocks import DialogueMessage
from kvweave.serve.anthropic.editing import ChatContent, DialogueMessages, edit_messages
from kvweave.serve.anthropic.reply import MessageReply
from kvweave.serve.anthropic.schemas import CountRequest, MessagesRequest
from kvweave.serve.chat.asked import Asked, prompt_of
from kvweave.serve.chat.count import about_tokens, count_tokens, segment_size
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.named import other_model
from kvweave.serve.reuse.render import Prompt, PromptSegment
from kvweave.serve.routes.base import ERRORS, STREAMED, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState
from kvweave.serve.stream import respond

# in Anthropic's shape, see `Problem`
REFUSED: dict[int | str, dict[str, Any]] = {
    529 if status == 503 else status: {"description": about["description"]}
    for status, about in ERRORS.items()
}
router = APIRouter(tags=["anthropic"], responses=REFUSED, route_class=StrictRoute)


@router.post("/v1/messages", response_model=None, responses=STREAMED)
async def messages(body: MessagesRequest, tenant: Tenant, state: The) -> Response:
    """Answer a conversation; what of it is known is found again, at any position.

    ``context_management`` clears old results and thinking before the model sees them.
    """
    if (refused := other_model(state, body.model)) is not None:
        return refused
    body.check()
    left, applied = body.messages, None
    if body.context_management is not None:
        count = _counter(state, tenant, body, about_tokens)
        left, applied = await _edited(state, tenant, body, count)
    # a grammar may take a second to compile, the first time
    asked = await asyncio.to_thread(Asked.of_chat, state, tenant, body.asked(left))
    return await respond(asked.events(), MessageReply(asked, body, applied))


@router.post("/v1/messages/count_tokens", response_model=None)
async def tokens(body: CountRequest, tenant: Tenant, state: The) -> dict[str, Any] | Response:
    """Say how many tokens the prompt of such a request has, before and after it is edited."""
    if (refused := other_model(state, body.model)) is not None:
        return refused
    body.check()
    count = _counter(state, tenant, body, count_tokens)
    n = await state.call(tenant, lambda engine: count(body.messages))
    if body.context_management is None:
        return {"input_tokens": n}
    left, _ = await _edited(state, tenant, body, count)
    n_left = await state.call(tenant, lambda engine: count(left))
    return {"input_tokens": n_left, "context_management": {"original_input_tokens": n}}


async def _edited(
    state: ServerState, tenant: str, body: CountRequest, count: Callable[[DialogueMessages], int]
) -> tuple[list[DialogueMessage], list[dict[str, Any]]]:
    """Return what the edits of a request leave of its messages, and what was applied."""
    assert body.context_management is not None
    edits, size = body.context_management.edits, _sizer(state, tenant)
    return await state.call(tenant, lambda engine: edit_messages(edits, body.messages, count, size))


def _counter(
    state: ServerState,
    tenant: str,
    body: CountRequest,
    how: Callable[[ServerState, str, Prompt], int],
) -> Callable[[DialogueMessages], int]:
    """Return what counts the tokens of a whole prompt, in the driver's thread."""
    return lambda left: how(state, tenant, prompt_of(state, body.ask(left, Sampling(), None)))


def _sizer(state: ServerState, tenant: str) -> Callable[[ChatContent], int]:
    """Return what counts the tokens of a content, in the driver's thread."""

    def size(content: ChatContent) -> int:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        segments = [
            PromptSegment("tool", part.get("text", ""), "", False, part.get("name"))
            for part in parts
        ]
        return sum(segment_size(state, tenant, segment) for segment in segments)

    return size

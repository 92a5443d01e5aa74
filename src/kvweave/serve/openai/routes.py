"""``/v1/chat/completions``, ``/v1/completions``, as OpenAI's clients expect them.

Tools go through the model's chat template, and calls come back as its family writes them
(`serve/chat/families.py`). Messages may have parts ``{"type": "chunk", "name": "docs/faq"}``.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response

from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.learned import learning
from kvweave.serve.chat.prompts import completion_prompt
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.named import other_model
from kvweave.serve.openai.reply import ResponseBuilder
from kvweave.serve.openai.schemas import ChatRequest, CompletionRequest
from kvweave.serve.routes.base import ERRORS, STREAMED
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState
from kvweave.serve.stream import respond


def make_router(state: ServerState) -> APIRouter:
    """Return the routes of one server."""
    router = APIRouter(tags=["openai"], responses=ERRORS, route_class=StrictRoute)

    @router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat(body: ChatRequest, tenant: Tenant) -> Response:
        """Answer a conversation; what of it is known is found again, at any position.

        Tools are shown to the model by its chat template; its calls come back as ``tool_calls``.
        """
        if (refused := other_model(state, body.model)) is not None:
            return refused
        body.check()
        ask = body.ask(state.renderer.template)
        # a grammar may take a second to compile, the first time
        asked = await asyncio.to_thread(Asked.of_chat, state, tenant, ask)
        return await respond(learning(asked, ask), ResponseBuilder(state, asked, body))

    @router.post("/v1/completions", response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, tenant: Tenant) -> Response:
        """Continue text or tokens."""
        if (refused := other_model(state, body.model)) is not None:
            return refused
        limit = 16 if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, body.logprobs or 0)
        prompts = [completion_prompt(prompt) for prompt in body.prompts()]
        given = body.grammar()
        grammar = None
        if given is not None:
            grammar = await asyncio.to_thread(state.grammars.compile, given)
        how, n = body.how, body.n_choices
        private = body.store is False and not state.options.keep_unstored
        asked = Asked(
            state, tenant, prompts, sampling, limit, how, n, False, private, grammar=grammar
        )
        return await respond(asked.events(), ResponseBuilder(state, asked, body))

    return router

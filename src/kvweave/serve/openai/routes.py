"""``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, as OpenAI's clients expect them.

Tools go through the model's chat template, and calls come back as its family writes them
(`serve/chat/families.py`). Messages may have parts ``{"type": "chunk", "name": "docs/faq"}``.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from kvweave.serve.chat.asked import Asked, MakePrompt
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.problems import make
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.openai.reply import ResponseBuilder
from kvweave.serve.openai.schemas import ChatRequest, CompletionRequest
from kvweave.serve.reuse.render import Prompt, PromptSegment
from kvweave.serve.routes.base import STREAMED
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState
from kvweave.serve.stream import respond


def make_router(state: ServerState) -> APIRouter:
    """Return the routes of one server."""
    router = APIRouter(tags=["openai"], route_class=StrictRoute)
    started = int(time.time())
    name = state.options.model_name
    model = {"id": name, "object": "model", "created": started, "owned_by": "kvweave"}
    model |= {"max_model_len": state.options.max_prompt or state.limit}

    @router.get("/v1/models")
    async def models(tenant: Tenant) -> dict[str, Any]:
        """List the one model there is, under all its names."""
        names = (name, *state.options.aliases)
        return {"object": "list", "data": [model | {"id": each} for each in names]}

    @router.get("/v1/models/{wanted:path}", response_model=None)
    async def one_model(wanted: str, tenant: Tenant) -> dict[str, Any] | Response:
        """Describe the model."""
        return (
            model | {"id": wanted} if state.options.answers_to(wanted) else _no_model(wanted, name)
        )

    @router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat(body: ChatRequest, tenant: Tenant) -> Response:
        """Answer a conversation; what of it is known is found again, at any position.

        Tools are shown to the model by its chat template; its calls come back as ``tool_calls``.
        """
        if not state.options.answers_to(body.model):
            return _no_model(body.model, name)
        body.check()
        ask = body.ask()
        # a grammar may take a second to compile, the first time
        asked = await asyncio.to_thread(Asked.of_chat, state, tenant, ask)
        return await respond(asked.events(), ResponseBuilder(state, asked, body))

    @router.post("/v1/completions", response_model=None, responses=STREAMED)
    async def completions(body: CompletionRequest, tenant: Tenant) -> Response:
        """Continue text or tokens."""
        if not state.options.answers_to(body.model):
            return _no_model(body.model, name)
        limit = 16 if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, body.logprobs or 0)
        prompts = [_completion_prompt(prompt) for prompt in body.prompts()]
        given = body.grammar()
        grammar = None
        if given is not None:
            grammar = await asyncio.to_thread(state.grammars.compile, given)
        how, n = body.how, body.n_choices
        private = body.store is False
        asked = Asked(
            state, tenant, prompts, sampling, limit, how, n, False, private, grammar=grammar
        )
        return await respond(asked.events(), ResponseBuilder(state, asked, body))

    return router


def _no_model(wanted: str, name: str) -> Response:
    return make(
        404, f"no model {wanted!r}", code="model_not_found", param="model", hint=f"it is {name!r}"
    ).response


def _completion_prompt(given: str | list[int]) -> MakePrompt:
    """Return what makes the prompt; a BOS the engine begins with anyway is not put twice."""

    def prompt(state: ServerState) -> Prompt:
        engine, base = state.driver.engine, state.sessions.engine_base
        tokens = tokens_of(engine, given)
        begin = [] if base is None else [int(t) for t in engine.table.tokens(base)]
        text = given if isinstance(given, str) else state.assembler.text(tokens)
        if begin and tokens[: len(begin)] == begin:
            tokens = tokens[len(begin) :]
        segment = PromptSegment("document", text, "prompt", True, tokens=tuple(tokens))
        return Prompt((segment,) if tokens else (), "", "")

    return prompt

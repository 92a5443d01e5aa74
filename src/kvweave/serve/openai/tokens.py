"""``/tokenize``, ``/detokenize`` and ``/version``, as vLLM's clients expect them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field, StrictBool, StrictInt, model_validator

from kvweave.engine import Engine
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.serve.chat.prompts import completion_prompt, prompt_tokens
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.messages import (
    MAX_TOOLS,
    MAX_VARIABLES,
    Messages,
    plain_messages,
    plain_tools,
)
from kvweave.serve.openai.named import other_model
from kvweave.serve.routes.base import ERRORS, STRICT, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState

router = APIRouter(tags=["openai"], responses=ERRORS, route_class=StrictRoute)


class ServerVersion(BaseModel):
    """Of the server's package."""

    version: str


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a prompt, or messages as of a chat."""

    model_config = STRICT

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenList(BaseModel):
    """The tokens of a prompt, and how many the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = STRICT

    model: str | None = None
    tokens: list[Annotated[StrictInt, Field(ge=0)]]


class DetokenizedText(BaseModel):
    """What tokens say."""

    prompt: str


@router.get("/version", response_model=ServerVersion)
async def show_version(tenant: Tenant) -> dict[str, str]:
    """Tell the version of the server."""
    return {"version": version("kvweave")}


@router.post("/tokenize", response_model=TokenList, response_model_exclude_none=True)
async def tokenize(tenant: Tenant, the: The, body: TokenizeRequest) -> dict[str, Any] | Response:
    """Return the tokens that a completion or a chat of this prompt would have."""
    if (refused := other_model(the, body.model)) is not None:
        return refused

    def work(engine: Engine) -> dict[str, Any]:
        tokens = _of_messages(the, tenant, body) if body.messages else _of_text(the, tenant, body)
        told = {"count": len(tokens), "max_model_len": the.longest, "tokens": tokens}
        if body.return_token_strs:
            tokenizer: Any = engine.runner.tokenizer
            told["token_strs"] = [tokenizer.convert_ids_to_tokens(token) for token in tokens]
        return told

    return await the.call(tenant, work)


@router.post("/detokenize", response_model=DetokenizedText)
async def detokenize(
    tenant: Tenant, the: The, body: DetokenizeRequest
) -> dict[str, str] | Response:
    """Return the text of tokens, special ones too."""
    if (refused := other_model(the, body.model)) is not None:
        return refused

    def work(engine: Engine) -> dict[str, str]:
        tokenizer: Any = engine.runner.tokenizer
        if tokenizer is None:
            raise InvalidArgument(
                "tokens", "this model came without a tokenizer", "serve a model that has one"
            )
        if len(body.tokens) > the.limit:
            raise ContextTooLong(len(body.tokens), the.limit)
        if body.tokens and max(body.tokens) >= engine.runner.n_vocab:
            raise InvalidArgument(
                "tokens",
                f"{max(body.tokens)} is no token of this model",
                f"ids are in 0..{engine.runner.n_vocab - 1}",
            )
        return {"prompt": tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    return await the.call(tenant, work)


def _of_text(the: ServerState, tenant: str, body: TokenizeRequest) -> list[int]:
    """Return the tokens of a prompt. Raises InvalidArgument."""
    if body.add_generation_prompt is not None or body.continue_final_message:
        raise InvalidArgument("add_generation_prompt", "it is of messages", "leave it out")
    if body.tools or body.chat_template_kwargs:
        raise InvalidArgument("tools", "they are of messages", "leave them out")
    prompt = completion_prompt(body.prompt or "")(the)
    return prompt_tokens(the, tenant, prompt, begin=body.add_special_tokens is not False)


def _of_messages(the: ServerState, tenant: str, body: TokenizeRequest) -> list[int]:
    """Return the tokens of messages. Raises InvalidArgument."""
    if body.add_special_tokens:
        raise InvalidArgument("add_special_tokens", "the chat template adds them", "leave it out")
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        reason = "a message that is gone on with has none behind it"
        raise InvalidArgument("add_generation_prompt", reason, "set it to false")
    messages, _ = plain_messages(body.messages or [], the.renderer.template)
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidArgument(
            "continue_final_message", "the last message is no assistant's", "set it to false"
        )
    tools, _ = plain_tools(body.tools or [], the.renderer.template)
    variables, _ = the.renderer.template.variables(body.chat_template_kwargs or {})
    prompt = the.renderer.render(messages, tools or None, variables, continues=continues)
    return prompt_tokens(the, tenant, prompt, header=body.add_generation_prompt is not False)

"""``/v1/embeddings``: vectors of texts, made of the model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field, StrictInt

from kvweave.engine import Engine
from kvweave.errors import ContextTooLong, InvalidArgument, Overloaded
from kvweave.run.embed import Embedding, head_of
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.openai.named import other_model
from kvweave.serve.routes.base import ERRORS, STRICT, Int, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState
from kvweave.weave.naming import vectors_holder
from kvweave.weave.special import PlainText

router = APIRouter(tags=["openai"], responses=ERRORS, route_class=StrictRoute)

MAX_INPUTS = 2048  # texts of one request
PAUSE = 0.5  # seconds, where too much waits to give memory back

_Ids = list[StrictInt]


class EmbeddingRequest(BaseModel):
    """Body of ``POST /v1/embeddings``: a text or token ids, or a list of these."""

    model_config = STRICT

    input: str | _Ids | Annotated[list[str] | list[_Ids], Field(max_length=MAX_INPUTS)]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None
    user: str | None = None

    def inputs(self) -> list[str | list[int]]:
        """Return the texts. Raises InvalidArgument for none, and for what cannot be done."""
        if self.dimensions is not None:
            reason = "vectors have as many as the model's hidden states"
            raise InvalidArgument("dimensions", reason, "leave it out")
        given = self.input
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        if not given:
            raise InvalidArgument("input", "it is empty", "send some text, or token ids")
        return [each for each in given if not isinstance(each, int)]


@router.post("/v1/embeddings", response_model=None)
async def embeddings(tenant: Tenant, the: The, body: EmbeddingRequest) -> dict[str, Any] | Response:
    """Return a vector of each text: the mean of the model's last hidden states, of length 1.

    Text cannot have special tokens in it. What contexts begin with is read before it, and not
    counted in. Nothing is kept.
    """
    if (refused := other_model(the, body.model)) is not None:
        return refused
    inputs = body.inputs()

    def begin(engine: Engine) -> list[int]:
        head_of(engine.runner)
        base = the.sessions.engine_base
        return [] if base is None else [int(token) for token in engine.table.tokens(base)]

    front = await the.call(tenant, begin)
    texts = [await the.call(tenant, partial(_tokens, the, given, len(front))) for given in inputs]
    data = []
    for index, tokens in enumerate(texts):
        vector = await _vector(the, tenant, front, tokens)
        told: object = vector.tolist()
        if body.encoding_format == "base64":
            told = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": told})
    n = sum(map(len, texts))
    usage = {"prompt_tokens": n, "total_tokens": n}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _tokens(the: ServerState, given: str | list[int], n_front: int, engine: Engine) -> list[int]:
    """Return the tokens of one input. Raises InvalidArgument, ContextTooLong."""
    text = PlainText(given) if isinstance(given, str) else given
    tokens = tokens_of(engine, text)
    if not tokens:
        raise InvalidArgument("input", "one of them is empty", "leave it out, or send some text")
    if n_front + len(tokens) > the.longest:
        raise ContextTooLong(n_front + len(tokens), the.longest)
    return tokens


async def _vector(
    the: ServerState, tenant: str, front: list[int], tokens: list[int]
) -> NDArray[Any]:
    """Return the vector of a text; answers of others go on between its pieces.

    Its rows count as those of contexts do. Raises OverBudget, OverQuota.
    """
    holder = vectors_holder(uuid4().hex, tenant)

    def begin(engine: Engine) -> Embedding:
        made = Embedding(engine.runner, [*front, *tokens], len(front))
        engine.shelf.charge(holder, made.n_bytes)
        return made

    async def end() -> None:
        while not the.driver.stopping:
            try:
                return await the.call(tenant, lambda engine: engine.shelf.charge(holder, 0))
            except Overloaded:
                await asyncio.sleep(PAUSE)

    async with the.embedding.turn(tenant):  # one at a time: more do not make the others sooner
        try:
            made = await the.call(tenant, begin)
            while not made.is_done:
                await the.call(tenant, lambda _: made.step())
            return made.vector
        finally:  # also where the client went away
            await asyncio.shield(asyncio.ensure_future(end()))

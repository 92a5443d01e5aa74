"""What the routers share: the running server, checked references, documented errors."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    model_validator,
)

from kvweave.serve.state import ServerState
from kvweave.weave.special import PlainText

MAX_REF = 256  # characters of a name, ``#id`` or part, with a slice behind it

MAX_STOPS, MAX_STOP = 64, 256  # texts that end an answer, characters of one

Stop = Annotated[str, StringConstraints(max_length=MAX_STOP)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
ChunkRef = Annotated[str, StringConstraints(min_length=1, max_length=MAX_REF)]
PathRef = Annotated[str, Path(min_length=1, max_length=MAX_REF, description="a name or `#17`")]
PathPattern = Annotated[
    str,
    Path(min_length=1, max_length=MAX_REF, description="a name, `#17`, a glob, or `docs/`"),
]


async def _state(request: Request) -> ServerState:  # no thread of its own
    state: ServerState = request.app.state.kvweave
    return state


The = Annotated[ServerState, Depends(_state)]
"""A route's parameter of this type is the running server."""
# of Anthropic's clients, where they call something a beta
BetaQuery = Annotated[bool | None, Query(alias="beta", description="says nothing")]


def _number(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    return value


# of a body: pydantic's own take true and "1" for 1, which their JSON schema does not
Int = Annotated[int, BeforeValidator(_number)]
Num = Annotated[float, BeforeValidator(_number)]
STRICT = ConfigDict(extra="forbid")  # of requests: fields that are not known are refused


class Content(BaseModel):
    """Text, or token ids."""

    model_config = STRICT

    text: str | None = None
    tokens: list[StrictInt] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Content:
        if not self._is_complete():
            raise ValueError("give either text or tokens")
        return self

    def _is_complete(self) -> bool:
        return (self.text is None) != (self.tokens is None)

    @property
    def content(self) -> str | list[int]:
        """What is given; text cannot have special tokens in it."""
        return PlainText(self.text) if self.text is not None else self.tokens or []


class ErrorBody(BaseModel):
    """What went wrong; more fields tell which name, id, limit."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    code: str
    param: str | None = None
    hint: str = ""


class ErrorResponse(BaseModel):
    """Every error has this shape."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "the request makes no sense",
        401: "no API key, or an unknown one",
        403: "sent by a page of another origin, or to another host name",
        404: "there is no such thing in this namespace",
        408: "the request did not arrive in time",
        409: "what there is forbids it",
        410: "what it stood for is gone",
        412: "the context has another version by now",
        422: "its idempotency key was another request's",
        413: "the request is too large",
        414: "the address is too long",
        429: "too much waits (see Retry-After), or the namespace is over its quota",
        500: "the server failed",
        507: "the server's disk is full",
        503: "the engine's memory is full, or the server is stopping",
    }.items()
}

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or its events when `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}

"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code, hint, ...}}``.

Below ``/v1/messages``, and where a client says that it is Anthropic's, they are as those expect them,
whoever refuses a request.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvweave import errors
from kvweave.errors import KVWeaveError
from kvweave.serve.guard.malformed import faults

log = logging.getLogger("kvweave.serve")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request under way
MESSAGES = "/v1/messages"  # what is below it speaks Anthropic's API
OF_MESSAGES: ContextVar[bool] = ContextVar("of_messages", default=False)  # the request under way

VERSION = b"anthropic-version"  # a header that only Anthropic's clients send

STATUS: Sequence[tuple[type[KVWeaveError], int]] = (
    (errors.ChunkNotFound, 404),
    (errors.ContextNotFound, 404),
    (errors.MemoryNotFound, 404),
    (errors.NotStored, 404),
    (errors.SummaryForgotten, 410),
    (errors.NameTaken, 409),
    (errors.ChunkPinned, 409),
    (errors.ChunkInUse, 409),
    (errors.CannotMove, 409),
    (errors.ContextBusy, 409),
    (errors.ContextChanged, 412),
    (errors.ModelMismatch, 409),
    (errors.ChunkLost, 410),
    (errors.ChunkError, 400),
    (errors.WeaveError, 400),
    (errors.OverBudget, 503),
    (errors.Overloaded, 429),
    (errors.IdempotencyKeyReused, 422),
    (errors.OverQuota, 429),
)
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MESSAGES_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
NO_ROUTE = "a verb stands behind a colon, as in /v1/contexts/chat:ask; GET /openapi.json lists all"
CLOSE = {"Connection": "close"}  # for answers to requests that are not read to their end
# Their messages name files of the server, which are not the client's business.
INTERNAL = (errors.CorruptChunk, errors.LoadFailed, errors.FormatTooNew, errors.ModelUnusable)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error as HTTP says it."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        id = REQUEST_ID.get()
        if OF_MESSAGES.get():
            return {"type": "error", "error": self._of_messages()[1], "request_id": id or None}
        return {"error": self.error | ({"request_id": id} if id else {})}

    @property
    def response(self) -> JSONResponse:
        status = self._of_messages()[0] if OF_MESSAGES.get() else self.status
        return JSONResponse(self.body, status, self.headers)

    def _of_messages(self) -> tuple[int, dict[str, Any]]:
        """Return status and error in Anthropic's terms."""
        status = 529 if self.status == 503 else self.status
        kind = MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        told = {"type": kind, "message": self.error["message"]}
        if self.error["code"] == "context_length_exceeded":  # the words agents look for
            n, limit = self.error["n"], self.error["limit"]
            told["message"] = f"prompt is too long: {n} tokens > {limit} maximum"
        return status, {key: value for key, value in self.error.items() if value} | told


def speaks_messages(scope: Scope) -> bool:
    """Tell whether a request is of a client of Anthropic's."""
    path = scope["path"]
    below = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return below or any(name.lower() == VERSION for name, _ in scope["headers"])


def make(
    status: int, message: str, *, code: str = "", param: str | None = None, hint: str = "",
    headers: Mapping[str, str] | None = None, **data: object,
) -> Problem:  # fmt: skip
    """Return a problem that is no KVWeaveError; ``code`` is by default the status in words."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = code or HTTPStatus(status).name.lower()
    error = {"message": message, "type": kind, "param": param, "code": code, "hint": hint}
    return Problem(status, error | data, dict(headers or {}))


def problem_of(error: BaseException, *, stopping: bool = False) -> Problem:
    """Return what a client is told of ``error``; the unexpected is logged under an id.

    ``stopping``: an overloaded server that will not come back is not there (503).
    """
    if isinstance(error, RequestValidationError):
        return _malformed(error)
    if isinstance(error, HTTPException):
        hint = NO_ROUTE if error.status_code in (404, 405) else ""
        return make(error.status_code, str(error.detail), hint=hint, headers=error.headers)
    if isinstance(error, errors.NoSpace | errors.HomeMoved):
        return _of_disk(error)
    known = [status for kind, status in STATUS if isinstance(error, kind)]
    if not isinstance(error, KVWeaveError) or not known or isinstance(error, INTERNAL):
        return _unexpected(error)
    status = 503 if stopping and isinstance(error, errors.Overloaded) else known[0]
    told = error.to_dict()
    told["param"] = told.pop("argument", None)
    told["code"] = snake_case(str(told["code"]))
    told["type"] = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, errors.ContextTooLong):
        told["code"] = "context_length_exceeded"
    if isinstance(error, errors.OverQuota):
        told["code"] = told["type"] = "insufficient_quota"
        return Problem(status, told)
    if status not in (429, 503) and not isinstance(error, errors.ContextBusy):
        return Problem(status, told)
    seconds = error.data.get("retry_after", 1 if status == 409 else 10)
    return Problem(status, told, {"Retry-After": f"{float(str(seconds)):.0f}"})


def snake_case(name: str) -> str:
    """Return ``chunk_not_found`` for ``ChunkNotFound``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _malformed(error: RequestValidationError) -> Problem:
    first, *more = faults(error.errors(), error.body, 1)
    place = first.tagged if OF_MESSAGES.get() else first.path
    message = f"{place}: {first.message}" if place else first.message
    if more:
        message += f" (and {len(more)} more)"
    return make(400, message, code="invalid_request", param=first.path or None)


def _unexpected(error: BaseException) -> Problem:
    """Log the error with its trace; the client gets the id to ask about, and no insight."""
    id = uuid.uuid4().hex[:12]
    log.error("error %s of request %s", id, REQUEST_ID.get() or "-", exc_info=error)
    if isinstance(error, errors.CorruptChunk):
        message, hint = "a stored chunk is damaged", "remove it and put its text again"
        return make(500, message, code="corrupt_chunk", hint=hint, id=id)
    return make(500, "the server failed", code="internal_error", hint=f"its log has {id}", id=id)


def _of_disk(error: errors.NoSpace | errors.HomeMoved) -> Problem:
    """Log where it is, which is not the client's business."""
    log.error("request %s: %s", REQUEST_ID.get() or "-", error)
    if isinstance(error, errors.NoSpace):
        hint = "what is stored is still there; try again when its operator has made room"
        return make(507, "the server's disk is full", code="no_space", hint=hint)
    hint = "nothing was changed; try again when its operator has put it back"
    message = "the server's home directory was moved, removed or replaced"
    return make(503, message, code="home_moved", hint=hint)  # nobody knows when: no Retry-After


def install(app: FastAPI) -> None:
    """Let the app answer every error that leaves a route in this shape."""

    def answer(request: Request, error: Exception) -> JSONResponse:
        state = getattr(request.app.state, "kvweave", None)
        of_system = (errors.StoreError, errors.NoSpace, errors.HomeMoved)  # and not of one chunk
        if type(error) in of_system:
            request.app.state.kvweave.disk_failed = time.monotonic()
        return problem_of(error, stopping=bool(state and state.driver.stopping)).response

    for kind in (KVWeaveError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)

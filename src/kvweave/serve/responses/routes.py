"""``/v1/responses``: answered, read again, deleted, counted, compacted and taken back."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

from kvweave.errors import InvalidArgument
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.named import other_model
from kvweave.serve.responses.compact import compact, given
from kvweave.serve.responses.course import ResponseCourse
from kvweave.serve.responses.reply import usage_of
from kvweave.serve.responses.schemas import ResponsesRequest
from kvweave.serve.responses.store import page
from kvweave.serve.routes.base import ERRORS, STREAMED, The
from kvweave.serve.routes.strict import SavingRoute
from kvweave.serve.stream import respond

router = APIRouter(prefix="/v1", tags=["responses"], responses=ERRORS, route_class=SavingRoute)

PageLimit = Annotated[int, Query(ge=0, le=100)]
PageOrder = Literal["asc", "desc"]
PageAfter = Annotated[str | None, Query(max_length=256)]
_Json = dict[str, Any]


@router.post("/responses", response_model=None, responses=STREAMED)
async def create_response(tenant: Tenant, the: The, body: ResponsesRequest) -> Response:
    """Answer items; the response can be gone on from, unless it says ``"store": false``."""
    if (refused := other_model(the, body.model)) is not None:
        return refused
    course = ResponseCourse(the, tenant, body)
    return await respond(course.events(), course.reply)


@router.post("/responses/input_tokens", response_model=None)
async def count_input(tenant: Tenant, the: The, body: ResponsesRequest) -> _Json | Response:
    """Return the tokens that a response would be given, summaries in the place of what they cover."""
    if (refused := other_model(the, body.model)) is not None:
        return refused
    course = ResponseCourse(the, tenant, body)
    n = await course.who.count(course.given())
    return {"object": "response.input_tokens", "input_tokens": n}


@router.post("/responses/compact", response_model=None)
async def compact_response(tenant: Tenant, the: The, body: ResponsesRequest) -> _Json | Response:
    """Have the model write a summary in the place of its answers and of results.

    What comes back is sent in the place of the items. Nothing is thrown away: see
    ``/v1/compactions/ID``, which is not there for ``"store": false``.
    """
    if (refused := other_model(the, body.model)) is not None:
        return refused
    if body.stream:
        raise InvalidArgument("stream", "a compaction comes whole", "leave it out")
    course = ResponseCourse(the, tenant, body)
    item, record, asked = await compact(course.who, course.given(), answered=False)
    if not body.is_private:
        course.store.keep_compaction(record)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": given([*record.items, item], {}),
        "usage": usage_of(asked, record.n_written),
        "kvweave": {"compaction": record.told(), "ignored": body.ignored(the)},
    }


@router.get("/responses/{id}", response_model=None)
async def get_response(tenant: Tenant, the: The, id: str) -> _Json:
    """Return a stored response."""
    return the.responses.of(tenant).response(id).body


@router.delete("/responses/{id}", response_model=None)
async def delete_response(tenant: Tenant, the: The, id: str) -> _Json:
    """Forget a response; those that went on from it keep what they were given."""
    the.responses.of(tenant).drop(id)
    return {"id": id, "object": "response", "deleted": True}


@router.get("/responses/{id}/input_items", response_model=None)
async def input_items(
    tenant: Tenant,
    the: The,
    id: str,
    limit: PageLimit = 20,
    order: PageOrder = "desc",
    after: PageAfter = None,
) -> _Json:
    """List what a response was given, that of earlier ones too."""
    return page(the.responses.of(tenant).response(id).items, limit, order, after)


@router.get("/compactions/{id}", response_model=None)
async def get_compaction(tenant: Tenant, the: The, id: str) -> _Json:
    """Return a summary, and all items that there were when it was made."""
    return the.responses.of(tenant).compaction(id).told()


@router.post("/compactions/{id}:undo", response_model=None)
async def undo_compaction(tenant: Tenant, the: The, id: str) -> _Json:
    """Have the items themselves given from now on, wherever the summary is sent or stored."""
    return the.responses.of(tenant).take_back(id, undone=True).told()


@router.post("/compactions/{id}:redo", response_model=None)
async def redo_compaction(tenant: Tenant, the: The, id: str) -> _Json:
    """Have the summary given again."""
    return the.responses.of(tenant).take_back(id, undone=False).told()

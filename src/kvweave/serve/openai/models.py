"""``/v1/models``: the one model there is, under all its names, in the shape of who asks.

A client of Anthropic's says so by its header ``anthropic-version``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response

from kvweave.errors import InvalidArgument
from kvweave.serve.anthropic.blocks import EFFORT
from kvweave.serve.guard.access import Tenant
from kvweave.serve.openai.named import other_model
from kvweave.serve.routes.base import ERRORS, BetaQuery, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState

router = APIRouter(tags=["openai"], responses=ERRORS, route_class=StrictRoute)

EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112")
PAGE = 20  # models, as Anthropic's API has it
AnthropicVersion = Annotated[str | None, Header(alias="anthropic-version")]
ModelId = Annotated[str | None, Query(max_length=256)]
_Json = dict[str, Any]


@router.get("/v1/models")
async def models(
    tenant: Tenant,
    the: The,
    version: AnthropicVersion = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = PAGE,
    after_id: ModelId = None,
    before_id: ModelId = None,
    beta: BetaQuery = None,
) -> _Json:
    """List the one model there is, under all its names; in pages for clients of Anthropic's."""
    names = (the.options.model_name, *the.options.aliases)
    if version is None:
        if after_id is not None or before_id is not None:
            name = "before_id" if after_id is None else "after_id"
            raise InvalidArgument(name, "the list is whole", "leave it out")
        return {"object": "list", "data": [_openai(the, name) for name in names]}
    shown, more = _page(names, limit, after_id, before_id)
    return {
        "data": [_anthropic(the, name) for name in shown],
        "has_more": more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


@router.get("/v1/models/{wanted:path}", response_model=None)
async def one_model(
    wanted: str, tenant: Tenant, the: The, version: AnthropicVersion = None, beta: BetaQuery = None
) -> _Json | Response:
    """Describe the model."""
    refused = other_model(the, wanted)
    if refused is not None:
        return refused
    return _openai(the, wanted) if version is None else _anthropic(the, wanted)


def _openai(the: ServerState, name: str) -> _Json:
    return {
        "id": name,
        "object": "model",
        "created": int(the.started),
        "owned_by": "kvweave",
        "max_model_len": the.longest,
    }


def _anthropic(the: ServerState, name: str) -> _Json:
    created = datetime.fromtimestamp(int(the.started), UTC)
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": the.longest,
        "max_tokens": the.limit,
        "capabilities": _capabilities(the),
    }


def _capabilities(the: ServerState) -> _Json:
    """Return what ``/v1/messages`` takes, as the API has it: what is false there is a 400.

    Thinking and effort are taken of every model; they are supported where its template knows them.
    """
    known = the.renderer.template
    thinks = known.knows("enable_thinking") or known.knows("thinking")
    efforts = dict.fromkeys(get_args(EFFORT), True)
    edits = dict.fromkeys(EDITS, True)
    made: _Json = _supported(
        batch=False, citations=False, code_execution=False, image_input=False, pdf_input=False,
        structured_outputs=find_spec("llguidance") is not None,
    )  # fmt: skip
    types = _supported(adaptive=True, disabled=True, enabled=True, between_tools=False)
    made["thinking"] = {"supported": thinks, "types": types}
    effort = thinks or known.knows("reasoning_effort")
    made["effort"] = {"supported": effort, **_supported(**efforts)}
    made["context_management"] = {"supported": True, **_supported(**edits)}
    made["compaction"] = {"supported": True, **_supported(summarize=True)}
    made["server_tools"] = {
        "supported": False,
        **_supported(web_search=False, code_execution=False),
    }
    return made


def _supported(**given: bool) -> _Json:
    return {name: {"supported": there} for name, there in given.items()}


def _page(
    names: Sequence[str], limit: int, after: str | None, before: str | None
) -> tuple[Sequence[str], bool]:
    """Return so many of the names, and whether there are more that way. Raises InvalidArgument."""
    for argument, name in (("after_id", after), ("before_id", before)):
        if name is not None and name not in names:
            raise InvalidArgument(
                argument, f"no model {name!r} is listed", "GET /v1/models lists them"
            )
    if after is not None:
        names = names[names.index(after) + 1 :]
    if before is not None and after is None:
        names = names[: names.index(before)]
        return names[-limit:], len(names) > limit
    return names[:limit], len(names) > limit

"""``/v1/placements``: which chunks have KV here, for routers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from kvweave.serve.guard.access import Tenant
from kvweave.serve.placements import MOST
from kvweave.serve.routes.base import ERRORS, The
from kvweave.serve.routes.strict import StrictRoute

router = APIRouter(
    tags=["server"],
    responses={k: v for k, v in ERRORS.items() if k in (401, 500)},
    route_class=StrictRoute,
)


class ChunkPlace(BaseModel):
    """A chunk that has KV: in which tier, under which names as of now, and the prints of its text."""

    id: int
    digest: str
    names: list[str]
    tier: str
    n_tokens: int
    prints: list[str]


class ChunkPlaces(BaseModel):
    """Chunks that came, moved or went; ``seq`` of ``run`` is where to go on."""

    run: str
    seq: int
    snapshot: bool
    more: bool
    chunks: list[ChunkPlace]
    gone: list[int]


@router.get("/v1/placements", response_model=ChunkPlaces, responses={400: ERRORS[400]})
async def placements(
    tenant: Tenant, the: The,
    run: Annotated[str, Query(max_length=64)] = "",
    since: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=0, le=MOST)] = MOST,
) -> dict[str, Any]:  # fmt: skip
    """Tell a router which chunks have KV, and where: all, or what changed behind ``since`` of ``run``.

    ``prints`` are of a chunk's text (`kvweave.chunk.prints`). ``snapshot``: forget what was known.
    """
    return await the.call(tenant, lambda _: the.placements.read(tenant, run, since, limit))

"""``/v1/chunks/NAME:compress``: leave of a chunk's KV what a token policy keeps."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from kvweave.engine import Engine
from kvweave.serve.guard.access import Tenant
from kvweave.serve.routes.base import ERRORS, STRICT, ChunkRef, PathRef, The
from kvweave.serve.routes.chunks import ChunkList, listing
from kvweave.serve.routes.strict import StrictRoute

router = APIRouter(prefix="/v1/chunks", tags=["chunks"], responses=ERRORS, route_class=StrictRoute)


class Thin(BaseModel):
    """The token policy and its budget, and the name of what it leaves; null: the chunk's own."""

    model_config = STRICT

    keep: ChunkRef
    to: ChunkRef | None = None


@router.post("/{ref:path}:compress", response_model=ChunkList)
async def compress(tenant: Tenant, the: The, ref: PathRef, body: Thin) -> dict[str, Any]:
    """Leave of a chunk's KV what a token policy keeps; ``full`` computes all of it again."""

    def work(engine: Engine) -> dict[str, Any]:
        n = engine.table.resolve(ref, tenant).n_tokens
        the.quota.check(engine, tenant, [n], [body.to or ref])
        return listing([engine.compress(ref, body.keep, to=body.to, namespace=tenant)])

    return await the.call(tenant, work)

"""``/v1/chunks/NAME:compress``: leave of a chunk's KV what a token policy keeps."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvweave.engine import Engine
from kvweave.keep.tokens.spec import Keep
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.routes.base import ERRORS, ChunkRef, PathRef, The
from kvweave.serve.routes.chunks import ChunkList, listing
from kvweave.serve.routes.strict import DryQuery, DryRun, StrictRoute, is_dry
from kvweave.weave.putting import compressing

router = APIRouter(prefix="/v1/chunks", tags=["chunks"], responses=ERRORS, route_class=StrictRoute)


class Thin(DryRun):
    """The token policy and its budget, and the name of what it leaves; null: the chunk's own."""

    keep: ChunkRef
    to: ChunkRef | None = None


@router.post("/{ref:path}:compress", response_model=ChunkList)
async def compress(
    tenant: Tenant, the: The, ref: PathRef, body: Thin, dry: DryQuery = False
) -> dict[str, Any]:
    """Leave of a chunk's KV what a token policy keeps; ``full`` computes all of it again."""

    def work(engine: Engine) -> Task[dict[str, Any]]:
        n = engine.table.resolve(ref, tenant).n_tokens
        the.quota.check(engine, tenant, [n], [body.to or ref])
        if is_dry(dry, body):
            made = engine.compress(ref, body.keep, to=body.to, namespace=tenant, dry_run=True)
        else:
            made = yield from compressing(engine.maker, ref, Keep.parse(body.keep), body.to, tenant)
        return listing([made])

    return await the.run(tenant, work)

"""``/v1/chunks/PATTERN:place``: where KV rests."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter

from kvweave.chunk.files import Entry, Files
from kvweave.chunk.identity import TierName
from kvweave.engine import Engine
from kvweave.errors import ChunkNotFound
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.routes.base import ERRORS, PathPattern, The
from kvweave.serve.routes.chunks import ChunkList, listing
from kvweave.serve.routes.strict import DryQuery, DryRun, StrictRoute, is_dry

router = APIRouter(prefix="/v1/chunks", tags=["chunks"], responses=ERRORS, route_class=StrictRoute)

SLICE = 0.02  # seconds of moving between two steps; one chunk at least


class PlaceChunks(DryRun):
    """Where the KV shall rest."""

    tier: TierName
    codec: str | None = None


@router.post("/{pattern:path}:place", response_model=ChunkList)
async def place(
    tenant: Tenant, the: The, pattern: PathPattern, body: PlaceChunks, dry: DryQuery = False
) -> dict[str, Any]:
    """Move KV to a tier; ``none`` keeps only the tokens. Where it fails, some was moved."""
    how: dict[str, Any] = {"codec": body.codec, "namespace": tenant}

    def look(engine: Engine) -> Task[list[Entry]]:
        made = engine.place(pattern, body.tier, dry_run=True, **how)
        if not is_dry(dry, body) and body.tier != "none":
            for entry in made:
                yield from engine.maker.computing(entry.id, tenant)
        return made

    made = await the.run(tenant, look)
    if is_dry(dry, body):
        return listing(made)
    left = [entry.id for entry in reversed(made)]

    def move(engine: Engine) -> None:
        until = time.monotonic() + SLICE
        while left:
            with suppress(ChunkNotFound):  # removed since
                engine.place(f"#{left.pop()}", body.tier, **how)
            if time.monotonic() > until:
                break

    while left:  # others' answers go on in between
        await the.call(tenant, move)
    moved = {entry.id for entry in made}

    def told(engine: Engine) -> dict[str, Any]:
        there = Files(engine.table, tenant).ls(pattern)
        return listing([entry for entry in there if entry.id in moved])

    return await the.call(tenant, told)

"""What the server is to answer and does not yet: routes for tests of the client, over what is there.

They go when the server has them.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request

from kvweave.engine import Engine
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.routes import chunks, contexts, system
from kvweave.serve.routes.base import The
from kvweave.serve.routes.contexts import on, parts_of, view_of
from kvweave.weave.context import Context
from kvweave.weave.special import PlainText

router = APIRouter(prefix="/v1", include_in_schema=False)


@router.post("/contexts:compose", status_code=201)
async def compose(tenant: Tenant, the: The, body: contexts.Compose) -> Any:
    return await contexts.compose(tenant, the, body)


def _ref(context: Context, ref: Any) -> Any:
    if not isinstance(ref, dict):
        return ref
    return next((p for p in context.parts if p.uid == ref["uid"]), str(ref))


def _edit(the: The, engine: Engine, tenant: str, context: Context, body: dict[str, Any]) -> Any:
    verb = body.pop("verb")
    if verb == "drop":
        return context.drop(*(_ref(context, r) for r in body["parts"]), mode=body.get("mode"))
    if verb == "reorder":
        return context.reorder([_ref(context, r) for r in body["order"]])
    if verb == "message":
        return context.message(body["role"], PlainText(body["content"]))
    if verb == "replace":
        ref, kind = _ref(context, body.pop("part")), body.pop("kind")
        content = tokens_of(engine, contexts.Content(**body).content)
        return context.replace(ref, content, kind=kind)
    given = contexts.Append(**body)
    at = len(context.parts) if given.at is None else given.at
    if given.chunk is None:
        tokens = tokens_of(engine, given.content)
        return context.insert(at, tokens, kind=given.kind, name=given.name)
    if given.start is None:
        return context.insert_chunk(at, given.chunk)
    return context.insert_slice(at, given.chunk, given.start, given.stop or 0)


@router.post("/contexts/{name:path}:edit")
async def edit(tenant: Tenant, the: The, name: str, request: Request) -> Any:
    edits = (await request.json())["edits"]

    def work(engine: Engine, context: Context) -> Any:
        with context.edit():
            made = [_edit(the, engine, tenant, context, each) for each in edits]
        entries = parts_of(engine, context)
        uids = {entry["uid"]: entry for entry in entries}
        return view_of(engine, the, context) | {
            "version": 1,
            "made": [part and uids[part.uid] for part in made],
        }

    return await on(the, tenant, name, work)


def _one(verb: str) -> Any:
    async def route(tenant: Tenant, the: The, name: str, request: Request) -> Any:
        body = await request.json()

        def work(engine: Engine, context: Context) -> Any:
            part = _edit(the, engine, tenant, context, {"verb": verb, **body})
            if part is None:
                return view_of(engine, the, context)
            return parts_of(engine, context)[context.index(part)]

        return await on(the, tenant, name, work)

    return route


for _verb in ("drop", "replace", "reorder"):
    router.post(f"/contexts/{{name:path}}:{_verb}")(_one(_verb))


@router.post("/chunks:put", status_code=201)
async def put_many(tenant: Tenant, the: The, request: Request) -> Any:
    body = await request.json()

    def work(engine: Engine) -> Any:
        with engine.table.transaction():
            more = {"replace": body["replace"], "durable": body["durable"]}
            return {
                "data": [
                    chunks.store(
                        engine, the, tenant, the.new_name(item.pop("name")),
                        chunks.PutChunk(**item, **more),
                    )
                    for item in body["items"]
                ]
            }  # fmt: skip

    return await the.call(tenant, work)


@router.post("/chunks/{pattern:path}:denoise")
async def denoise(tenant: Tenant, the: The, pattern: str) -> Any:
    def work(engine: Engine) -> Any:
        files = chunks.Files(engine.table, tenant)
        cold = files.find(pattern, tier="none")
        engine.denoise()
        return chunks.listing([files.stat(entry.name) for entry in cold])

    return await the.call(tenant, work)


@router.get("/status")
async def status(tenant: Tenant, the: The) -> Any:
    def work(engine: Engine) -> Any:
        move = engine.can("move")
        return {"can": {"move": {"ok": move.ok, "reason": move.reason}}}

    return await system.status(tenant, the) | await the.call(tenant, work)


def newer(app: FastAPI) -> FastAPI:
    """Return the app with these routes before its own."""
    app.router.routes[:0] = router.routes
    return app

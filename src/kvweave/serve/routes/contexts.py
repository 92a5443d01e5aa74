"""``/v1/contexts``: contexts are opened, listed, woven, checked, forked and closed."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field, StrictInt

from kvweave.config import BaseMode
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import check_filled, plain, sizes_of, tokens_of
from kvweave.serve.routes.base import ERRORS, STRICT, ChunkRef, Num, The
from kvweave.serve.routes.named import OnContext
from kvweave.serve.routes.shown import ContextView, Summary, SummaryList, summary_of, view_of
from kvweave.serve.routes.strict import StrictRoute
from kvweave.weave.context import Context
from kvweave.weave.parts import Mode, Positions
from kvweave.weave.special import PlainText

router = APIRouter(prefix="/v1", tags=["contexts"], responses=ERRORS, route_class=StrictRoute)

Share = Annotated[Num, Field(ge=0, le=1, allow_inf_nan=False)]
Nats = Annotated[Num, Field(ge=0, allow_inf_nan=False)]
_Json = dict[str, Any]


class Weave(BaseModel):
    """How to weave; null leaves it to the context."""

    model_config = STRICT

    repair: ChunkRef | None = None
    share: Share | None = None
    max_drift: Nats | None = None


class Refine(BaseModel):
    """How many rows to recompute at most; null is all."""

    model_config = STRICT

    n_rows: Annotated[StrictInt, Field(ge=1)] | None = None


class New(Weave):
    """A context to open."""

    name: ChunkRef
    system: str | None = None
    prune: Mode | None = None
    positions: Positions | None = None
    keep: ChunkRef | None = None
    bases: BaseMode | None = None


class Compose(Weave):
    """A context from text with ``{holes}``: a list fills one with stored chunks, a string with text."""

    template: str
    values: dict[str, str | list[ChunkRef]] = Field(default_factory=dict)
    name: ChunkRef | None = None
    keep: ChunkRef | None = None
    bases: BaseMode | None = None


class To(BaseModel):
    """The name of the copy, or the new one."""

    model_config = STRICT

    to: ChunkRef


def given(body: Weave) -> _Json:
    """Return the options of a weave that were given."""
    return body.model_dump(
        include={"repair", "share", "max_drift", "keep", "bases"}, exclude_none=True
    )


@router.get("/contexts", response_model=SummaryList)
async def contexts(
    tenant: Tenant, the: The, limit: Annotated[int, Query(ge=0, le=1000)] = 1000,
    after: Annotated[str, Query(max_length=256)] = "",
) -> _Json:  # fmt: skip
    """List the open contexts by name."""

    def work(engine: Engine) -> _Json:
        names = sorted(name for name in engine.contexts_of(tenant) if name > after)
        mine = [engine.get_context(name, tenant) for name in names[:limit]]
        more = names[limit - 1] if 0 < limit < len(names) else None
        return {
            "object": "list",
            "data": [summary_of(the, context) for context in mine],
            "next": more,
        }

    return await the.call(tenant, work)


@router.post("/contexts", response_model=ContextView, status_code=201)
async def create(tenant: Tenant, the: The, body: New, response: Response) -> _Json:
    """Open a context."""
    name = the.new_name(body.name)
    options = given(body) | {"denoise": False, "namespace": tenant}
    options |= {k: v for k, v in (("prune", body.prune), ("positions", body.positions)) if v}

    def work(engine: Engine) -> Task[_Json]:
        if body.system is not None:
            the.quota.check(engine, tenant, [len(tokens_of(engine, body.system))])
        the.quota.check_context(engine, tenant)
        if body.system is None:
            context = engine.context(name, **options)
        else:
            context = yield from engine.opening(name, system=PlainText(body.system), **options)
        return view_of(engine, the, context)

    return _tagged(response, await the.run(tenant, work))


@router.post("/contexts:compose", response_model=ContextView, status_code=201)
@router.post("/compose", response_model=ContextView, status_code=201, include_in_schema=False)
async def compose(tenant: Tenant, the: The, body: Compose, response: Response) -> _Json:
    """Make a context from text with holes; a hole that names a chunk needs no value."""
    name = None if body.name is None else the.new_name(body.name)

    def work(engine: Engine) -> _Json:
        check_filled(engine, body.template, body.values)
        sizes = sizes_of(engine, (body.template, *body.values.values()))
        the.quota.check(engine, tenant, sizes)
        the.quota.check_context(engine, tenant)
        context = engine.compose(
            PlainText(body.template), plain(body.values), name=name, namespace=tenant, **given(body)
        )
        context.settings = replace(context.settings, denoise=False)
        try:
            the.quota.check_parts(len(context.parts))
        except InvalidArgument:
            engine.close_context(context.name, tenant)
            raise
        return view_of(engine, the, context)

    return _tagged(response, await the.call(tenant, work))


def _tagged(response: Response, view: _Json) -> _Json:
    response.headers["ETag"] = f'"{view["version"]}"'
    return view


# ---- one context; the routes with a verb stand before those whose name could swallow it


@router.post("/contexts/{name:path}:fork", response_model=ContextView, status_code=201)
async def fork(here: OnContext, body: To) -> _Json:
    """Copy a context under another name."""
    to = here.the.new_name(body.to)

    def work(engine: Engine, context: Context) -> _Json:
        here.the.quota.check_context(engine, here.tenant)
        return view_of(engine, here.the, engine.fork(context, to))

    return await here.change(work)


@router.post("/contexts/{name:path}:rename", response_model=ContextView)
async def rename(here: OnContext, body: To) -> _Json:
    """Give a context another name; its next messages begin with it, those before keep theirs."""
    to = here.the.new_name(body.to)

    def work(engine: Engine, context: Context) -> _Json:
        engine.rename_context(context.name, to, here.tenant)
        return view_of(engine, here.the, context)

    return await here.change(work)


@router.post("/contexts/{name:path}:weave")
async def weave(here: OnContext, body: Weave | None = None) -> _Json:
    """Bring all rows up to date and return the plan."""
    options = given(body or Weave())

    def work(engine: Engine, context: Context) -> Task[_Json]:
        return (yield from context.weaving(**options)).to_dict()

    return await here.run(work)


@router.post("/contexts/{name:path}:refine")
async def refine(here: OnContext, body: Refine | None = None) -> _Json:
    """Recompute rows that are not exact, while nobody else asks for anything."""
    n_rows = (body or Refine()).n_rows

    def work(engine: Engine, context: Context) -> Task[_Json]:
        n = yield from context.refining(n_rows)
        return {"refined": n, "exact": context.preview().drift == 0}

    return await here.run(work)


@router.post("/contexts/{name:path}:preview")
async def preview(here: OnContext) -> _Json:
    """Say what a weave would do now."""
    return await here.read(lambda _, context: context.preview().to_dict())


@router.post("/contexts/{name:path}:check")
async def check(here: OnContext) -> _Json:
    """Measure the distance to a full prefill; it costs that prefill."""

    def work(engine: Engine, context: Context) -> Task[_Json]:
        return (yield from context.checking()).to_dict()

    return await here.run(work)


@router.get("/contexts/{name:path}", response_model=ContextView)
async def view(here: OnContext) -> _Json:
    """Tell all about one context."""
    return await here.read(lambda engine, context: view_of(engine, here.the, context))


@router.delete("/contexts/{name:path}", response_model=Summary)
async def close(here: OnContext) -> _Json:
    """Free a context's rows and let go of its chunks; names stay."""

    def work(engine: Engine, context: Context) -> _Json:
        told = summary_of(here.the, context)
        engine.close_context(context.name, here.tenant)
        return told

    return await here.change(work)

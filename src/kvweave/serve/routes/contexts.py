"""``/v1/contexts``: contexts as lists of parts, edited, woven and continued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictInt

from kvweave.chunk.identity import Kind, TierName
from kvweave.engine import Engine
from kvweave.errors import ContextBusy
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import check_filled, plain, sizes_of, tokens_of
from kvweave.serve.routes.base import ERRORS, STRICT, ChunkRef, Content, Int, PathRef, The
from kvweave.serve.routes.strict import StrictRoute
from kvweave.serve.state import ServerState
from kvweave.weave.context import Context
from kvweave.weave.parts import Mode, Part, Positions
from kvweave.weave.special import PlainText

router = APIRouter(prefix="/v1", tags=["contexts"], responses=ERRORS, route_class=StrictRoute)

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PartRef = StrictInt | ChunkRef
_Json = dict[str, Any]


class Weave(BaseModel):
    """How to weave; null leaves it to the context."""

    model_config = STRICT

    repair: ChunkRef | None = None
    share: Share | None = None
    max_drift: Nats | None = None


class New(Weave):
    """A context to open."""

    name: ChunkRef
    system: str | None = None
    prune: Mode | None = None
    positions: Positions | None = None


class Compose(Weave):
    """A context from text with ``{holes}``: a list fills one with stored chunks, a string with text."""

    template: str
    values: dict[str, str | list[ChunkRef]] = Field(default_factory=dict)
    name: ChunkRef | None = None


class Append(Content):
    """Text, tokens, or a stored chunk or ``[start, stop)`` of it; before part ``at``, or at the end."""

    chunk: ChunkRef | None = None
    kind: Kind = "document"
    name: ChunkRef | None = None
    at: Annotated[Int, Field(ge=0)] | None = None
    start: Int | None = None
    stop: Int | None = None

    def _is_complete(self) -> bool:
        n_given = sum(x is not None for x in (self.text, self.tokens, self.chunk))
        is_slice = self.start is not None or self.stop is not None
        return n_given == 1 and not (is_slice and self.chunk is None)


class NewMessage(BaseModel):
    """A chat message."""

    model_config = STRICT

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Drop(BaseModel):
    """Parts to remove, by name, ``#id`` or index."""

    model_config = STRICT

    parts: list[PartRef]
    mode: Mode | None = None


class Replace(Content):
    """A part, and what shall stand there."""

    part: PartRef
    kind: Kind = "document"


class Reorder(BaseModel):
    """All parts, in the new order."""

    model_config = STRICT

    order: list[PartRef]


class Fork(BaseModel):
    """The name of the copy."""

    model_config = STRICT

    to: ChunkRef


class Summary(BaseModel):
    """One context, in short. ``busy``: an answer of it is under way."""

    name: str
    namespace: str
    n_tokens: int
    n_parts: int
    busy: bool


class SummaryList(BaseModel):
    """Contexts by name."""

    object: Literal["list"] = "list"
    data: list[Summary]


class PartEntry(BaseModel):
    """One part: tokens ``start`` to ``start + n_tokens`` of a chunk, at ``position``.

    From ``how`` on it says what a weave would do now.
    """

    uid: int
    index: int
    name: str
    id: int
    start: int
    n_tokens: int
    position: int
    kind: Kind
    pinned: bool
    tier: TierName | Literal["-"]
    how: str
    exact: bool
    n_repaired: int
    n_prefilled: int
    moved: int
    saw: list[int]


class ContextView(Summary):
    """One context in full. ``plan``: what the last weave did."""

    base: int | None
    parts: list[PartEntry]
    plan: _Json


def summary_of(the: ServerState, context: Context) -> _Json:
    """Return one context in short."""
    return {
        "name": context.name,
        "namespace": context.namespace,
        "n_tokens": context.n_tokens,
        "n_parts": len(context.parts),
        "busy": the.driver.is_busy(context),
    }


def view_of(engine: Engine, the: ServerState, context: Context) -> _Json:
    """Return one context in full."""
    told = {"base": context.snapshot().base, "parts": parts_of(engine, context)}
    return summary_of(the, context) | told | {"plan": context.plan.to_dict()}


def parts_of(engine: Engine, context: Context) -> list[_Json]:
    """Return the parts with what a weave would do now."""
    spans = context.preview().spans
    told = []
    for index, (part, span) in enumerate(zip(context.parts, spans, strict=True)):
        record = engine.table.get(part.id)
        told.append(
            _part(part)
            | {"index": index, "kind": record.kind, "pinned": record.pinned}
            | {"position": span.position, "tier": span.tier, "how": span.how, "exact": span.exact}
            | {"n_repaired": span.n_repaired, "n_prefilled": span.n_prefilled}
            | {"moved": span.moved, "saw": list(span.saw)}
        )
    return told


def _part(part: Part) -> _Json:
    return {
        "uid": part.uid, "name": part.name, "id": part.id, "start": part.start, "n_tokens": part.n
    }  # fmt: skip


def _one(engine: Engine, context: Context, part: Part) -> _Json:
    return parts_of(engine, context)[context.index(part)]


async def on(the: ServerState, tenant: str, name: str, work: Callable[[Engine, Context], T]) -> T:
    """Run ``work`` on a context of the tenant in the engine's thread."""
    return await the.call(tenant, lambda engine: work(engine, engine.get_context(name, tenant)))


def given(body: Weave) -> _Json:
    """Return the options of a weave that were given."""
    return body.model_dump(include={"repair", "share", "max_drift"}, exclude_none=True)


@router.get("/contexts", response_model=SummaryList)
async def contexts(tenant: Tenant, the: The) -> _Json:
    """List the open contexts."""

    def work(engine: Engine) -> _Json:
        mine = sorted(engine.contexts_of(tenant).items())
        return {"object": "list", "data": [summary_of(the, context) for _, context in mine]}

    return await the.call(tenant, work)


@router.post("/contexts", response_model=ContextView, status_code=201)
async def create(tenant: Tenant, the: The, body: New) -> _Json:
    """Open a context."""
    name = the.new_name(body.name)
    options = given(body) | {"denoise": False, "namespace": tenant}
    options |= {k: v for k, v in (("prune", body.prune), ("positions", body.positions)) if v}

    def work(engine: Engine) -> _Json:
        if body.system is not None:
            the.quota.check(engine, tenant, [len(tokens_of(engine, body.system))])
        the.quota.check_context(engine, tenant)
        system = None if body.system is None else PlainText(body.system)
        context = engine.context(name, system=system, **options)
        return view_of(engine, the, context)

    return await the.call(tenant, work)


@router.post("/compose", response_model=ContextView, status_code=201)
async def compose(tenant: Tenant, the: The, body: Compose) -> _Json:
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
        return view_of(engine, the, context)

    return await the.call(tenant, work)


# ---- one context; the routes with a verb stand before those whose name could swallow it


@router.post("/contexts/{name:path}:append", response_model=PartEntry)
async def append(tenant: Tenant, the: The, name: PathRef, body: Append) -> _Json:
    """Add text, tokens, a stored chunk or a slice of one."""

    def work(engine: Engine, context: Context) -> _Json:
        at = len(context.parts) if body.at is None else body.at
        if body.chunk is None:
            tokens = tokens_of(engine, body.content)
            the.quota.check(engine, tenant, [len(tokens)])
            chosen = None if body.name is None else the.new_name(body.name)
            part = context.insert(at, tokens, kind=body.kind, name=chosen)
            if chosen is not None:
                the.library.note(tenant, part.id)
        elif body.start is None and body.stop is None:
            part = context.insert_chunk(at, body.chunk)
        else:
            n = engine.table.resolve(body.chunk, tenant).n_tokens
            stop = n if body.stop is None else body.stop
            part = context.insert_slice(at, body.chunk, body.start or 0, stop)
        return _one(engine, context, part)

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:message", response_model=PartEntry)
async def message(tenant: Tenant, the: The, name: PathRef, body: NewMessage) -> _Json:
    """Add one chat message, wrapped by the model's chat template."""

    def work(engine: Engine, context: Context) -> _Json:
        the.quota.check(engine, tenant, [len(tokens_of(engine, body.content))])
        part = context.message(body.role, PlainText(body.content))
        the.library.note(tenant, part.id)
        return _one(engine, context, part)

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:drop", response_model=ContextView)
async def drop(tenant: Tenant, the: The, name: PathRef, body: Drop) -> _Json:
    """Remove parts: forget them, or evict only their memory."""

    def work(engine: Engine, context: Context) -> _Json:
        context.drop(*body.parts, mode=body.mode)
        return view_of(engine, the, context)

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:replace", response_model=PartEntry)
async def replace_part(tenant: Tenant, the: The, name: PathRef, body: Replace) -> _Json:
    """Put new text in the place of a part; what stands behind is woven anew."""

    def work(engine: Engine, context: Context) -> _Json:
        tokens = tokens_of(engine, body.content)
        the.quota.check(engine, tenant, [len(tokens)])
        return _one(engine, context, context.replace(body.part, tokens, kind=body.kind))

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:reorder", response_model=ContextView)
async def reorder(tenant: Tenant, the: The, name: PathRef, body: Reorder) -> _Json:
    """Put the parts in another order."""

    def work(engine: Engine, context: Context) -> _Json:
        context.reorder(body.order)
        return view_of(engine, the, context)

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:fork", response_model=ContextView, status_code=201)
async def fork(tenant: Tenant, the: The, name: PathRef, body: Fork) -> _Json:
    """Copy a context under another name."""
    to = the.new_name(body.to)

    def work(engine: Engine, context: Context) -> _Json:
        require_idle(the, context)
        the.quota.check_context(engine, tenant)
        return view_of(engine, the, engine.fork(context, to))

    return await on(the, tenant, name, work)


@router.post("/contexts/{name:path}:weave")
async def weave(tenant: Tenant, the: The, name: PathRef, body: Weave | None = None) -> _Json:
    """Bring all rows up to date and return the plan."""
    options = given(body or Weave())
    return await on(the, tenant, name, lambda _, context: context.weave(**options).to_dict())


@router.post("/contexts/{name:path}:preview")
async def preview(tenant: Tenant, the: The, name: PathRef) -> _Json:
    """Say what a weave would do now."""
    return await on(the, tenant, name, lambda _, context: context.preview().to_dict())


@router.post("/contexts/{name:path}:check")
async def check(tenant: Tenant, the: The, name: PathRef) -> _Json:
    """Measure the distance to a full prefill; it costs that prefill."""

    def work(engine: Engine, context: Context) -> _Json:
        require_idle(the, context)
        return context.check().to_dict()

    return await on(the, tenant, name, work)


@router.get("/contexts/{name:path}", response_model=ContextView)
async def view(tenant: Tenant, the: The, name: PathRef) -> _Json:
    """Tell all about one context."""
    return await on(the, tenant, name, lambda engine, context: view_of(engine, the, context))


@router.delete("/contexts/{name:path}", response_model=Summary)
async def close(tenant: Tenant, the: The, name: PathRef) -> _Json:
    """Free a context's rows and let go of its chunks; names stay."""

    def work(engine: Engine, context: Context) -> _Json:
        require_idle(the, context)
        told = summary_of(the, context)
        engine.close_context(context.name, tenant)
        return told

    return await on(the, tenant, name, work)


def require_idle(the: ServerState, context: Context) -> None:
    """Raise ContextBusy while an answer of the context is under way."""
    if the.driver.is_busy(context):
        raise ContextBusy(context.name)

"""``/v1/contexts/NAME:log``, ``:diff``, ``:revert``, ``:why``, ``:ledger``: what was done to a context."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, StrictInt

from kvweave.engine import Engine
from kvweave.serve.routes.base import ERRORS, STRICT
from kvweave.serve.routes.named import OnContext
from kvweave.serve.routes.shown import ContextView, view_of
from kvweave.serve.routes.strict import StrictRoute
from kvweave.weave.context import Context

router = APIRouter(
    prefix="/v1/contexts", tags=["contexts"], responses=ERRORS, route_class=StrictRoute
)

Number = Annotated[int, Query(ge=0, le=2**53)]
_Json = dict[str, Any]


class EditEntry(BaseModel):
    """One edit; ``says`` it in a few words. ``at``: seconds since 1970."""

    version: int
    at: float
    verb: str
    says: str
    n_tokens: int
    added: list[str]
    removed: list[str]


class EditList(BaseModel):
    """Edits, the newest first."""

    object: Literal["list"] = "list"
    data: list[EditEntry]


class PartName(BaseModel):
    """A part of some version: tokens ``start`` to ``start + n_tokens`` of a chunk. ``amends``: the id of
    the chunk that it is an erratum of."""

    uid: int
    name: str
    id: int
    start: int
    n_tokens: int
    amends: int | None


class DiffView(BaseModel):
    """How version ``to`` differs from version ``from``."""

    since: int = Field(alias="from")
    to: int
    added: list[PartName]
    removed: list[PartName]
    moved: list[PartName]


class CauseEntry(BaseModel):
    """Why one part is as it is; ``edit`` is the one that cost, null where none did."""

    uid: int
    name: str
    n_tokens: int
    how: Literal["kept", "moved", "new", "computed"]
    n_computed: int
    edit: EditEntry | None
    says: str


class WhyView(BaseModel):
    """What the last weave reused; ``pending``: what the next one would."""

    version: int
    since: int | None
    pending: bool
    n_tokens: int
    n_kept: int
    n_moved: int
    n_computed: int
    says: str
    parts: list[CauseEntry]


class CostEntry(BaseModel):
    """What one answer cost: at most ``drift`` nats a token, or what an audit ``measured``; null where
    nothing is known. ``more``: than the answer before ``edits``."""

    version: int
    at: float
    edits: list[str]
    n_tokens: int
    drift: float | None
    drift_by: Literal["exact", "calibration", "audit"] | None
    measured: float | None
    nats: float | None
    more: float | None


class LedgerView(BaseModel):
    """The last answers' costs, the newest first, and the sum of all that are known."""

    answers: int
    unknown: int
    nats: float
    data: list[CostEntry]


class Revert(BaseModel):
    """The version to come back to."""

    model_config = STRICT

    to: Annotated[StrictInt, Field(ge=0)]


@router.get("/{name:path}:log", response_model=EditList)
async def log(here: OnContext, limit: Annotated[int, Query(ge=0, le=1000)] = 1000) -> _Json:
    """List what was done to a context, the newest first; no more versions are kept."""

    def work(engine: Engine, context: Context) -> _Json:
        edits = context.history.log()[:limit]
        return {"object": "list", "data": [edit.to_dict() for edit in edits]}

    return await here.read(work)


@router.get("/{name:path}:diff", response_model=DiffView)
async def diff(
    here: OnContext, since: Annotated[int, Query(alias="from", ge=0)], to: Number | None = None
) -> _Json:
    """Tell which parts a version has that another has not; ``to`` is by default the last."""
    return await here.read(lambda _, context: context.history.diff(since, to).to_dict())


@router.get("/{name:path}:why", response_model=WhyView)
async def why(here: OnContext) -> _Json:
    """Tell what was and was not reused, and which edit was the cause."""
    return await here.read(lambda _, context: context.why().to_dict())


@router.get("/{name:path}:ledger", response_model=LedgerView)
async def ledger(here: OnContext) -> _Json:
    """Tell what each answer cost in nats, with the edits before it."""
    return await here.read(lambda _, context: context.ledger())


@router.post("/{name:path}:revert", response_model=ContextView)
async def revert(here: OnContext, body: Revert) -> _Json:
    """Bring back the parts of a version, as a new one."""

    def work(engine: Engine, context: Context) -> _Json:
        context.revert(body.to)
        return view_of(engine, here.the, context)

    return await here.change(work)

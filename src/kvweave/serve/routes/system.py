"""``/health``, ``/metrics`` and ``/v1/status``: how the server is doing."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from kvweave.chunk.files import Files
from kvweave.engine import Engine
from kvweave.errors import Overloaded
from kvweave.serve.guard.access import Tenant, sees_metrics
from kvweave.serve.guard.problems import make
from kvweave.serve.metrics import EngineSnapshot
from kvweave.serve.routes.base import ERRORS, The
from kvweave.serve.routes.strict import StrictRoute

router = APIRouter(
    tags=["server"],
    responses={k: v for k, v in ERRORS.items() if k in (401, 500)},
    route_class=StrictRoute,
)

OURS = "|"  # no namespace: what the server asks itself waits behind no tenant's calls


class Health(BaseModel):
    """Whether requests are taken."""

    status: str
    model: str
    uptime: float
    waiting: int
    active: int


class Budget(BaseModel):
    """Bytes of KV in one tier; no budget where nothing bounds it."""

    tier: str
    used: int
    budget: int | None


class Can(BaseModel):
    """Whether the model can do something, and why not."""

    ok: bool
    reason: str


class Status(BaseModel):
    """What the page shows: all of it is the caller's namespace's, but for the queue's lengths."""

    model: str
    namespace: str
    uptime: float
    waiting: int
    active: int
    chunks: int
    contexts: int
    can: dict[Literal["run", "move"], Can]
    budgets: list[Budget]
    history: list[dict[str, Any]]
    hit_rate: float | None
    last_plan: dict[str, Any] | None


class AnswerView(BaseModel):
    """One answer: its number, context, times and tokens, and the plan of its weave."""

    n: int
    context: str
    time: float
    ttft: float | None
    total: float | None
    waited: float
    finish: str
    prompt_tokens: int
    completion_tokens: int
    kv: dict[str, int | float | None]
    hit_rate: float
    plan: dict[str, Any]


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(the: The) -> Any:
    """Tell whether requests are taken: 200, or 503 while the server stops. Needs no key.

    ``degraded``: they are, and in the last minute the disk refused one of them (it is full, it fails, or
    the home was moved).
    """
    stats = the.driver.stats()
    told = Health(
        status="stopping" if the.driver.stopping else "degraded" if the.is_degraded else "ok",
        model=the.options.model_name,
        uptime=time.time() - the.started,
        waiting=int(stats["waiting"]),
        active=int(stats["active"]),
    )
    if the.driver.stopping:
        return Response(told.model_dump_json(), 503, media_type="application/json")
    return told


@router.get(
    "/metrics",
    response_class=Response,
    responses={403: ERRORS[403] | {"description": "asked for with the key of a namespace"}},
)
async def metrics(tenant: Tenant, request: Request, the: The) -> Response:
    """Return all counters in the text format of Prometheus.

    They are of all namespaces: where there are keys, they take the one of `--metrics-key`.
    """
    if not sees_metrics(request):
        hint = "use the key of --metrics-key; /v1/status has what is of your namespace"
        return make(403, "this key is of one namespace, these figures of all", hint=hint).response
    try:
        held = await the.call(OURS, EngineSnapshot.of)
    except Overloaded:  # stopping: the last known will do
        held = None
    the.metrics.looked_ahead(the.anticipating)
    text = the.metrics.text(the.driver.stats(), held)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/status", response_model=Status)
async def status(tenant: Tenant, the: The) -> dict[str, Any]:
    """Tell what the page shows."""
    stats, history = the.driver.stats(), the.history.answers(tenant)
    plan = the.history.plan(tenant)
    prompt = sum(each["prompt_tokens"] for each in history)
    reused = sum(each["hit_rate"] * each["prompt_tokens"] for each in history)

    def work(engine: Engine) -> dict[str, Any]:
        groups = Files(engine.table, tenant).du()
        can = {what: engine.can(what) for what in ("run", "move")}
        return {
            "chunks": sum(group.n_chunks for group in groups),
            "contexts": len(engine.contexts_of(tenant)),
            "can": {what: {"ok": found.ok, "reason": found.reason} for what, found in can.items()},
            "budgets": _budgets(engine, {group.key: group.n_bytes for group in groups}, the),
        }

    return await the.call(tenant, work) | {
        "model": the.options.model_name,
        "namespace": tenant,
        "uptime": time.time() - the.started,
        "waiting": stats["waiting"],
        "active": stats["active"],
        "history": history,
        "hit_rate": reused / prompt if prompt else None,
        "last_plan": None if plan is None else plan.to_dict(),
    }


@router.get("/v1/answers/{n}", response_model=AnswerView, responses={400: ERRORS[400]})
async def answer(
    tenant: Tenant, the: The, n: Annotated[int, Path(ge=1, le=2**53)]
) -> dict[str, Any]:
    """Tell how one of the last answers came about; ``history`` of the status has their numbers."""
    entry, plan = the.history.answer(tenant, n)
    return entry | {"plan": plan.to_dict()}


def _budgets(engine: Engine, used: dict[str, int], the: The) -> list[dict[str, Any]]:
    """Return bytes by tier. Who shares the server sees what he stored himself, of his quota; who
    has it alone all that is in memory, with the rows of contexts."""
    shelf, quota = engine.shelf, the.quota.n_bytes
    if not the.options.keys:
        used = used | {shelf.memory: shelf.n_bytes}
    bound = quota if the.options.keys else shelf.budget
    (memory, _, _), *below = shelf.levels()
    told: list[dict[str, Any]] = [{"tier": memory, "used": used.get(memory, 0), "budget": bound}]
    for tier, _, budget in below:
        budget = None if the.options.keys else budget
        told.append({"tier": tier, "used": used.get(tier, 0), "budget": budget})
    return told

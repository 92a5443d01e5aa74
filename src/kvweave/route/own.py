"""What the router answers itself: health, metrics, its view of the workers, draining."""

from __future__ import annotations

from hmac import compare_digest

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.route.state import RouterState
from kvweave.route.worker import Worker
from kvweave.serve.guard.keys import key_given
from kvweave.serve.guard.problems import Problem, make

NOT_ROUTED = "it is of one worker: ask that one; GET /v1/workers of the router lists them"


async def health(request: Request) -> Response:
    """200 while a worker takes work, else 503."""
    state: RouterState = request.app.state.router
    n = len(state.taking())
    status = "stopping" if state.stopping else "ok" if n == len(state.workers) else "degraded"
    status = status if n or state.stopping else "down"
    told = {"status": status, "workers": len(state.workers), "taking": n}
    return JSONResponse(told, 200 if n and not state.stopping else 503)


async def metrics(request: Request) -> Response:
    """Counters in Prometheus' text format."""
    state: RouterState = request.app.state.router
    refused = _refused(request)
    if refused is not None:
        return refused.response
    each = [(worker, n_chunks(state, worker)) for worker in state.workers]
    return Response(state.metrics.text(each), media_type=CONTENT_TYPE_LATEST)


async def workers(request: Request) -> Response:
    """List the workers, and what is known of each."""
    state: RouterState = request.app.state.router
    refused = _refused(request)
    if refused is not None:
        return refused.response
    told = {
        "object": "list",
        "policy": state.options.policy,
        "tenants": len(state.tenants.all()),
        "data": [view(state, worker) for worker in state.workers],
    }
    return JSONResponse(told)


async def drain(request: Request) -> Response:
    """Send nothing new to a worker, or do so again; contexts on it stay reachable."""
    state: RouterState = request.app.state.router
    refused = _refused(request)
    if refused is not None:
        return refused.response
    name, verb = request.path_params["name"].rsplit(":", 1)
    worker = state.named(name)
    if worker is None or verb not in ("drain", "undrain"):
        hint = "one of " + ", ".join(f"{each.name}:drain, :undrain" for each in state.workers)
        return make(404, "there is no such worker, or no such verb", hint=hint).response
    worker.draining = verb == "drain"
    return JSONResponse(view(state, worker))


async def not_routed(request: Request) -> Response:
    """Say what a router does not do."""
    path = request.scope["path"]
    return make(501, f"{path[:100]} is not routed", code="not_routed", hint=NOT_ROUTED).response


def view(state: RouterState, worker: Worker) -> dict[str, object]:
    """Return what is known of a worker, JSON-ready."""
    holdings = [tenant.holdings.get(worker.name) for tenant in state.tenants.all()]
    return {
        "name": worker.name,
        "url": worker.url,
        "state": worker.state,
        "draining": worker.draining,
        "why": worker.why,
        "kind": worker.kind,
        "requests": len(worker.jobs),
        "elsewhere": worker.elsewhere,
        "backlog_s": round(worker.backlog, 4),
        "slowness": round(worker.slowness, 3),
        "answered": worker.answered,
        "chunks": n_chunks(state, worker),
        "prints": sum(len(holding) for holding in holdings if holding is not None),
        "contexts": sum(
            home == worker.name
            for tenant in state.tenants.all()
            for home in tenant.contexts.values()
        ),
    }


def n_chunks(state: RouterState, worker: Worker) -> int:
    """Return how many chunks a worker's placements tell of."""
    holdings = [tenant.holdings.get(worker.name) for tenant in state.tenants.all()]
    return sum(holding.n_chunks for holding in holdings if holding is not None)


def _refused(request: Request) -> Problem | None:
    """Return why the caller may not see or change the router itself."""
    key = request.app.state.router.options.key
    if key is None:
        return None
    given = key_given(request.headers.get("authorization", ""), "")
    if compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        return None
    return make(
        401, "this takes the router's own key", code="invalid_api_key",
        hint="the one of --key-file", headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip

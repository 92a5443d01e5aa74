"""``/v1/chunks``: put where rendezvous hashing says, read from whoever has it, changed wherever it is.

A change has to reach every copy, so it is refused while a worker is down that may have one, and so is one
that would make one name of two chunks (`kvweave.route.naming`). Nothing here
is sent again but what is the same when it is done twice.
"""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.route import directory, naming
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import RouterState, WholeAnswer, answer_of, unreachable
from kvweave.route.worker import Worker
from kvweave.serve.guard.problems import Problem, make

_GROUPS = ("n_chunks", "n_tokens", "n_bytes")
_VERB = re.compile(r":(pin|unpin|denoise|place|compress|cp|mv)$")


async def read(request: Request) -> Response:
    """``GET``: lists of all workers as one; one chunk from whoever has it."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    tenant, path = state.tenant_of(call), request.scope["path"]
    name = path.removeprefix("/v1/chunks/") if path.startswith("/v1/chunks/") else ""
    if name.startswith("#"):
        return _by_id(name).response
    there = state.native()
    workers = state.owners(tenant, name, there) if name else there
    told, _ = await state.ask_all(workers, call)
    if not told:
        return state.nobody(native=True).response
    return _together(told, request)


async def put(request: Request) -> Response:
    """``PUT``, and ``:put`` of several: to who has the name, else to its owner."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    tenant = state.tenant_of(call)
    many = request.method == "POST"
    names = _names(call) if many else [request.scope["path"].removeprefix("/v1/chunks/")]
    name = names[0] if names else ""
    if name.startswith("#"):
        return _by_id(name).response
    directory.forget(tenant)
    holder = await naming.putting(state, tenant, call, names)
    if isinstance(holder, Problem):
        return holder.response
    has = tenant.directory.get(name, {})
    holders = [worker for worker in state.native() if worker.name in has]
    if many and holder is not None:
        holders = [holder]
    order = state.owners(tenant, name, holders or state.native(taking=True))
    if not order:
        return state.nobody(native=True).response
    repeatable = not many or call.header(b"idempotency-key") is not None
    try:
        for i, worker in enumerate(order):
            try:
                return answer_of(await state.ask(worker, call, quick=False))
            except WorkerFailed as failure:
                again = not failure.sent or (repeatable and not failure.slow)
                if not again or i + 1 == len(order) or holders:
                    return unreachable(worker, failure).response
                state.metrics.retries.labels("died" if failure.sent else "refused").inc()
    finally:
        directory.forget(tenant)
    raise AssertionError("a worker was asked")


async def change(request: Request) -> Response:
    """``DELETE``, and the verbs on names: on every worker."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    path = request.scope["path"].removeprefix("/v1/chunks/")
    pattern = _VERB.sub("", path) if request.method == "POST" else path
    if pattern.startswith("#"):
        return _by_id(pattern).response
    if request.method == "POST" and pattern == path:
        return make(404, "there is no such verb on chunks").response
    down = [worker for worker in state.workers if not worker.healthy]
    if down:
        return _not_all(down, nothing=True).response
    tenant, verb = state.tenant_of(call), path[len(pattern) + 1 :]
    try:
        if verb in naming.NAMING:
            directory.forget(tenant)
            try:
                why = await naming.refusal(state, tenant, call, pattern, verb)
            except WorkerFailed:
                return _not_all([w for w in state.workers if not w.healthy], nothing=True).response
            if why is not None:
                return why.response if isinstance(why, Problem) else answer_of(why)
        told, silent = await state.ask_all(state.native(), call, quick=False)
    finally:
        directory.forget(tenant)
    if silent:
        return _not_all(silent, nothing=False).response
    if not told:
        return state.nobody(native=True).response
    return _together(told, request)


def _names(call: Call) -> list[str]:
    items = call.json().get("items")
    given = [i.get("name") for i in items if isinstance(i, dict)] if isinstance(items, list) else []
    return [name for name in given if isinstance(name, str) and name]


def _by_id(name: str) -> Problem:
    hint = "use its name, or ask the worker: an id is a number that every worker gives by itself"
    return make(501, f"{name} is a chunk of one worker", code="not_routed", hint=hint)


def _not_all(silent: list[Worker], *, nothing: bool) -> Problem:
    names = ", ".join(worker.name for worker in silent)
    hint = "it may have copies: send this again when it is back, or start the router without it"
    done = "nothing was done" if nothing else "it was done on the others"
    return make(
        503, f"no answer from {names}; {done}", code="worker_down", hint=hint,
        headers={"Retry-After": "5"},
    )  # fmt: skip


def _together(told: list[WholeAnswer], request: Request) -> Response:
    """Return answers of several workers as one.

    What only some have is not missing. Where any refuses for another reason, so does this.
    """
    refused = [each for each in told if not each[1].is_success and each[1].status_code != 404]
    good = [each for each in told if each[1].is_success]
    if refused or not good:
        return answer_of((refused or told)[0])
    bodies = [json.loads(body) for _, _, body in good]
    if len(good) == 1 or not all("data" in body for body in bodies):
        return answer_of(good[0])
    if request.scope["path"].endswith(":du"):
        return JSONResponse({"object": "list", "data": _added(bodies)})
    return JSONResponse(_listed(bodies, request))


def _added(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for body in bodies:
        for group in body["data"]:
            known = groups.setdefault(
                group["key"], {"key": group["key"], **dict.fromkeys(_GROUPS, 0)}
            )
            for name in _GROUPS:
                known[name] += group[name]
    return sorted(groups.values(), key=lambda group: (-group["n_bytes"], group["key"]))


def _listed(bodies: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return entries of several lists, each name once, in the order and number asked for."""
    asked = request.query_params
    sort, limit = asked.get("sort", "name"), asked.get("limit")
    entries: dict[str, dict[str, Any]] = {}
    for body in bodies:
        for entry in body["data"]:
            entries.setdefault(entry["name"], entry)
    found = sorted(entries.values(), key=lambda entry: entry["name"])
    if sort != "name":
        found.sort(key=lambda entry: entry[sort])
    if asked.get("reverse", "").lower() in ("true", "1", "on", "yes", "t", "y"):
        found.reverse()
    page = found if limit is None else found[: int(float(limit))]
    has_more = len(page) < len(found) or any(body.get("next") for body in bodies)
    more = page[-1]["name"] if page and has_more and sort == "name" else None
    return {"object": "list", "data": page, "next": more}

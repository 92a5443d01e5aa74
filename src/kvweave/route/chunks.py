"""``/v1/chunks``: put where rendezvous hashing says, read from whoever has it, changed wherever it is.

A change has to reach every copy, so it is refused while a worker is down that may have one, and so is one
that any worker would refuse, or that would make one name of two chunks (`kvweave.route.naming`). Nothing here
is sent again but what is the same when it is done twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.route import directory, naming
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import (
    IDEMPOTENCY,
    RouterState,
    WholeAnswer,
    answer_of,
    not_all,
    reading,
    unreachable,
)
from kvweave.route.tenant import RouteTenant
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
    away = state.down()
    told, silent = await state.ask_all(workers, call)
    if not told:
        return state.nobody(native=True).response
    away = state.down([*away, *silent])
    if name and away and all(response.status_code == 404 for _, response, _ in told):
        return not_all(away).response
    return _together(told, call)


async def put(request: Request) -> Response:
    """``PUT``, and ``:put`` of several: to who has the name, else to its owner."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    tenant = state.tenant_of(call)
    many = request.method == "POST"
    names = _names(call) if many else [request.scope["path"].removeprefix("/v1/chunks/")]
    if names and names[0].startswith("#"):
        return _by_id(names[0]).response
    async with state.turns(tenant).of(names):
        directory.forget(tenant)
        try:
            return await _put(state, tenant, call, names, many=many)
        finally:
            directory.forget(tenant)


async def _put(
    state: RouterState, tenant: RouteTenant, call: Call, names: list[str], *, many: bool
) -> Response:
    silent = await directory.look(state, tenant, call, names)
    holder = naming.apart(state, tenant, names) if many else None
    if isinstance(holder, Problem):
        return holder.response
    name = names[0] if names else ""
    has = {each: tenant.directory.get(each, {}) for each in names}
    holders = [worker for worker in state.native() if worker.name in has.get(name, {})]
    if many and holder is not None:
        holders = [holder]
    order = state.owners(tenant, name, holders or state.native(taking=True))
    if not order:
        return state.nobody(native=True).response
    away = state.down(silent)
    for (
        each
    ) in names:  # what it has of that name would be right when it is back, and this would not
        first = state.owners(tenant, each, [*away, order[0]])[0]
        if first in away:
            return not_all([first]).response
    repeatable = not many or call.header(IDEMPOTENCY) is not None
    for i, worker in enumerate(order):
        try:
            told = await state.ask(worker, call, quick=False)
        except WorkerFailed as failure:
            again = not failure.sent or (repeatable and not failure.slow)
            if not again or i + 1 == len(order) or holders:
                return unreachable(worker, failure).response
            state.metrics.retries.labels("died" if failure.sent else "refused").inc()
            continue
        if told[1].is_success:
            await _renew(state, tenant, call, has, worker)
        return answer_of(told)
    raise AssertionError("a worker was asked")


async def _renew(
    state: RouterState, tenant: RouteTenant, call: Call, had: Mapping[str, Mapping[str, str]],
    worker: Worker,
) -> None:  # fmt: skip
    """Have copies that were lent say what was just put on a worker, or go: who has it may be down next."""
    copies = [(n, w) for n, there in had.items() for w in state.native() if w.name in there]
    others = [(name, copy) for name, copy in copies if copy is not worker]
    if not others:
        return
    directory.forget(tenant)
    await directory.look(state, tenant, call, [name for name, _ in others])
    for name, other in others:
        with suppress(WorkerFailed):  # it is replaced when it is next named
            if await directory.copy(state, tenant, call, name, other) is not None:
                gone = call.asking("DELETE", directory.path_of(name) + "?force=true")
                await state.ask(other, gone)


async def change(request: Request) -> Response:
    """``DELETE``, and the verbs on names: on every worker, or on none."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    path = request.scope["path"].removeprefix("/v1/chunks/")
    pattern = _VERB.sub("", path) if request.method == "POST" else path
    if pattern.startswith("#"):
        return _by_id(pattern).response
    if request.method == "POST" and pattern == path:
        return make(404, "there is no such verb on chunks").response
    if down := [worker for worker in state.workers if not worker.healthy]:
        return not_all(down).response
    tenant, verb = state.tenant_of(call), path[len(pattern) + 1 :]
    async with state.turns(tenant).alone():
        directory.forget(tenant)
        try:
            return await _change(state, tenant, call, pattern, verb)
        finally:
            directory.forget(tenant)


async def _change(
    state: RouterState, tenant: RouteTenant, call: Call, pattern: str, verb: str
) -> Response:
    # what has been sent with this key may be done on some of them
    if verb != "denoise" and state.noted(tenant, call) is None:
        try:
            why = await naming.refusal(state, tenant, call, pattern, verb)
        except WorkerFailed:
            return not_all(state.down() or state.storing()).response
        if why is not None:
            return why.response if isinstance(why, Problem) else answer_of(why)
    workers = state.storing()  # also one that went since: nobody is left out
    state.note(call, workers[0] if workers else None)
    told, silent = await state.ask_all(workers, call, quick=False)
    if silent:
        return not_all(silent, nothing=False).response
    if not told:
        return state.nobody(native=True).response
    return _together(told, call)


def _names(call: Call) -> list[str]:
    items = call.json().get("items")
    given = [i.get("name") for i in items if isinstance(i, dict)] if isinstance(items, list) else []
    return [name for name in given if isinstance(name, str) and name]


def _by_id(name: str) -> Problem:
    hint = "use its name, or ask the worker: an id is a number that every worker gives by itself"
    return make(501, f"{name} is a chunk of one worker", code="not_routed", hint=hint)


def _together(told: list[WholeAnswer], call: Call) -> Response:
    """Return answers of several workers as one.

    What only some have is not missing. Where any refuses for another reason, so does this.
    """
    refused = [each for each in told if not each[1].is_success and each[1].status_code != 404]
    good = [each for each in told if each[1].is_success]
    if refused or not good:
        return answer_of((refused or told)[0])
    path, _, query = call.target.decode("latin-1").partition("?")
    with reading():
        bodies = [json.loads(body) for _, _, body in good]
        if len(good) == 1 or any(body.get("data") is None for body in bodies):
            return answer_of(good[0])
        if path.endswith(":du"):
            return JSONResponse({"object": "list", "data": _added(bodies)})
        return JSONResponse(_listed(bodies, {k: v[-1] for k, v in parse_qs(query).items()}))


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


def _listed(bodies: list[dict[str, Any]], asked: Mapping[str, str]) -> dict[str, Any]:
    """Return entries of several lists, each name once, in the order and number asked for."""
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

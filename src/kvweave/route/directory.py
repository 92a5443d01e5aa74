"""Which workers have which named chunks, and copies of them for workers that lack one.

A named chunk lives where it was put; a request that names it may be better off elsewhere. It is *lent*
then: its tokens are read where it is and put where it is needed, under the same name. Where two workers
have different chunks of one name, the one that rendezvous hashing puts first is right.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from math import inf
from typing import Any
from urllib.parse import quote

import httpx

from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import RouterState, WholeAnswer, not_all, reading
from kvweave.route.tenant import RouteTenant
from kvweave.route.worker import Worker
from kvweave.serve.guard.problems import Problem, make

FRESH = 30.0  # seconds until everything is looked up again: others may talk to workers too
MOST = 10_000  # names of a tenant


def path_of(name: str) -> str:
    """Return the path of a named chunk."""
    return f"/v1/chunks/{quote(name, safe='/')}"


def forget(tenant: RouteTenant) -> None:
    """Chunks of a tenant changed: look again."""
    tenant.directory.clear()
    tenant.sizes.clear()


async def look(
    state: RouterState, tenant: RouteTenant, call: Call, names: Sequence[str]
) -> list[Worker]:
    """Find out who has the chunks of these names, where that is not known; return who did not say,
    without whom nothing is known for longer than this. Raises NotAccepted."""
    now = time.monotonic()
    if now - tenant.looked > FRESH or len(tenant.directory) > MOST:
        forget(tenant)
        tenant.looked = now
    unknown = [name for name in names if name not in tenant.directory]
    silent = (
        state.down() if unknown else []
    )  # before they are asked: who comes back meanwhile is not
    if unknown:
        await state.admit(state.native(), call)
    found = await asyncio.gather(*(_look(state, call, name) for name in unknown))
    for name, (told, quiet) in zip(unknown, found, strict=True):
        silent += [worker for worker in quiet if worker not in silent]
        there = {worker.name: entry for worker, entry in told}
        owners = state.owners(tenant, name, [worker for worker, _ in told])
        right = there[owners[0].name]["digest"] if owners else ""
        tenant.directory[name] = {w: e["digest"] for w, e in there.items() if e["digest"] == right}
        if owners:
            with reading():
                tenant.sizes[name] = int(there[owners[0].name]["n_tokens"])
    if silent:
        tenant.looked = -inf
    return silent


def lost(
    state: RouterState, tenant: RouteTenant, names: Sequence[str], silent: Sequence[Worker]
) -> Problem | None:
    """Return why nobody can say that a chunk of these names is nowhere, behind `look`."""
    away = state.down(silent)
    there = {worker.name for worker in state.native() if worker not in away}
    if away and any(not there & tenant.directory.get(name, {}).keys() for name in names):
        forget(tenant)
        return not_all(away)
    return None


_Found = list[tuple[Worker, dict[str, Any]]]


async def _look(state: RouterState, call: Call, name: str) -> tuple[_Found, list[Worker]]:
    told, silent = await state.ask_all(state.native(), call.asking("GET", path_of(name)))
    found = []
    for worker, response, body in told:
        if response.status_code == 200 and (entry := _entry(body)) is not None:
            found.append((worker, entry))
    return found, silent


def _entry(body: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    is_one = isinstance(entry, dict) and {"digest", "n_tokens", "kind"} <= entry.keys()
    return entry if is_one else None


async def lend(
    state: RouterState, tenant: RouteTenant, call: Call, names: Sequence[str], worker: Worker
) -> WholeAnswer | None:
    """Copy the chunks of these names that a worker lacks; return the answer that refused one.

    Raises WorkerFailed. A name that nobody has is left to the worker to complain about.
    """
    for name in names:
        if worker.name in tenant.directory.get(name, {}):
            continue
        async with state.turns(tenant).of([name]):
            await look(state, tenant, call, [name])  # it may have been changed before this turn
            if (told := await copy(state, tenant, call, name, worker)) is not None:
                return told
    return None


async def copy(
    state: RouterState, tenant: RouteTenant, call: Call, name: str, worker: Worker
) -> WholeAnswer | None:
    """Copy one chunk that was looked up, as `lend` does, in a turn that the caller has."""
    there = tenant.directory.get(name, {})
    holders = [w for w in state.there() if w.name in there]
    if worker.name in there or not holders:
        return None
    owner = state.owners(tenant, name, holders)[0]
    try:
        _, response, body = await state.ask(owner, call.asking("GET", path_of(name) + "?text=true"))
    except WorkerFailed:
        forget(tenant)
        return None
    entry = _entry(body)
    if response.status_code != 200 or entry is None:
        forget(tenant)
        return None
    with reading():
        put = {"tokens": entry["tokens"], "kind": entry["kind"], "replace": True}
    told = await state.ask(worker, call.asking("PUT", path_of(name), put), quick=False)
    if not told[1].is_success:
        return told
    if not await _says_the_same(state, call, name, entry, worker):
        return _of_another_model(owner, worker)
    if entry.get("pinned"):
        told = await state.ask(worker, call.asking("POST", path_of(name) + ":pin"))
        if not told[1].is_success:
            return told
    there[worker.name] = entry["digest"]
    state.metrics.lent.labels(worker.name).inc()
    return None


async def _says_the_same(
    state: RouterState, call: Call, name: str, entry: dict[str, Any], worker: Worker
) -> bool:
    """Tell whether a worker reads the tokens of a chunk that it was lent as who has it; if not, take it
    away again. Raises WorkerFailed."""
    _, response, body = await state.ask(worker, call.asking("GET", path_of(name) + "?text=true"))
    made = _entry(body) if response.status_code == 200 else None
    if made is None or made["digest"] == entry["digest"] or made.get("text") == entry.get("text"):
        return True
    await state.ask(worker, call.asking("DELETE", path_of(name) + "?force=true"))
    return False


def _of_another_model(owner: Worker, worker: Worker) -> WholeAnswer:
    """Return what is said where workers cannot lend to each other."""
    why = (
        f"the tokens of {owner.name} are other words for {worker.name}: they serve different models"
    )
    hint = "give a router workers of one model"
    told = make(502, why, code="models_differ", hint=hint)
    return worker, httpx.Response(told.status), json.dumps(told.body).encode()

"""What is asked before chunks are changed on several workers, most of all by verbs that give names.

Every worker knows its own names only, so what each would do alone may make one name of two chunks::

    worker 1   docs/a             :mv docs/a to notes/b     its notes/b is docs/a then
    worker 2           notes/b                              and here it is what it was

What cannot be done everywhere alike is refused before anybody does it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from urllib.parse import quote

from kvweave.route import directory
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import RouterState, WholeAnswer, reading
from kvweave.route.tenant import RouteTenant
from kvweave.route.worker import Worker
from kvweave.serve.guard.problems import Problem, make

NAMING = ("cp", "mv", "compress")
MOST = 1_024  # names that several workers have, of one verb


async def refusal(
    state: RouterState, tenant: RouteTenant, call: Call, pattern: str, verb: str
) -> Problem | WholeAnswer | None:
    """Return why a verb cannot be done on all workers, after copies of older chunks that it gives names
    were made new. Raises NotAccepted, WorkerFailed, Nonsense."""
    if verb in NAMING:
        told = await _named(state, tenant, call, pattern, verb)
        if told is not None:
            return told
    return await _refused(state, call, pattern, verb)


async def _named(
    state: RouterState, tenant: RouteTenant, call: Call, pattern: str, verb: str
) -> Problem | WholeAnswer | None:
    body = call.json()
    to = body.get("to")
    if to is None and verb == "compress":
        to = pattern
    if not isinstance(to, str):
        return None  # the workers say what is wrong with it
    sources = await _sources(state, call, pattern)
    shared = [name for name, workers in sources.items() if len(workers) > 1]
    if len(shared) > MOST:
        hint = "take a narrower pattern, or ask the workers"
        return make(501, f"{len(shared):,} copies are too many", code="not_routed", hint=hint)
    if len(sources) > 1 and not to.endswith("/") and verb != "compress":
        return make(
            400, f"several chunks match {pattern!r}: {to!r} can name one",
            code="invalid_argument", hint="end it with /",
        )  # fmt: skip
    await directory.look(state, tenant, call, shared)
    for name in shared:
        for worker in sources[name]:  # whose copy may be of a chunk that was replaced
            if (told := await directory.copy(state, tenant, call, name, worker)) is not None:
                return told
    return None


async def _refused(
    state: RouterState, call: Call, pattern: str, verb: str
) -> Problem | WholeAnswer | None:
    made: dict[str, set[str]] = {}
    target = call.target.decode("latin-1")
    ask = call.asking(call.method, target, {**call.json(), "dry_run": True})
    told_all, silent = await state.ask_all(state.storing(), ask)
    if silent:
        raise WorkerFailed("it did not answer", sent=False)
    for worker, response, content in told_all:
        if response.is_success:
            for entry in _entries(content):
                made.setdefault(entry["name"], set()).add(worker.name)
        elif response.status_code != 404:
            return worker, response, content
    return await _taken(state, call, made) if verb in NAMING else None


def apart(state: RouterState, tenant: RouteTenant, names: Sequence[str]) -> Worker | Problem | None:
    """Return the worker that has chunks of these names, None where nobody has: one put goes to one
    worker."""
    found: dict[str, Worker] = {}
    for name in names:
        there = tenant.directory.get(name, {})
        holders = [worker for worker in state.native() if worker.name in there]
        if holders:
            found[name] = state.owners(tenant, name, holders)[0]
    first = next(iter(found), "")
    other = next((name for name in found if found[name] is not found[first]), None)
    if other is not None:
        hint = "put each of them by itself"
        return make(409, f"{first!r} and {other!r} are on two workers", code="apart", hint=hint)
    return found.get(first)


async def _sources(state: RouterState, call: Call, pattern: str) -> dict[str, list[Worker]]:
    ask = call.asking("GET", f"/v1/chunks?pattern={quote(pattern, safe='')}")
    told, silent = await state.ask_all(state.storing(), ask)
    if silent:
        raise WorkerFailed("it did not answer", sent=False)
    found: dict[str, list[Worker]] = {}
    for worker, response, body in told:
        for entry in _entries(body) if response.is_success else ():
            found.setdefault(entry["name"], []).append(worker)
    return found


def _entries(body: bytes) -> list[dict[str, str]]:
    with reading():
        return [{"name": entry["name"]} for entry in json.loads(body)["data"]]


async def _taken(state: RouterState, call: Call, made: dict[str, set[str]]) -> Problem | None:
    """Return why names that are to be given cannot be: workers that give none of them have them."""
    lists = await asyncio.gather(*(_sources(state, call, name) for name in list(made)[:MOST]))
    for (name, workers), found in zip(made.items(), lists, strict=False):
        others = [worker for worker in found.get(name, ()) if worker.name not in workers]
        if others:
            hint = f"remove {name} first, or choose another name"
            what = f"{name!r} names another chunk on {others[0].name}"
            return make(409, what, code="name_taken", hint=hint)
    return None

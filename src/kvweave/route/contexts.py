"""``/v1/contexts`` and ``/v1/memory``: a context is on one worker with its memory, and every verb on it goes there.

A new one goes where rendezvous hashing puts its name, unless a context of that name is known elsewhere.
Where a router does not know (it is new itself), it asks the workers. A verb on a context changes it, so it
is sent again only if nothing of it was sent before, or if it has an ``Idempotency-Key``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvweave.chunk.identity import normal_name
from kvweave.errors import NameTaken
from kvweave.route import directory
from kvweave.route.errand import Errand
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import (
    IDEMPOTENCY,
    RouterState,
    WholeAnswer,
    answer_of,
    reading,
    unreachable,
)
from kvweave.route.tenant import note
from kvweave.route.wanted import is_name, names_in
from kvweave.route.worker import Worker
from kvweave.serve.guard.problems import Problem, problem_of

VERBS = (
    "append message drop replace amend reorder leave edit fork rename log diff revert ledger why weave preview "
    "check generate ask"
).split()
RENAMING = ("fork", "rename")  # to a name that no worker may have
MEMORY = (
    "open items read blocks block tool tell settle search recall release anchor write delete rename undo "
    "idle ask"
).split()
_CONTEXT, _MEMORY = (
    re.compile(f"/v1/{noun}/(.+?)(?::({'|'.join(verbs)}))?", re.DOTALL)
    for noun, verbs in (("contexts", VERBS), ("memory", MEMORY))
)


async def listed(request: Request) -> Response:
    """List the contexts, or the memories, of all workers by name."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    told, _ = await state.ask_all(state.native(contexts=True), call)
    if not told:
        return state.nobody(native=True).response
    refused = next((each for each in told if not each[1].is_success), None)
    if refused is not None:
        return answer_of(refused)
    limit = int(float(request.query_params.get("limit", "1000")))  # workers have taken it
    with reading():
        pages = [json.loads(body) for _, _, body in told]
        entries = {entry["name"]: entry for page in pages for entry in page["data"]}
        names = sorted(entries)
        has_more = len(names) > limit or any(page["next"] for page in pages)
    found = [entries[name] for name in names[:limit]]
    more = names[:limit][-1] if found and has_more else None
    return JSONResponse({"object": "list", "data": found, "next": more})


async def opened(request: Request) -> ASGIApp:
    """Open a context, or compose one; one without a name is given one, so that no two workers do."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    body, tenant = call.json(), state.tenant_of(call)
    name = body.get("name")
    if "name" not in body and isinstance(body.get("template"), str):
        key = call.header(IDEMPOTENCY)
        name = f"c-{secrets.token_hex(8) if key is None else tenant.place(key)}"
        call = call.with_json({**body, "name": name})
    verb = _Verb(state, call, tenant, name if isinstance(name, str) else "", "open")
    return await verb.answer()


async def one(request: Request) -> ASGIApp:
    """Do a verb on a context where it is."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    found = _CONTEXT.fullmatch(request.scope["path"])
    name, verb = (found[1], found[2] or "") if found else ("", "")
    return await _Verb(state, call, state.tenant_of(call), name, verb).answer()


async def remembered(request: Request) -> ASGIApp:
    """Do a verb on the memory over a context, where that is."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    found = _MEMORY.fullmatch(request.scope["path"])
    return await _Verb(
        state, call, state.tenant_of(call), found[1] if found else "", "memory"
    ).answer()


@dataclass(eq=False)
class _Verb(Errand):
    """A verb on one context of a tenant; ``open`` makes it."""

    name: str
    verb: str

    async def answer(self) -> ASGIApp:
        """Find the worker, and have it do the verb; of those that want one name, one after the other."""
        body = self.call.json() if self.verb in RENAMING else {}
        to = body.get("to", self.name if self.verb == "open" else "")
        if not isinstance(to, str) or not is_name(to):
            return await self._do("")
        async with self.state.claim(self.tenant, normal_name(to)):
            return await self._do(to)

    async def _do(self, to: str) -> ASGIApp:
        worker = await self._home()
        if isinstance(worker, Problem):
            return worker.response
        if self.verb in RENAMING and to and await self._is_elsewhere(to, worker):
            return problem_of(NameTaken(normal_name(to), 0)).response
        try:
            refused = await self._lend(worker)
            if isinstance(refused, Problem):
                return refused.response
            if refused is not None:
                return answer_of(refused)
            return await self.on(worker)
        except WorkerFailed as failure:
            self.state.failed(worker, failure)
            return unreachable(worker, failure).response

    async def _is_elsewhere(self, to: str, worker: Worker) -> bool:
        """Tell whether another worker has a context of the name that one on ``worker`` is to have."""
        there = self.state.native(contexts=True)
        others = [each for each in there if each is not worker]
        if await self._asked(others, to) is None:
            return False
        found = await self._asked([worker], self.name)  # without it the worker says what is missing
        return found is not None

    async def _home(self) -> Worker | Problem:
        """Return the worker that has the context, or is to have it."""
        known = self.state.named(self.tenant.contexts.get(self.name, ""))
        if known is not None and (known.healthy or self.verb != "open"):
            return known  # what is sent to one that is down says so, or finds it back
        there = self.state.native(contexts=True)
        if self.name and there:
            found = await self._asked(there, self.name)
            if found is not None:
                note(self.tenant.contexts, self.name, found.name)
                return found
        noted = self.state.noted(self.tenant, self.call)
        if noted is not None:
            return noted
        able = self.state.native(taking=True, contexts=True) if self.verb == "open" else there
        if not able:
            return self.state.nobody(native=True)
        return self.state.owners(self.tenant, self.name, able)[0]

    async def _asked(self, workers: list[Worker], name: str) -> Worker | None:
        path = "/v1/contexts/" + quote(name, safe="/")
        told, _ = await self.state.ask_all(workers, self.call.asking("GET", path))
        return next((worker for worker, reply, _ in told if reply.status_code == 200), None)

    async def _lend(self, worker: Worker) -> WholeAnswer | Problem | None:
        may = self.call.method == "POST" and self.verb != "memory"
        names = names_in(self.call.json()) if may else ()
        if not names:
            return None
        silent = await directory.look(self.state, self.tenant, self.call, names)
        lost = directory.lost(self.state, self.tenant, names, silent)
        if lost is not None:
            return lost
        return await directory.lend(self.state, self.tenant, self.call, names, worker)

    def took(self, worker: Worker, response: httpx.Response, body: bytes) -> None:
        """Take in which contexts are where now."""
        if response.is_success:
            self.tenant = self.state.tenants.keep(self.tenant)
            self._learn(worker, body)
        elif response.status_code == 404 and self.verb != "memory":
            self.tenant.contexts.pop(self.name, None)

    def _learn(self, worker: Worker, body: bytes) -> None:
        """Remember which contexts are on a worker now."""
        if self.verb == "memory":
            return
        if self.call.method == "DELETE" or self.verb == "rename":
            self.tenant.contexts.pop(self.name, None)
        if self.call.method == "DELETE":
            return
        told = _object(body) if self.verb in ("open", "fork", "rename") else {}
        name = told.get("name", self.name)
        note(self.tenant.contexts, name if isinstance(name, str) else self.name, worker.name)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

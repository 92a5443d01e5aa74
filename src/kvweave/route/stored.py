"""What one worker keeps of responses, conversations and summaries, and what goes on from it.

A response that goes on from another, or is of a conversation, goes where that is, and nowhere else. So
does a message or an item that holds a summary which may have been taken back (``/v1/compactions``).
What is known is what answers said; where a router does not know, it asks the workers. Only new
conversations have a place beforehand: rendezvous hashing of their name.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx
from starlette.requests import Request
from starlette.types import ASGIApp

from kvweave.route.completions import RoutedCompletion, not_by_id
from kvweave.route.errand import Errand
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.relay import stored_in, stored_key
from kvweave.route.state import IDEMPOTENCY, RouterState, unreachable
from kvweave.route.tenant import RouteTenant
from kvweave.route.wanted import MAX_NAMES, is_name, prompt_of
from kvweave.route.worker import Worker
from kvweave.serve.chat.sealed import unseal
from kvweave.serve.guard.problems import Problem, make

_PATH = re.compile(
    r"/v1/(responses|conversations|compactions)/(.+?)(?::(?:undo|redo))?(?:/(?:input_)?items(?:/[^/]+)?)?",
    re.DOTALL,
)
ASKED = ("responses", "conversations", "compactions")  # that workers can be asked for by their ids


async def answer(request: Request) -> ASGIApp:
    """Answer a message or a response where what it goes on from is; a new one by the policy."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    body, tenant = call.json(), state.tenant_of(call)
    prompt = prompt_of(body)
    if prompt.by_id:
        return not_by_id(prompt)
    home = await _home_of(state, tenant, call, body)
    if isinstance(home, Problem):
        return home.response
    return await RoutedCompletion(state, call, tenant, prompt, home).answer()


async def opened(request: Request) -> ASGIApp:
    """Open a conversation."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    tenant, name = state.tenant_of(call), call.json().get("name")
    home: Worker | Problem | None = None
    if isinstance(name, str):
        home = await _where(state, tenant, call, stored_key("conversations", name))
    if home is None:
        home = state.noted(tenant, call)
    if home is None:
        taking, key = state.taking(), call.header(IDEMPOTENCY)
        made_up = secrets.token_hex(8) if key is None else tenant.place(key)
        place = name if isinstance(name, str) else made_up
        home = state.owners(tenant, place, taking)[0] if taking else state.nobody()
    return await _do(_Kept(state, call, tenant, ""), home)


async def kept(request: Request) -> ASGIApp:
    """Read, change or delete what is kept, where that is."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    tenant, found = state.tenant_of(call), _PATH.fullmatch(request.scope["path"])
    key = stored_key(found[1], found[2]) if found else ""
    home = await _where(state, tenant, call, key) if found else None
    if home is None:  # nobody has it: any of them says so
        there = state.there()
        home = state.owners(tenant, key, there)[0] if there else state.nobody()
    return await _do(_Kept(state, call, tenant, key), home)


@dataclass(eq=False)
class _Kept(Errand):
    """A verb on something that is kept."""

    key: str  # "" for a new conversation

    def took(self, worker: Worker, response: httpx.Response, body: bytes) -> None:
        """Take in what is kept where."""
        if response.is_success:
            self.tenant = self.state.tenants.keep(self.tenant)
            self.tenant.keep_stored(stored_in(_object(body)), worker.name)
        if self.key and (response.status_code == 404 or self.call.method == "DELETE"):
            self.tenant.stored.pop(self.key, None)


async def _do(errand: _Kept, home: Worker | Problem) -> ASGIApp:
    if isinstance(home, Problem):
        return home.response
    try:
        return await errand.on(home)
    except WorkerFailed as failure:
        errand.state.failed(home, failure)
        return unreachable(home, failure).response


async def _home_of(
    state: RouterState, tenant: RouteTenant, call: Call, body: Mapping[str, Any]
) -> Worker | Problem | None:
    """Return the worker that has what a body goes on from; None where it goes on from nothing."""
    homes: dict[str, Worker] = {}
    for key in before(body):
        found = await _where(state, tenant, call, key)
        if isinstance(found, Worker) and not found.healthy:
            return _down(f"{found.name} has it")
        if isinstance(found, Problem):
            return found
        if found is not None:
            homes[found.name] = found
    summaries: dict[str, Worker] = {}
    for key in islice(dict.fromkeys(summaries_in(body)), MAX_NAMES):
        found = await _where(state, tenant, call, key)
        # a summary says enough to go on without the worker that has what it stands for
        if isinstance(found, Worker) and found.healthy:
            summaries[found.name] = found
    every = homes | summaries
    if len(every) > 1:
        hint = "go on from one of them, or send the items themselves"
        what = "what it goes on from is kept by several workers"
        return make(501, what, code="not_routed", hint=hint)
    return next(iter(every.values()), None)


async def _where(
    state: RouterState, tenant: RouteTenant, call: Call, key: str
) -> Worker | Problem | None:
    """Return the worker that keeps something, None where nobody does. Raises NotAccepted."""
    noun, _, id = key.partition("/")
    if key in tenant.stored:
        return state.named(tenant.stored[key])
    if noun not in ASKED or not is_name(id):
        return None
    path = f"/v1/{noun}/{quote(id, safe='')}"
    told, silent = await state.ask_all(state.there(), call.asking("GET", path))
    for worker, reply, _ in told:
        if reply.status_code == 200:
            state.tenants.keep(tenant).keep_stored([key], worker.name)
            return worker
    lost = [w for w in state.workers if not w.healthy or w in silent]
    if lost and noun != "compactions":
        return _down(f"nobody else has it, and {lost[0].name} may")
    return None


def _down(why: str) -> Problem:
    what, wait = "the worker that has what it goes on from does not answer", {"Retry-After": "5"}
    return make(
        503, what, code="worker_down", hint=f"{why}; try again when it is back", headers=wait
    )


def before(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of what a body goes on from."""
    if isinstance(body.get("previous_response_id"), str):
        yield stored_key("responses", body["previous_response_id"])
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    if isinstance(conversation, str):
        yield stored_key("conversations", conversation)
    for item in _dicts(body.get("input")):
        if item.get("type", "item_reference") == "item_reference" and "role" not in item:
            yield stored_key("items", item.get("id"))


def summaries_in(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the summaries that a body holds, the last one first."""
    for item in reversed(_dicts(body.get("input"))):
        if item.get("type") in ("compaction", "compaction_summary") and isinstance(
            item.get("id"), str
        ):
            yield stored_key("compactions", item["id"])
    for message in reversed(_dicts(body.get("messages"))):
        for block in reversed(_dicts(message.get("content"))):
            id = unseal(block.get("encrypted_content")).get("id")
            if block.get("type") == "compaction" and isinstance(id, str):
                yield stored_key("compactions", id)


def _dicts(given: object) -> list[dict[str, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

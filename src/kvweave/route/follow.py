"""What goes on behind the requests: probes of workers' health, and their placements."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import numpy as np

from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.state import RouterState
from kvweave.route.tenant import RouteTenant
from kvweave.route.worker import Worker, WorkerKind

log = logging.getLogger("kvweave.route")
INSIDE = b"/health/kvweave"  # of a vLLM that has kvweave in it
PAGES = 16  # of placements that are read of one tenant in one round
BETWEEN = 0.02  # seconds between two pages: the worker decodes text for each


async def probing(state: RouterState) -> None:
    """Look at every worker's health again and again, and at once where one failed a request."""
    while True:
        state.look.clear()
        await asyncio.gather(*(probe(state, worker) for worker in state.workers))
        try:
            async with asyncio.timeout(state.options.probe):
                await state.look.wait()
            await asyncio.sleep(min(0.2, state.options.probe))  # not over and over while it is dead
        except TimeoutError:
            pass


async def probe(state: RouterState, worker: Worker) -> None:
    """Look at one worker's health."""
    try:
        response, body = await state.forwarder.ask(worker, Call("GET", b"/health"))
    except WorkerFailed as failure:
        why, told = failure.why, None
    else:
        why = "" if response.is_success else f"its health is {response.status_code}"
        told = _object(body)
    if why:
        if worker.failed(why):
            log.warning("worker %s is down: %s", worker.name, why)
        return
    if worker.succeeded():
        log.warning("worker %s is back", worker.name)
        worker.kind = "unknown"  # another server may stand there now
    ours = told is not None and {"waiting", "active", "model"} <= told.keys()
    worker.kind = "kvweave" if ours else await _kind_of_vllm(state, worker)
    if ours and told is not None:
        worker.busy(sum(n for n in (told["waiting"], told["active"]) if isinstance(n, int)))


async def _kind_of_vllm(state: RouterState, worker: Worker) -> WorkerKind:
    """Return what a server that is not ours is: kvweave inside of vLLM says so, and needs no key for that."""
    if worker.kind in ("vllm", "prefix"):
        return worker.kind
    try:
        response, body = await state.forwarder.ask(worker, Call("GET", INSIDE))
    except WorkerFailed:
        return worker.kind
    told = _object(body) if response.is_success else None
    return "vllm" if told is not None and told.get("kvweave") else "prefix"


async def following(state: RouterState) -> None:
    """Read the placements of all workers for everybody who asked something lately."""
    while True:
        await asyncio.sleep(state.options.probe)
        for tenant in state.tenants.recent():
            workers = [w for w in state.there() if w.kind in ("kvweave", "vllm")]
            await asyncio.gather(*(follow(state, tenant, worker) for worker in workers))
        state.tenants.bound()


async def follow(state: RouterState, tenant: RouteTenant, worker: Worker) -> None:
    """Take in what changed on one worker, with the tenant's own key."""
    holding = tenant.holding(worker.name)
    for _ in range(PAGES):
        target = f"/v1/placements?run={holding.run}&since={holding.seq}"
        headers = [] if tenant.authorization is None else [(b"authorization", tenant.authorization)]
        try:
            response, body = await state.forwarder.ask(
                worker, Call("GET", target.encode(), headers)
            )
        except WorkerFailed:
            return  # its health is looked at elsewhere
        told = _object(body)
        if not response.is_success or told is None:
            return
        try:
            more = take(tenant, worker, told)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("placements of worker %s make no sense: %r", worker.name, error)
            return
        if told["snapshot"]:
            state.metrics.snapshots.labels(worker.name).inc()
        if not more:
            return
        await asyncio.sleep(BETWEEN)


def take(tenant: RouteTenant, worker: Worker, told: dict[str, Any]) -> bool:
    """Take in one page of placements; return whether more are to be read. Raises ValueError and so on."""
    holding = tenant.holding(worker.name)
    if told["snapshot"]:
        holding.begin(str(told["run"]))
    for chunk in told["chunks"]:
        hashes = np.array([int(each, 16) for each in chunk["prints"]], np.uint64)
        holding.placed(int(chunk["id"]), str(chunk["tier"]), tenant.ids(hashes))
    for id in told["gone"]:
        holding.gone(int(id))
    holding.seq = int(told["seq"])
    if not told["more"]:
        holding.end()
    return bool(told["more"])


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

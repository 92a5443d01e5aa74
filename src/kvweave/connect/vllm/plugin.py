"""The endpoint plugin: ``/v1/chunks`` in vLLM's own server, and requests that cannot be woven refused.

vLLM loads it where ``VLLM_PLUGINS`` names it: ``kvweave``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from fastapi import FastAPI, Request, Response

from kvweave.connect.vllm.ahead import DONE, LATER, MORE
from kvweave.connect.vllm.checked import Checked, refused
from kvweave.errors import InvalidArgument, Overloaded

log = logging.getLogger("kvweave.vllm")
LAST = 1 << 30  # of vLLM's priorities: whoever asks comes first, where these count
SOONEST, LATEST = 0.1, 2.0  # seconds until it is looked again whether vLLM has nothing to do
MOST_BYTES = 8 << 20  # of the body of a verb: what is more would hold up vLLM while it is read
PASSED = ("content-type", "if-match", "idempotency-key", "accept")  # headers that verbs read
VERBS = ["GET", "PUT", "POST", "DELETE", "PATCH", "HEAD"]


class KVWeavePlugin:
    """What vLLM asks of an endpoint plugin."""

    name = "kvweave"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/v1/chunks", _verb, methods=VERBS, include_in_schema=False)
        app.add_api_route("/v1/chunks:{rest:path}", _verb, methods=VERBS, include_in_schema=False)
        app.add_api_route("/v1/chunks/{rest:path}", _verb, methods=VERBS, include_in_schema=False)
        app.add_api_route("/v1/placements", _verb, methods=["GET"], include_in_schema=False)
        app.add_api_route("/health/kvweave", _here, methods=["GET"], include_in_schema=False)
        state = app.state
        app.add_middleware(
            Checked,
            engine_of=lambda: getattr(state, "kvweave_engine", None),
            after=lambda says: _wake(state, says),
        )

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there, None where this process only renders."""
        state.kvweave_engine, state.kvweave_turn = engine_client, asyncio.Lock()
        state.kvweave_woken = asyncio.Event()
        state.kvweave_matches = engine_client is not None and _matches(engine_client)
        if engine_client is not None:
            state.kvweave_ahead = asyncio.create_task(_go_ahead(state))


def make() -> KVWeavePlugin:
    """Return the plugin; the entry point."""
    return KVWeavePlugin()


async def _here() -> dict[str, bool]:
    """Tell a router that there are chunks here; as vLLM's own ``/health`` it needs no key."""
    return {"kvweave": True}


async def _verb(request: Request) -> Response:
    """Have a worker answer a verb on chunks, slice by slice."""
    state = request.app.state
    engine, turn = getattr(state, "kvweave_engine", None), getattr(state, "kvweave_turn", None)
    if engine is None or turn is None:
        return refused(Overloaded(1))
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            return refused(
                InvalidArgument(
                    "body", f"it has more than {MOST_BYTES} bytes", "send less of it in one request"
                )
            )
    path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
    path = path.split("?", 1)[0] + (f"?{request.url.query}" if request.url.query else "")
    headers = [(k, v) for k, v in request.headers.items() if k in PASSED]
    said = (request.method, path, headers, bytes(body))
    # one call at a time: vLLM takes all that wait between two of its steps
    async with turn:
        if await request.is_disconnected():
            return Response(status_code=499)
        ticket, reply = (await engine.collective_rpc("kvweave_begin", args=said))[0]
    try:
        while reply is None:
            async with turn:
                if await request.is_disconnected():
                    return Response(status_code=499)
                reply = (await engine.collective_rpc("kvweave_go_on", args=(ticket,)))[0]
    finally:
        if reply is None:
            async with turn:
                await engine.collective_rpc("kvweave_cancel", args=(ticket,))
    status, headers, content = reply
    return Response(content, status, dict(headers))


def _wake(state: Any, says: bool) -> None:
    """A request is over; ``says``: it said something to us."""
    woken = getattr(state, "kvweave_woken", None)
    if woken is not None and (says or state.kvweave_matches):
        woken.set()


async def _go_ahead(state: Any) -> None:
    """Have chunks computed that requests have named, and prompts whose rows are approximate, while
    there are no requests."""
    engine, woken, pause, took = state.kvweave_engine, state.kvweave_woken, SOONEST, 0.0
    while True:
        await woken.wait()
        woken.clear()
        try:
            async with state.kvweave_turn:
                said = LATER
                if not await engine.is_sleeping():
                    said = (await engine.collective_rpc("kvweave_ahead"))[0]
                    if said == DONE:
                        said = (await engine.collective_rpc("kvweave_refine", args=(took,)))[0]
            took = 0.0
            if not isinstance(said, int):
                took, said = await _prefilled(engine, *said), MORE
        except Exception as error:  # tried again behind the next request
            log.warning("nothing is computed ahead now: %s", error)
            if engine.errored:
                return
            said = DONE
        if said != DONE:
            woken.set()
        await asyncio.sleep(pause if said == LATER else 0)
        pause = min(2 * pause, LATEST) if said == LATER else SOONEST


async def _prefilled(engine: Any, tokens: list[int], salt: str | None) -> float:
    """Have vLLM prefill so much of a prompt, as for any request; return the seconds it took."""
    from kvweave.connect.vllm.rest import (
        prefill,
    )  # needs vLLM, which tests of the loop do not

    start = time.perf_counter()
    name = f"kvweave-{secrets.token_hex(8)}"
    async for _ in engine.generate(*prefill(tokens, salt), name, priority=LAST):
        pass
    return time.perf_counter() - start


def _matches(engine: Any) -> bool:
    """Tell whether every request may be woven, whatever it says."""
    transfer = engine.vllm_config.kv_transfer_config
    return bool(transfer and (transfer.kv_connector_extra_config or {}).get("match"))

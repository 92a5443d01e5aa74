"""An answer sent whole, or as server-sent events with a sign of life while none comes."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.guard.problems import Problem, problem_of

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
BEAT_SECONDS = 5.0  # proxies and clients give up on a connection that says nothing
BEAT = ": waiting\n\n"  # a comment: no client takes it for an event


class Reply(ABC):
    """What the client of one answer gets of its events.

    A stream whose events are ``named`` says the ``type`` of each before it, and ends with the last;
    others end with ``[DONE]``.
    """

    streams: bool
    named = False
    beat = BEAT

    @abstractmethod
    def take(self, event: Event) -> list[dict[str, Any]]:
        """Take in an event; return what a stream sends of it."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed, once all events are in."""

    def last(self) -> list[dict[str, Any]]:
        """Return what a stream sends when all events are in."""
        return []

    async def settled(self) -> None:
        """Wait until what came of the answer is kept as it is said to be."""
        return

    def failed(self, problem: Problem) -> list[dict[str, Any]]:
        """Return what a stream sends, as its last, when the answer failed."""
        return [problem.body]


async def respond(events: AsyncGenerator[Event, None], reply: Reply) -> Response:
    """Answer whole or as a stream; closing ``events`` cancels the answer.

    What goes wrong within `BEAT_SECONDS` has its own status; after that a stream has begun, and
    says it as its last event.
    """
    if not reply.streams:
        try:
            async for event in events:
                reply.take(event)
        finally:
            await events.aclose()
        await reply.settled()
        return JSONResponse(reply.whole())
    beating = _beating(events)
    try:
        first = await anext(beating, None)
    except BaseException:
        await beating.aclose()
        raise
    return StreamingResponse(
        _stream(first, beating, reply), media_type="text/event-stream", headers=HEADERS
    )


async def _beating(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event | None, None]:
    """Yield events, and None whenever none came for so long."""
    try:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait({coming}, timeout=BEAT_SECONDS))[0]:
                    yield None
                event = coming.result()
            finally:
                coming.cancel()
                await asyncio.wait({coming})
            if event is None:
                return
            yield event
    finally:
        await events.aclose()


async def _stream(
    first: Event | None, beating: AsyncGenerator[Event | None, None], reply: Reply
) -> AsyncIterator[str]:
    event: Event | None = first
    try:
        while True:
            if event is None:
                yield reply.beat
            else:
                pieces = reply.take(event)
                if isinstance(event, Finished):
                    await reply.settled()
                for piece in pieces:
                    yield _sse(piece, reply.named)
            try:
                event = await anext(beating)
            except StopAsyncIteration:
                break
        await reply.settled()
        for piece in reply.last():
            yield _sse(piece, reply.named)
        if not reply.named:
            yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent: it can only be said here
        for piece in reply.failed(problem_of(error)):
            yield _sse(piece, reply.named)
    finally:
        await beating.aclose()


def _sse(data: dict[str, Any], named: bool) -> str:
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"

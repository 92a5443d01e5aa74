"""Two ways to go a verb's course: a wire that blocks, and one that is awaited."""

from __future__ import annotations

import ssl
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvweave.client.course import (
    AtOnce,
    Course,
    Disconnect,
    Emit,
    HangUp,
    Journey,
    Order,
    Pause,
    Read,
    Send,
)
from kvweave.client.peer import Peer
from kvweave.errors import ServerError

if TYPE_CHECKING:
    import anyio
    import httpx
else:
    try:
        import anyio  # httpx brings it; with it the awaited wire runs on trio too
        import httpx
    except ImportError:
        anyio = httpx = None

T = TypeVar("T")
CONNECT_SECONDS = 10.0


class BlockingWire:
    """Carries out orders in the caller's thread. Threads may share it."""

    def __init__(
        self, peer: Peer, timeout: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.peer = peer
        self._client = httpx.Client(**_settings(peer, timeout), transport=transport)

    def run(self, course: Course[T]) -> T:
        """Return what the course returns."""
        return self.finish(Journey(course))[0]

    def stream(self, running: Journey[Any]) -> Generator[str]:
        """Yield the pieces of text; closing the generator hangs up."""
        pieces = self._stream(running)
        running.pieces = weakref.ref(pieces)  # who lets go of the generator hangs up
        return pieces

    def finish(self, running: Journey[T]) -> list[T]:
        """Go to the end; return the result, in a list, or none where it was stopped."""
        for _ in self.stream(running):
            pass
        return running.results

    def _stream(self, running: Journey[Any]) -> Generator[str]:
        try:
            running.begin()
            while running.order is not None and not running.stopped:
                if isinstance(running.order, Emit):
                    yield running.order.text
                    running.send(None)
                    continue
                try:
                    result = self._do(running.order, running)
                except Exception as error:
                    running.throw(error)
                else:
                    running.send(result)
        finally:
            running.close()
            if running.response is not None:
                running.response.close()

    def _do(self, order: Order, running: Journey[Any]) -> object:
        match order:
            case Send():
                running.response, sent = None, self._client.build_request(**_request(order))
                found = self._client.send(sent, stream=order.open)
                if order.open and found.is_success:
                    running.response, running.chunks = found, found.iter_bytes()
                elif order.open:
                    found.read()
                return found
            case Read():
                return next(running.chunks, b"")
            case Pause(seconds):
                time.sleep(seconds)
            case AtOnce(several):
                return self._together(list(several))
            case HangUp(other):
                other.stop()
                pieces = other.pieces()
                if pieces is not None and not pieces.gi_running:
                    pieces.close()
            case Disconnect():
                self._client.close()
        return None

    def _together(self, several: list[Journey[Any]]) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(several))) as threads:
            runs: list[Future[Any]] = [threads.submit(self.finish, running) for running in several]
            try:
                for done in as_completed(runs):
                    done.result()
            except BaseException:
                for running in several:
                    running.stop()
                raise
        return [done.result()[0] for done in runs]


class AwaitedWire:
    """Carries out orders in the caller's task. A task that is cancelled hangs up."""

    def __init__(
        self, peer: Peer, timeout: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.peer = peer
        self._client = httpx.AsyncClient(**_settings(peer, timeout), transport=transport)

    async def run(self, course: Course[T]) -> T:
        """Return what the course returns."""
        return (await self.finish(Journey(course)))[0]

    def stream(self, running: Journey[Any]) -> AsyncGenerator[str]:
        """Yield the pieces of text; closing the generator hangs up."""
        pieces = self._stream(running)
        running.pieces = weakref.ref(pieces)  # who lets go of the generator hangs up
        return pieces

    async def finish(self, running: Journey[T]) -> list[T]:
        """Go to the end; return the result, in a list, or none where it was stopped."""
        async for _ in self.stream(running):
            pass
        return running.results

    async def _stream(self, running: Journey[Any]) -> AsyncGenerator[str]:
        try:
            running.begin()
            while running.order is not None and not running.stopped:
                if isinstance(running.order, Emit):
                    yield running.order.text
                    running.send(None)
                    continue
                try:
                    result = await self._unless_stopped(running.order, running)
                except Exception as error:
                    running.throw(error)
                else:
                    if not running.stopped:
                        running.send(result)
        finally:
            running.close()
            if running.response is not None:
                with anyio.CancelScope(shield=True):
                    await aside(running.response.aclose)

    async def _unless_stopped(self, order: Order, running: Journey[Any]) -> object:
        """Do a order, and break it off where another task stops the running."""
        with anyio.CancelScope() as running.scope:
            try:
                return await aside(partial(self._do, order, running))
            finally:
                running.scope = None  # one that was left must not be cancelled
        return None

    async def _do(self, order: Order, running: Journey[Any]) -> object:
        match order:
            case Send():
                running.response, sent = None, self._client.build_request(**_request(order))
                found = await self._client.send(sent, stream=order.open)
                if order.open and found.is_success:
                    running.response, running.chunks = found, found.aiter_bytes()
                elif order.open:
                    await found.aread()
                return found
            case Read():
                return await anext(running.chunks, b"")
            case Pause(seconds):
                await anyio.sleep(seconds)
            case AtOnce(several):
                return await self._together(list(several))
            case HangUp(other):
                other.stop()
                pieces = other.pieces()
                if pieces is not None and not pieces.ag_running:
                    await pieces.aclose()
            case Disconnect():
                await self._client.aclose()
        return None

    async def _together(self, several: list[Journey[Any]]) -> list[Any]:
        failed: list[Exception] = []

        async def one(running: Journey[Any]) -> None:
            try:
                await self.finish(running)
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for running in several:
                group.start_soon(one, running)
        if failed:
            raise failed[0]
        return [running.results[0] for running in several]


Wire = BlockingWire | AwaitedWire


async def aside(
    call: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """Await a call of httpx, in a task of its own: where asyncio cancels who waits, a scope of anyio's tells
    it, which lets a connection be given back; cancelled in the middle of that, its pool has it for ever.

    What came when nobody waited any more is given to ``undo``.
    """
    made: list[T] = []
    failed: list[Exception] = []

    async def run() -> None:
        try:
            made.append(await call())
        except Exception as error:
            failed.append(error)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(run)
    except BaseException:
        with anyio.CancelScope(shield=True):
            if undo is not None and made:
                await undo(made[0])
        raise
    if failed:
        raise failed.pop()  # in a list of this frame it would be a circle
    return made[0]


def require_httpx() -> None:
    """Raise ServerError without the extra."""
    if httpx is None:
        raise ServerError("httpx is not installed", hint="pip install 'kvweave[client]'")


def _settings(peer: Peer, timeout: float) -> dict[str, Any]:
    return {
        "base_url": peer.url,
        "headers": peer.headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
        "trust_env": not peer.is_local,  # a proxy cannot reach this machine
        "verify": urlsplit(peer.url).scheme == "https" or _nobody(),
    }


def _nobody() -> ssl.SSLContext:
    """Return whom plain HTTP trusts: to read all certificates of the world takes 40 ms a client."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _request(order: Send) -> Mapping[str, Any]:
    return {
        "method": order.method,
        "url": order.path,
        "json": order.body,
        "params": order.params,
        "headers": order.headers,
    }

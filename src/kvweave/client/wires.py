"""Two ways to take a verb's steps: a wire that blocks, and one that is awaited."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, TypeVar

from kvweave.client.link import Link
from kvweave.client.steps import (
    Command,
    Disconnect,
    HangUp,
    Pause,
    Piece,
    Read,
    Send,
    Steps,
    Together,
    Walk,
)
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
    """Takes steps one after the other in the caller's thread. Threads may share it."""

    def __init__(
        self, link: Link, timeout: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.link = link
        self._client = httpx.Client(**_settings(link, timeout), transport=transport)

    def run(self, steps: Steps[T]) -> T:
        """Return what the steps return."""
        return self.finish(Walk(steps))[0]

    def stream(self, walk: Walk[Any]) -> Generator[str]:
        """Yield the pieces of text; closing the generator hangs up."""
        walk.pieces = self._stream(walk)
        return walk.pieces  # type: ignore[no-any-return]

    def finish(self, walk: Walk[T]) -> list[T]:
        """Go to the end; return the result, in a list, or none where it was stopped."""
        for _ in self.stream(walk):
            pass
        return walk.results

    def _stream(self, walk: Walk[Any]) -> Generator[str]:
        try:
            walk.begin()
            while walk.command is not None and not walk.stopped:
                if isinstance(walk.command, Piece):
                    yield walk.command.text
                    walk.send(None)
                    continue
                try:
                    result = self._do(walk.command, walk)
                except Exception as error:
                    walk.throw(error)
                else:
                    walk.send(result)
        finally:
            walk.close()
            if walk.response is not None:
                walk.response.close()

    def _do(self, command: Command, walk: Walk[Any]) -> object:
        match command:
            case Send():
                walk.response, sent = None, self._client.build_request(**_request(command))
                found = self._client.send(sent, stream=command.open)
                if command.open and found.is_success:
                    walk.response, walk.chunks = found, found.iter_bytes()
                elif command.open:
                    found.read()
                return found
            case Read():
                return next(walk.chunks, b"")
            case Pause(seconds):
                time.sleep(seconds)
            case Together(walks):
                return self._together(list(walks))
            case HangUp(other):
                other.stop()
                if other.pieces is not None and not other.pieces.gi_running:
                    other.pieces.close()
            case Disconnect():
                self._client.close()
        return None

    def _together(self, walks: list[Walk[Any]]) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(walks))) as threads:
            runs: list[Future[Any]] = [threads.submit(self.finish, walk) for walk in walks]
            try:
                for done in as_completed(runs):
                    done.result()
            except BaseException:
                for walk in walks:
                    walk.stop()
                raise
        return [done.result()[0] for done in runs]


class AwaitedWire:
    """Takes steps in the caller's task. A task that is cancelled hangs up."""

    def __init__(
        self, link: Link, timeout: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.link = link
        self._client = httpx.AsyncClient(**_settings(link, timeout), transport=transport)

    async def run(self, steps: Steps[T]) -> T:
        """Return what the steps return."""
        return (await self.finish(Walk(steps)))[0]

    def stream(self, walk: Walk[Any]) -> AsyncGenerator[str]:
        """Yield the pieces of text; closing the generator hangs up."""
        walk.pieces = self._stream(walk)
        return walk.pieces  # type: ignore[no-any-return]

    async def finish(self, walk: Walk[T]) -> list[T]:
        """Go to the end; return the result, in a list, or none where it was stopped."""
        async for _ in self.stream(walk):
            pass
        return walk.results

    async def _stream(self, walk: Walk[Any]) -> AsyncGenerator[str]:
        try:
            walk.begin()
            while walk.command is not None and not walk.stopped:
                if isinstance(walk.command, Piece):
                    yield walk.command.text
                    walk.send(None)
                    continue
                try:
                    result = await self._unless_stopped(walk.command, walk)
                except Exception as error:
                    walk.throw(error)
                else:
                    if not walk.stopped:
                        walk.send(result)
        finally:
            walk.close()
            if walk.response is not None:
                with anyio.CancelScope(shield=True):
                    await walk.response.aclose()

    async def _unless_stopped(self, command: Command, walk: Walk[Any]) -> object:
        """Do a command, and break it off where another task stops the walk."""
        with anyio.CancelScope() as walk.scope:
            try:
                return await self._do(command, walk)
            finally:
                walk.scope = None  # one that was left must not be cancelled
        return None

    async def _do(self, command: Command, walk: Walk[Any]) -> object:
        match command:
            case Send():
                walk.response, sent = None, self._client.build_request(**_request(command))
                found = await self._client.send(sent, stream=command.open)
                if command.open and found.is_success:
                    walk.response, walk.chunks = found, found.aiter_bytes()
                elif command.open:
                    await found.aread()
                return found
            case Read():
                return await anext(walk.chunks, b"")
            case Pause(seconds):
                await anyio.sleep(seconds)
            case Together(walks):
                return await self._together(list(walks))
            case HangUp(other):
                other.stop()
                if other.pieces is not None and not other.pieces.ag_running:
                    await other.pieces.aclose()
            case Disconnect():
                await self._client.aclose()
        return None

    async def _together(self, walks: list[Walk[Any]]) -> list[Any]:
        failed: list[Exception] = []

        async def one(walk: Walk[Any]) -> None:
            try:
                await self.finish(walk)
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for walk in walks:
                group.start_soon(one, walk)
        if failed:
            raise failed[0]
        return [walk.results[0] for walk in walks]


Wire = BlockingWire | AwaitedWire


def require_httpx() -> None:
    """Raise ServerError without the extra."""
    if httpx is None:
        raise ServerError("httpx is not installed", hint="pip install 'kvweave[client]'")


def _settings(link: Link, timeout: float) -> dict[str, Any]:
    return {
        "base_url": link.url,
        "headers": link.headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
        "trust_env": not link.is_local,  # a proxy cannot reach this machine
    }


def _request(command: Send) -> Mapping[str, Any]:
    return {
        "method": command.method,
        "url": command.path,
        "json": command.body,
        "params": command.params,
        "headers": command.headers,
    }

"""The client that is awaited, behind one that blocks, so that one test is for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from kvweave import AsyncClient, Client
from kvweave.client.faces import Awaited

FACES = ("blocking", "awaited")


class Proxy:
    """An awaited object whose verbs return when they are done."""

    def __init__(self, real: Any, portal: BlockingPortal) -> None:
        self.__dict__ |= {"real": real, "portal": portal}

    def __getattr__(self, name: str) -> Any:
        return shown(getattr(self.real, name), self.portal)

    def __repr__(self) -> str:
        return repr(self.real)

    def __enter__(self) -> Any:
        return shown(self.real.__aenter__(), self.portal)

    def __exit__(self, *error: Any) -> Any:
        return shown(self.real.__aexit__(*error), self.portal)


def shown(value: Any, portal: BlockingPortal) -> Any:
    """Return a value as the blocking client would give it."""
    if isinstance(value, Coroutine):

        async def wait() -> Any:
            return await value

        return shown(portal.call(wait), portal)
    if inspect.isasyncgen(value):
        return pieces(value, portal)
    if isinstance(value, Awaited):
        return Proxy(value, portal)
    if isinstance(value, Callable) and not isinstance(value, type):
        return lambda *args, **options: shown(value(*map(bare, args), **options), portal)
    if type(value) is dict:
        return {key: shown(each, portal) for key, each in value.items()}
    return value


def bare(value: Any) -> Any:
    """Return what was shown as it is."""
    if isinstance(value, list):
        return [bare(each) for each in value]
    return value.real if isinstance(value, Proxy) else value


def pieces(generator: Any, portal: BlockingPortal) -> Iterator[Any]:
    async def more() -> Any:
        return await anext(generator, None)

    try:
        while (piece := portal.call(more)) is not None:
            yield piece
    finally:
        with suppress(RuntimeError):  # the portal is over, and so is what was read
            portal.call(generator.aclose)


@contextmanager
def faces(face: str) -> Iterator[Callable[..., Any]]:
    """Yield what makes clients of a face."""
    if face == "blocking":
        yield Client
        return
    with start_blocking_portal() as portal:

        def make(*args: Any, **options: Any) -> Any:
            async def made() -> AsyncClient:
                return AsyncClient(*args, **options)

            return Proxy(portal.call(made), portal)

        yield make

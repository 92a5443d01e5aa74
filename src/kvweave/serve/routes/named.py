"""The context that a request names, and the version that it wants it to have."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Response

from kvweave.engine import Engine
from kvweave.errors import ContextBusy, ContextChanged, InvalidArgument
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.routes.base import PathRef, The
from kvweave.serve.state import ServerState
from kvweave.weave.context import Context

T = TypeVar("T")
# A caller that hung up is noticed some moments later; what it asks for next is not refused for that.
GRACE_SECONDS = 1.0
_ETAG = re.compile(r'(?:W/)?"?(\d{1,18})"?')
IfMatch = Annotated[
    str | None,
    Header(alias="If-Match", max_length=64, description="a version; 412 if it is another now"),
]


@dataclass(slots=True)
class NamedContext:
    """A context of the caller; what works on it refuses another version than it wants (412).

    Answers carry the version that there is then as their ``ETag``.
    """

    the: ServerState
    tenant: str
    name: str
    wanted: int | None
    response: Response

    async def read(self, work: Callable[[Engine, Context], T]) -> T:
        """Run ``work`` on it; the version may be any."""

        def run(engine: Engine) -> tuple[T, int]:
            context = engine.get_context(self.name, self.tenant)
            return work(engine, context), context.history.version

        return self._told(await self.the.call(self.tenant, run))

    async def look(self, task: Callable[[Engine, Context], Task[T]]) -> T:
        """As `read`, for work that goes on beside the answers under way."""

        def run(engine: Engine) -> Task[tuple[T, int]]:
            context = engine.get_context(self.name, self.tenant)
            result = yield from task(engine, context)
            return result, context.history.version

        return self._told(await self.the.run(self.tenant, run))

    async def change(self, work: Callable[[Engine, Context], T]) -> T:
        """Run ``work`` on it, if it has the version wanted and nothing of it is under way.

        Waits `GRACE_SECONDS` for an answer to end. Raises ContextChanged, ContextBusy.
        """

        def run(engine: Engine) -> tuple[T, int]:
            context = self.open(engine)
            return work(engine, context), context.history.version

        return self._told(await self.free(lambda: self.the.call(self.tenant, run)))

    async def run(self, task: Callable[[Engine, Context], Task[T]]) -> T:
        """As `change`, for work that goes on beside the answers under way."""

        def run(engine: Engine) -> Task[tuple[T, int]]:
            context = self.open(engine)
            result = yield from task(engine, context)
            return result, context.history.version

        return self._told(await self.free(lambda: self.the.run(self.tenant, run)))

    def open(self, engine: Engine) -> Context:
        """Return it, in the engine's thread. Raises ContextChanged, ContextBusy."""
        context = engine.get_context(self.name, self.tenant)
        if self.the.driver.is_busy(context):
            raise ContextBusy(self.name)
        if self.wanted is not None and context.history.version != self.wanted:
            raise ContextChanged(self.name, self.wanted, context.history.version)
        return context

    async def free(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Do ``ask``, again while an answer is under way, for `GRACE_SECONDS`."""
        until = time.monotonic() + GRACE_SECONDS
        while True:
            try:
                return await ask()
            except ContextBusy:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(GRACE_SECONDS / 20)

    def _told(self, found: tuple[T, int]) -> T:
        self.response.headers["ETag"] = f'"{found[1]}"'
        return found[0]


async def _named(
    the: The, tenant: Tenant, name: PathRef, response: Response, if_match: IfMatch = None
) -> NamedContext:
    wanted = None
    if if_match is not None and if_match.strip() != "*":
        found = _ETAG.fullmatch(if_match.strip())
        if found is None:
            raise InvalidArgument("If-Match", f"{if_match!r} is no version", 'such as "7"')
        wanted = int(found[1])
    return NamedContext(the, tenant, name, wanted, response)


OnContext = Annotated[NamedContext, Depends(_named)]
"""A route's parameter of this type is the context that its path names."""

"""``/v1/contexts/NAME:append`` and the other edits, one by one or several as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictInt

from kvweave.chunk.identity import Kind
from kvweave.engine import Engine
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.routes.base import ERRORS, STRICT, ChunkRef, Content, Int
from kvweave.serve.routes.named import NamedContext, OnContext
from kvweave.serve.routes.shown import ContextView, PartEntry, Summary, part_entry, view_of
from kvweave.serve.routes.strict import StrictRoute
from kvweave.weave.context import Context
from kvweave.weave.parts import Mode, Part
from kvweave.weave.special import PlainText

router = APIRouter(
    prefix="/v1/contexts", tags=["contexts"], responses=ERRORS, route_class=StrictRoute
)

MAX_EDITS = 1024  # of one request
_Json = dict[str, Any]


class ByUid(BaseModel):
    """A part by its ``uid``, which no edit of somebody else can make another."""

    model_config = STRICT

    uid: StrictInt


PartRef = StrictInt | ChunkRef | ByUid


def part_of(context: Context, ref: PartRef) -> int:
    """Return the index of a part by name, ``#id``, index or uid. Raises ChunkNotFound."""
    if isinstance(ref, ByUid):
        uids = [part.uid for part in context.parts]
        return uids.index(ref.uid) if ref.uid in uids else context.index(f"uid {ref.uid}")
    return context.index(ref)


class Append(Content):
    """Text, tokens, or a stored chunk or ``[start, stop)`` of it; before part ``at``, or at the end."""

    verb: Literal["append"] = "append"
    chunk: ChunkRef | None = None
    kind: Kind = "document"
    name: ChunkRef | None = None
    at: Annotated[Int, Field(ge=0)] | None = None
    start: Int | None = None
    stop: Int | None = None

    def _is_complete(self) -> bool:
        n_given = sum(x is not None for x in (self.text, self.tokens, self.chunk))
        is_slice = self.start is not None or self.stop is not None
        return n_given == 1 and not (is_slice and self.chunk is None)

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> Part:
        """Do it."""
        at = len(context.parts) if self.at is None else self.at
        if self.chunk is None:
            tokens = tokens_of(engine, self.content)
            named.the.quota.check(engine, named.tenant, [len(tokens)])
            chosen = None if self.name is None else named.the.new_name(self.name)
            part = context.insert(at, tokens, kind=self.kind, name=chosen)
            if chosen is not None:
                named.the.library.note(named.tenant, part.id)
            return part
        if self.start is None and self.stop is None:
            return context.insert_chunk(at, self.chunk)
        n = engine.table.resolve(self.chunk, named.tenant).n_tokens
        stop = n if self.stop is None else self.stop
        return context.insert_slice(at, self.chunk, self.start or 0, stop)


class NewMessage(BaseModel):
    """A chat message."""

    model_config = STRICT

    verb: Literal["message"] = "message"
    role: Literal["system", "user", "assistant", "tool"]
    content: str

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> Part:
        """Do it."""
        named.the.quota.check(engine, named.tenant, [len(tokens_of(engine, self.content))])
        part = context.message(self.role, PlainText(self.content))
        named.the.library.note(named.tenant, part.id)
        return part


class Drop(BaseModel):
    """Parts to remove."""

    model_config = STRICT

    verb: Literal["drop"] = "drop"
    parts: list[PartRef]
    mode: Mode | None = None

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> None:
        """Do it."""
        context.drop(*(part_of(context, ref) for ref in self.parts), mode=self.mode)


class Replace(Content):
    """A part, and what shall stand there."""

    verb: Literal["replace"] = "replace"
    part: PartRef
    kind: Kind = "document"

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> Part:
        """Do it."""
        tokens = tokens_of(engine, self.content)
        named.the.quota.check(engine, named.tenant, [len(tokens)])
        return context.replace(part_of(context, self.part), tokens, kind=self.kind)


class Amend(Content):
    """A part, and an erratum of it: text or tokens, or with ``role`` a message."""

    verb: Literal["amend"] = "amend"
    part: PartRef
    kind: Kind | None = None
    role: Literal["system", "user", "assistant", "tool"] | None = None

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> Part:
        """Do it."""
        tokens = tokens_of(engine, self.content)
        named.the.quota.check(engine, named.tenant, [len(tokens)])
        content = tokens if self.role is None else self.content
        index = part_of(context, self.part)
        return context.amend(index, content, kind=self.kind, role=self.role)


class Reorder(BaseModel):
    """All parts, in the new order."""

    model_config = STRICT

    verb: Literal["reorder"] = "reorder"
    order: list[PartRef]

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> None:
        """Do it."""
        context.reorder([part_of(context, ref) for ref in self.order])


class Leave(BaseModel):
    """Ranges of tokens, each its first and the one behind its last."""

    model_config = STRICT

    verb: Literal["leave"] = "leave"
    ranges: Annotated[list[tuple[Int, Int]], Field(min_length=1, max_length=MAX_EDITS)]

    def apply(self, named: NamedContext, engine: Engine, context: Context) -> None:
        """Do it."""
        context.leave(*self.ranges)


AnyEdit = Annotated[
    Append | NewMessage | Drop | Replace | Amend | Reorder | Leave, Field(discriminator="verb")
]


class Edits(BaseModel):
    """Edits, each of what the ones before it made."""

    model_config = STRICT

    edits: Annotated[list[AnyEdit], Field(max_length=MAX_EDITS)]


class EditedView(Summary):
    """A context in full, and the part that each edit made, null where it made none."""

    base: int | None
    parts: list[PartEntry]
    plan: _Json
    made: list[PartEntry | None]


@router.post("/{name:path}:append", response_model=PartEntry)
async def append(here: OnContext, body: Append) -> _Json:
    """Add text, tokens, or a chunk or a slice of one, at the end or before part ``at``."""
    return await _made(here, body)


@router.post("/{name:path}:message", response_model=PartEntry)
async def message(here: OnContext, body: NewMessage) -> _Json:
    """Add one chat message, wrapped by the model's chat template."""
    return await _made(here, body)


@router.post("/{name:path}:replace", response_model=PartEntry)
async def replace_part(here: OnContext, body: Replace) -> _Json:
    """Put new text in the place of a part; what stands behind is woven anew."""
    return await _made(here, body)


@router.post("/{name:path}:amend", response_model=PartEntry)
async def amend(here: OnContext, body: Amend) -> _Json:
    """Add an erratum of a part at the end; what stands there is left as it is."""
    return await _made(here, body)


@router.post("/{name:path}:drop", response_model=ContextView)
async def drop(here: OnContext, body: Drop) -> _Json:
    """Remove parts: forget them, or evict only their memory."""
    return await _edited(here, body)


@router.post("/{name:path}:reorder", response_model=ContextView)
async def reorder(here: OnContext, body: Reorder) -> _Json:
    """Put the parts in another order."""
    return await _edited(here, body)


@router.post("/{name:path}:leave", response_model=ContextView)
async def leave(here: OnContext, body: Leave) -> _Json:
    """Leave only some ranges of the context's tokens, and close up."""
    return await _edited(here, body)


@router.post("/{name:path}:edit", response_model=EditedView)
async def edit(here: OnContext, body: Edits) -> _Json:
    """Do several edits as one version: all of them, or none."""

    def work(engine: Engine, context: Context) -> _Json:
        with _bounded(here, context):
            made = [each.apply(here, engine, context) for each in body.edits]
        view = view_of(engine, here.the, context)
        shown = {part["uid"]: part for part in view["parts"]}
        return view | {"made": [part and shown.get(part.uid) for part in made]}

    return await here.change(work)


async def _made(here: NamedContext, body: Append | NewMessage | Replace | Amend) -> _Json:
    def work(engine: Engine, context: Context) -> _Json:
        with _bounded(here, context):
            part = body.apply(here, engine, context)
        return part_entry(engine, context, part)

    return await here.change(work)


async def _edited(here: NamedContext, body: Drop | Reorder | Leave) -> _Json:
    def work(engine: Engine, context: Context) -> _Json:
        with _bounded(here, context):
            body.apply(here, engine, context)
        return view_of(engine, here.the, context)

    return await here.change(work)


@contextmanager
def _bounded(here: NamedContext, context: Context) -> Iterator[None]:
    """Edits as one; none of them if the context would have too many parts then."""
    with context.edit():
        yield
        here.the.quota.check_parts(len(context.parts))

"""``/v1/memory``: what the context of a long conversation holds, and what it remembers beside it.

A memory goes by the name of its context. Its verbs are steps: each happens wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, OverQuota
from kvweave.memory import MemoryBudget
from kvweave.memory.told import ZONES, By
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.memories import OpenMemory
from kvweave.serve.routes import remembered as shape
from kvweave.serve.routes.base import ERRORS, MAX_REF, The
from kvweave.serve.routes.named import NamedContext, OnContext
from kvweave.serve.routes.shown import part_told
from kvweave.serve.routes.strict import DryQuery, StrictRoute, is_dry
from kvweave.weave.context import Context
from kvweave.weave.special import PlainText

router = APIRouter(prefix="/v1/memory", tags=["memory"], responses=ERRORS, route_class=StrictRoute)

T = TypeVar("T")
_Json = dict[str, Any]
ItemName = Annotated[str, Query(min_length=1, max_length=MAX_REF)]
ItemPattern = Annotated[str, Query(min_length=1, max_length=MAX_REF)]


@router.get("", response_model=shape.MemoryList)
async def memories(
    tenant: Tenant, the: The, limit: Annotated[int, Query(ge=0, le=1000)] = 1000,
    after: Annotated[str, Query(max_length=256)] = "",
) -> _Json:  # fmt: skip
    """List the memories by the names of their contexts."""

    def work(engine: Engine) -> _Json:
        mine = the.memories.of(tenant)
        names = sorted(name for name in mine if name > after)
        more = names[limit - 1] if 0 < limit < len(names) else None
        told = [{"name": n, "root": mine[n].memory.root} for n in names[:limit]]
        return {"object": "list", "data": told, "next": more}

    return await the.call(tenant, work)


@router.post("/{name:path}:open", response_model=shape.MemoryView, status_code=201)
async def open_memory(here: OnContext, body: shape.Open) -> _Json:
    """Open a memory over a context."""
    root = here.the.new_name(body.root)
    budget = MemoryBudget(**body.budget.model_dump(exclude_none=True))

    def work(engine: Engine, context: Context) -> _Json:
        here.the.new_name(f"{root}/{context.name}/sum-000")  # names of items are made of these two
        how = (body.summarise, body.sentences)
        return view_of(here, context, here.the.memories.open(context, root, budget, *how))

    return await here.change(work)


@router.get("/{name:path}:items", response_model=shape.ItemList)
async def items(here: OnContext, pattern: ItemPattern = "**") -> _Json:
    """List the items that match, by name."""
    return await _read(here, lambda each: _items(each.memory.items(pattern)))


@router.get("/{name:path}:read", response_model=shape.ItemText)
async def read(here: OnContext, item: ItemName) -> _Json:
    """Tell what an item says."""

    def work(each: OpenMemory) -> _Json:
        return {"name": each.memory.items_below.full(item), "text": each.memory.read(item)}

    return await _read(here, work)


@router.get("/{name:path}:blocks", response_model=shape.BlockList)
async def blocks(here: OnContext) -> _Json:
    """List the memory blocks by label."""
    return await _read(here, lambda each: {"object": "list", "data": [*map(asdict, each.blocks)]})


@router.post("/{name:path}:block", response_model=shape.BlockTold)
async def block(here: OnContext, body: shape.BlockCall) -> _Json:
    """Add a block, give it another value, append a line, or replace a text in it."""

    def work(each: OpenMemory) -> _Json:
        return asdict(body.apply(each.blocks))

    return await _step(here, "anchor" if body.verb == "add" else "write", work, *body.texts())


@router.post("/{name:path}:tool", response_model=shape.ToolTold)
async def tool(here: OnContext, body: shape.MemoryToolCall) -> _Json:
    """Answer a call of the memory tool; what goes wrong is told as the tool's result."""
    call = body.model_dump(exclude_none=True)

    def work(engine: Engine, context: Context) -> _Json:
        each = here.the.memories.get(context)
        try:
            for text in body.texts():
                tokens_of(engine, PlainText(text))
            if body.command in shape.TAKES_NOTHING:
                return asdict(each.tool(call))
            with here.the.memories.step(each, "write"):
                return asdict(each.tool(call))
        except (OverQuota, InvalidArgument) as error:
            return {"text": f"Error: {error}", "is_error": True}

    return await here.change(work)


@router.post("/{name:path}:tell", response_model=shape.PartTold)
async def tell(here: OnContext, body: shape.Tell) -> _Json:
    """Make room, and add a message without an answer."""

    def work(each: OpenMemory) -> Task[_Json]:
        return part_told((yield from each.memory.telling(body.content, body.kind)))

    return await _run(here, "tell", work, body.content)


@router.post("/{name:path}:settle", response_model=shape.ItemNames)
async def settle(here: OnContext) -> _Json:
    """Bring window and summaries under their budgets now."""

    def work(each: OpenMemory) -> Task[_Json]:
        return {"names": (yield from each.memory.settling())}

    return await _run(here, "settle", work)


@router.post("/{name:path}:search", response_model=shape.FoundItems)
async def search(here: OnContext, body: shape.Search) -> _Json:
    """Rank items, and change nothing."""

    def work(engine: Engine, context: Context) -> Task[_Json]:
        asked, each = _asked(engine, body.question, body.by), here.the.memories.get(context)
        found = yield from each.memory.searching(asked, body.by, body.n)
        return {"data": [{"name": name, "score": score} for name, score in found]}

    return await here.look(work)


@router.post("/{name:path}:recall", response_model=shape.ItemNames)
async def recall(here: OnContext, body: shape.Recall) -> _Json:
    """Let items stand between anchors and summaries, in place of what was recalled before."""

    def work(engine: Engine, context: Context) -> Task[_Json]:
        asked, each = _asked(engine, body.question, body.by), here.the.memories.get(context)
        found = yield from each.memory.recalling(asked, body.by, body.n)
        here.the.memories.touch(each)
        return {"names": found}

    return await here.run(work)


@router.post("/{name:path}:release", response_model=shape.ItemNames)
async def release(here: OnContext, body: shape.Matching) -> _Json:
    """Take recalled items out of the context; they stay items."""
    return await _take(here, lambda each: {"names": each.memory.release(body.pattern)})


@router.post("/{name:path}:anchor", response_model=shape.Name)
async def anchor(here: OnContext, body: shape.Anchor) -> _Json:
    """Pin a text in front of all but other anchors."""

    def work(each: OpenMemory) -> _Json:
        here.the.new_name(each.memory.items_below.new(f"anchors/{body.label}"))
        return {"name": each.memory.anchor(body.label, body.content)}

    return await _step(here, "anchor", work, body.content)


@router.post("/{name:path}:write", response_model=shape.Name)
async def write(here: OnContext, body: shape.Write) -> _Json:
    """Write an item, in the context too where it stands there."""

    def work(each: OpenMemory) -> _Json:
        name = here.the.new_name(each.memory.items_below.new(body.name))
        return {"name": each.memory.write(name, body.content, replace=body.replace)}

    return await _step(here, "write", work, body.content)


@router.post("/{name:path}:delete", response_model=shape.ItemNames)
async def delete(here: OnContext, body: shape.DryMatching, dry: DryQuery = False) -> _Json:
    """Remove items, from the context too."""

    def work(each: OpenMemory) -> _Json:
        if is_dry(dry, body):
            return {"names": each.memory.items_below.names(body.pattern)}
        return {"names": each.memory.delete(body.pattern)}

    return await _take(here, work)


@router.post("/{name:path}:rename", response_model=shape.Name)
async def rename(here: OnContext, body: shape.RenameItem) -> _Json:
    """Give an item, or all below a ``directory/``, another name."""

    def work(each: OpenMemory) -> _Json:
        here.the.new_name(each.memory.items_below.full(body.to).removesuffix("/"))
        return {"name": each.memory.rename(body.name, body.to)}

    return await _take(here, work)


@router.post("/{name:path}:undo", response_model=shape.Undone)
async def undo(here: OnContext) -> _Json:
    """Take back the last step; null where there is none."""
    return await _take(here, lambda each: {"undone": each.memory.undo()})


@router.post("/{name:path}:idle", response_model=shape.SleptTold)
async def idle(here: OnContext) -> _Json:
    """Do one bounded step of what can wait, null where nothing does."""

    def work(each: OpenMemory) -> Task[_Json]:
        slept = yield from each.memory.idling()
        return {"slept": None if slept is None else asdict(slept)}

    return await _run(here, "idle", work)


@router.get("/{name:path}", response_model=shape.MemoryView)
async def view(here: OnContext) -> _Json:
    """Tell which part of the context is in which zone."""
    return await here.read(lambda _, ctx: view_of(here, ctx, here.the.memories.get(ctx)))


@router.delete("/{name:path}", response_model=shape.MemorySummary)
async def close(here: OnContext) -> _Json:
    """Close a memory: what it pinned is unpinned; context and items stay, steps are forgotten."""

    def work(engine: Engine, context: Context) -> _Json:
        told = {"name": context.name, "root": here.the.memories.get(context).memory.root}
        here.the.memories.close(context)
        return told

    return await here.change(work)


# ---- how


def view_of(here: NamedContext, context: Context, each: OpenMemory) -> _Json:
    """Return one memory in full."""
    memory = each.memory
    return {
        "name": context.name,
        "root": memory.root,
        "version": context.history.version,
        "n_tokens": context.n_tokens,
        "n_items": each.n_items,
        "n_steps": memory.n_steps,
        "busy": here.the.driver.is_busy(context),
        "summarise": each.summarise,
        "budget": asdict(memory.budget),
        "zones": {zone: [*map(part_told, memory.zone(zone))] for zone in ZONES},
    }


async def _read(here: NamedContext, work: Callable[[OpenMemory], T]) -> T:
    return await here.read(lambda _, context: work(here.the.memories.get(context)))


async def _take(here: NamedContext, work: Callable[[OpenMemory], T]) -> T:
    """Do what takes no more room than there is taken."""

    def run(engine: Engine, context: Context) -> T:
        each = here.the.memories.get(context)
        found = work(each)
        here.the.memories.touch(each)
        return found

    return await here.change(run)


async def _step(
    here: NamedContext, verb: str, work: Callable[[OpenMemory], T], *texts: str | list[int]
) -> T:
    """Do what may take more, wholly or not at all; ``texts`` that are far too long are refused first."""

    def task(each: OpenMemory) -> Task[T]:
        yield from ()
        return work(each)

    return await _run(here, verb, task, *texts)


async def _run(
    here: NamedContext, verb: str, work: Callable[[OpenMemory], Task[T]], *texts: str | list[int]
) -> T:
    """As `_step`, for work that goes on beside the answers under way."""

    def run(engine: Engine, context: Context) -> Task[T]:
        memories = here.the.memories
        each = memories.get(context)
        memories.check(each, *(len(tokens_of(engine, text)) for text in texts))
        with memories.step(each, verb):
            return (yield from work(each))

    return await here.run(run)


def _asked(engine: Engine, question: str | list[int], by: By) -> str | list[int]:
    """Return a question as the memory takes it. Raises ContextTooLong."""
    if by == "name":
        return question
    asked = PlainText(question) if isinstance(question, str) else question
    tokens_of(engine, asked)
    return asked


def _items(found: list[Any]) -> _Json:
    return {"object": "list", "data": [asdict(item) for item in found]}

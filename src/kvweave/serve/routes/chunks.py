"""``/v1/chunks``: the file verbs, each on the chunks of the caller's namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field, FiniteFloat, StrictBool, StringConstraints

from kvweave.chunk.files import Entry, Files
from kvweave.chunk.identity import ChunkId, Kind, TierName
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, KVWeaveError
from kvweave.run.loop import Task
from kvweave.serve.guard.access import Tenant
from kvweave.serve.guard.text import tokens_of
from kvweave.serve.routes.base import (
    ERRORS,
    STRICT,
    ChunkRef,
    Content,
    PathPattern,
    PathRef,
    The,
)
from kvweave.serve.routes.strict import DryQuery, DryRun, StrictRoute, is_dry
from kvweave.serve.state import ServerState
from kvweave.weave.putting import NewChunk

router = APIRouter(prefix="/v1/chunks", tags=["chunks"], responses=ERRORS, route_class=StrictRoute)

MAX_ITEMS = 1024  # chunks of one request

Pattern = Annotated[str, Query(max_length=256, description="a name, glob or `docs/`")]
_Limit = Annotated[int | None, Query(ge=0, le=2**31)]
Sort = Literal[
    "name", "id", "n_tokens", "n_bytes", "kind", "tier", "pinned", "created", "last_used", "n_uses"
]  # fmt: skip


class ChunkEntry(BaseModel):
    """One name and what stands behind it; a chunk without names is listed as ``#17``."""

    name: str
    id: int
    n_tokens: int
    n_bytes: int
    kind: Kind
    tier: TierName
    pinned: bool
    refs: int
    created: float
    last_used: float
    n_uses: int


class ChunkStat(ChunkEntry):
    """All about one chunk."""

    names: list[str]
    base: int | None
    digest: str
    text: str | None = None
    tokens: list[int] | None = None


class ChunkList(BaseModel):
    """Entries in the order asked for."""

    object: Literal["list"] = "list"
    data: list[ChunkEntry]
    next: str | None = None


class GroupEntry(BaseModel):
    """What the chunks of one group take."""

    key: str
    n_chunks: int
    n_tokens: int
    n_bytes: int


class GroupList(BaseModel):
    """Groups, the largest first."""

    object: Literal["list"] = "list"
    data: list[GroupEntry]


class PutChunk(Content):
    """A chunk to store. ``durable``: its KV too is on disk before the answer.

    ``special_tokens``: names of special tokens in the text are these, so it can change roles.
    """

    kind: Kind = "document"
    replace: StrictBool = False
    durable: StrictBool = False
    special_tokens: StrictBool = False

    @property
    def content(self) -> str | list[int]:
        return _as_it_is(super().content, self.special_tokens)


class NamedContent(Content):
    """One of several chunks to store."""

    name: ChunkRef
    kind: Kind = "document"
    special_tokens: StrictBool = False

    @property
    def content(self) -> str | list[int]:
        return _as_it_is(super().content, self.special_tokens)


class PutMany(BaseModel):
    """Chunks to store together: see `PutChunk`."""

    model_config = STRICT

    replace: StrictBool = False
    durable: StrictBool = False
    items: Annotated[list[NamedContent], Field(min_length=1, max_length=MAX_ITEMS)]


class Rename(DryRun):
    """The new name, or ``docs/`` for several."""

    to: ChunkRef
    replace: StrictBool = False


def _as_it_is(given: str | list[int], special_tokens: bool) -> str | list[int]:
    return str(given) if special_tokens and isinstance(given, str) else given


def listing(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return entries as a list object."""
    return {"object": "list", "data": [entry.to_dict() for entry in entries]}


@router.get("", response_model=ChunkList)
async def ls(
    tenant: Tenant, the: The, pattern: Pattern = "", sort: Sort = "name",
    reverse: bool = False, limit: _Limit = None,
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:  # fmt: skip
    """List names; with ``limit``, ``next`` is what to give as ``after`` for those that follow."""
    if after is not None and (sort != "name" or reverse):
        raise InvalidArgument("after", "only lists by name go on", "leave sort and reverse out")

    def work(engine: Engine) -> dict[str, Any]:
        most = None if limit is None else limit + 1
        how: dict[str, Any] = {"sort": sort, "reverse": reverse, "limit": most, "after": after}
        found = Files(engine.table, tenant).ls(pattern, **how)
        page = found[:limit]
        more = page[-1].name if page and len(page) < len(found) and sort == "name" else None
        return listing(page) | {"next": more}

    return await the.call(tenant, work)


class FindQuery(BaseModel):
    """What to find."""

    model_config = STRICT

    pattern: Annotated[str, StringConstraints(max_length=256)] = "**"
    kind: Kind | None = None
    tier: TierName | None = None
    pinned: bool | None = None
    min_tokens: int | None = None
    unused_since: FiniteFloat | None = None


# The routes with a verb stand before those whose name could swallow it.


@router.get(":find", response_model=ChunkList, name="find")
async def find(tenant: Tenant, the: The, wanted: Annotated[FindQuery, Query()]) -> dict[str, Any]:
    """List names by what stands behind them."""
    given = wanted.model_dump()
    return await the.call(tenant, lambda e: listing(Files(e.table, tenant).find(**given)))


@router.get(":du", response_model=GroupList, name="du")
async def du(
    tenant: Tenant, the: The, pattern: Pattern = "", by: Literal["tier", "kind", "dir"] = "tier"
) -> dict[str, Any]:
    """Add up tokens and bytes."""

    def work(engine: Engine) -> dict[str, Any]:
        groups = Files(engine.table, tenant).du(pattern, by)
        return {"object": "list", "data": [group.to_dict() for group in groups]}

    return await the.call(tenant, work)


@router.post("/{pattern:path}:pin", response_model=ChunkList)
async def pin(
    tenant: Tenant, the: The, pattern: PathPattern, dry: DryQuery = False,
    body: DryRun | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Keep chunks from being removed or evicted."""
    dry = is_dry(dry, body)
    return await the.call(
        tenant, lambda e: listing(Files(e.table, tenant).pin(pattern, dry_run=dry))
    )


@router.post("/{pattern:path}:unpin", response_model=ChunkList)
async def unpin(
    tenant: Tenant, the: The, pattern: PathPattern, dry: DryQuery = False,
    body: DryRun | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Take back pin; nothing is freed by it."""
    dry = is_dry(dry, body)
    return await the.call(
        tenant, lambda e: listing(Files(e.table, tenant).unpin(pattern, dry_run=dry))
    )


@router.post("/{pattern:path}:denoise", response_model=ChunkList)
async def denoise(tenant: Tenant, the: The, pattern: PathPattern) -> dict[str, Any]:
    """Compute canonical KV where it is missing."""

    def work(engine: Engine) -> Task[dict[str, Any]]:
        files = Files(engine.table, tenant)
        for entry in files.ls(pattern):
            yield from engine.maker.computing(entry.id, tenant)
        return listing(files.ls(pattern))

    return await the.run(tenant, work)


@router.post("/{pattern:path}:cp", response_model=ChunkList)
async def cp(
    tenant: Tenant, the: The, pattern: PathPattern, body: Rename, dry: DryQuery = False
) -> dict[str, Any]:
    """Give chunks another name; no KV is copied."""
    return await _freeing(
        the, tenant, lambda e: _rename(e, the, tenant, pattern, body, is_dry(dry, body), keep=True)
    )


@router.post("/{pattern:path}:mv", response_model=ChunkList)
async def mv(
    tenant: Tenant, the: The, pattern: PathPattern, body: Rename, dry: DryQuery = False
) -> dict[str, Any]:
    """Rename; the KV stays where it is."""
    return await _freeing(
        the, tenant, lambda e: _rename(e, the, tenant, pattern, body, is_dry(dry, body), keep=False)
    )


def _rename(
    engine: Engine,
    the: ServerState,
    tenant: str,
    pattern: str,
    body: Rename,
    dry: bool,
    *,
    keep: bool,
) -> list[Entry]:
    if not body.to.endswith("/"):
        the.new_name(body.to)
    files = Files(engine.table, tenant)
    verb = files.cp if keep else files.mv
    return verb(pattern, body.to, body.replace, dry_run=dry)


async def _freeing(
    the: ServerState, tenant: str, verb: Callable[[Engine], list[Entry]]
) -> dict[str, Any]:
    """Do what lets go of chunks, and free them before it is answered, some between two steps. What is
    left then, since somebody hung up or a disk is full, goes with what is done next."""
    entries, left = await the.call(tenant, lambda engine: (verb(engine), engine.table.n_behind))
    with suppress(KVWeaveError):  # the names are gone
        while left:
            left = await the.call(tenant, lambda engine: engine.table.free_more())
    return listing(entries)


@router.post(":put", response_model=ChunkList)
async def put_many(tenant: Tenant, the: The, body: PutMany) -> dict[str, Any]:
    """Store several chunks: all of them, or none."""
    names = [the.new_name(item.name) for item in body.items]
    if len(set(names)) < len(names):
        raise InvalidArgument("items", "a name is there twice", "give each a name of its own")

    def work(engine: Engine) -> Task[dict[str, Any]]:
        named = list(zip(names, body.items, strict=True))
        made, _ = yield from store(engine, the, tenant, named, body)
        return {"object": "list", "data": made}

    return await the.run(tenant, work)


REPLACED: Any = {200: {"model": ChunkEntry, "description": "There was one of that name."}}


@router.put("/{name:path}", response_model=ChunkEntry, status_code=201, responses=REPLACED)
async def put(
    tenant: Tenant, the: The, name: PathRef, body: PutChunk, response: Response
) -> dict[str, object]:
    """Store a chunk with its KV under a name; 200 where there was one of that name."""
    name = the.new_name(name)

    def work(engine: Engine) -> Task[tuple[list[dict[str, object]], bool]]:
        return (yield from store(engine, the, tenant, [(name, body)], body))

    [made], known = await the.run(tenant, work)
    response.status_code = 200 if known else 201
    return made


def store(
    engine: Engine,
    the: ServerState,
    tenant: str,
    named: Sequence[tuple[str, PutChunk | NamedContent]],
    how: PutChunk | PutMany,
) -> Task[tuple[list[dict[str, object]], bool]]:
    """Put chunks, durably if asked to, and tell whether a name was there; on an error nothing is stored."""
    shelf = engine.shelf
    if how.durable and not shelf.mover.levels:
        raise InvalidArgument(
            "durable", "this server has no home directory", "start it with --home"
        )
    items = [NewChunk(name, tokens_of(engine, item.content), item.kind) for name, item in named]
    replaced = [item.name for item in items] if how.replace else []
    the.quota.check(engine, tenant, [len(item.tokens) for item in items], replaced)

    known = False

    def save(ids: Sequence[ChunkId]) -> None:
        nonlocal known  # not before: others put while these were computed
        known = any(engine.table.lookup(item.name, tenant) for item in items)
        for id in ids if how.durable else ():
            shelf.save(id)

    entries = yield from engine.putting(items, namespace=tenant, replace=how.replace, then=save)
    if how.durable:
        engine.table.sync()
        level = shelf.durable_level()
        for entry in entries if level is not None and not level.owned else ():
            shelf.save(entry.id)
    for entry in entries:
        the.library.note(tenant, entry.id)
    return [entry.to_dict() for entry in entries], known


@router.get("/{name:path}", response_model=ChunkStat, response_model_exclude_none=False)
async def stat(tenant: Tenant, the: The, name: PathRef, text: bool = False) -> dict[str, object]:
    """Tell all about one chunk; with ``text`` also what it says."""

    def work(engine: Engine) -> dict[str, object]:
        record = engine.table.resolve(name, tenant)
        told = Files(engine.table, tenant).stat(name).to_dict()
        told |= {"names": list(record.names), "base": record.base, "digest": record.digest.hex()}
        if text:
            tokens = [int(token) for token in engine.table.tokens(record.id)]
            decode = engine.loop.decode()
            told |= {"tokens": tokens, "text": decode(tokens) if decode is not None else None}
        return told

    return await the.call(tenant, work)


@router.delete("/{pattern:path}", response_model=ChunkList)
async def rm(
    tenant: Tenant, the: The, pattern: PathPattern, force: bool = False, dry: DryQuery = False,
    body: DryRun | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Remove names and return them as they were; a chunk that nothing else keeps is freed."""
    dry = is_dry(dry, body)
    return await _freeing(
        the, tenant, lambda e: Files(e.table, tenant).rm(pattern, dry_run=dry, force=force)
    )

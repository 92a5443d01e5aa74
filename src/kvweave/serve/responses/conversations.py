"""``/v1/conversations``: items under a name, to which each response of it adds."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from kvweave.errors import InvalidName, NotStored
from kvweave.serve.guard.access import Tenant
from kvweave.serve.responses.items import ResponseItem, read_items, unread
from kvweave.serve.responses.routes import PageAfter, PageLimit, PageOrder
from kvweave.serve.responses.schemas import MetadataPairs, unread_tools
from kvweave.serve.responses.store import NamespaceStore, page
from kvweave.serve.routes.base import ERRORS, STRICT, ChunkRef, The
from kvweave.serve.routes.strict import SavingRoute
from kvweave.serve.state import ServerState

router = APIRouter(
    prefix="/v1/conversations", tags=["conversations"], responses=ERRORS, route_class=SavingRoute
)

MOST_ADDED = 20  # items of one request, as the API has it
AddedItems = Annotated[list[dict[str, Any]], Field(max_length=MOST_ADDED)]
_Json = dict[str, Any]


class NewConversation(BaseModel):
    """A conversation to open: ``name`` is its id, where it is not to be made up."""

    model_config = STRICT
    items: AddedItems | None = None
    metadata: MetadataPairs | None = None
    name: ChunkRef | None = None


class NewMetadata(BaseModel):
    """What is noted of a conversation."""

    model_config = STRICT
    metadata: MetadataPairs


class MoreItems(BaseModel):
    """Items to add to the end."""

    model_config = ConfigDict(extra="forbid")
    items: Annotated[AddedItems, Field(min_length=1)]


@router.post("", response_model=None)
async def open_conversation(tenant: Tenant, the: The, body: NewConversation | None = None) -> _Json:
    """Open a conversation."""
    given, store = body or NewConversation(), the.responses.of(tenant)
    name = None if given.name is None else the.new_name(given.name)
    if name is not None and "/" in name:
        raise InvalidName(name, "a conversation's has no /")
    items, unused = _read(the, store, given.items or [])
    store.check_room(None, items)
    made = store.open(name, given.metadata or {})
    made.add(items)
    return _saying(made.told(), unused)


@router.get("/{id}", response_model=None)
async def get_conversation(tenant: Tenant, the: The, id: str) -> _Json:
    """Return a conversation without its items."""
    return the.responses.of(tenant).conversation(id).told()


@router.post("/{id}", response_model=None)
async def note_conversation(tenant: Tenant, the: The, id: str, body: NewMetadata) -> _Json:
    """Note something else of a conversation."""
    found = the.responses.of(tenant).conversation(id)
    found.note(body.metadata)
    return found.told()


@router.delete("/{id}", response_model=None)
async def delete_conversation(tenant: Tenant, the: The, id: str) -> _Json:
    """Forget a conversation; its responses stay."""
    store = the.responses.of(tenant)
    with store.conversation(id).answering():
        store.close(id)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


@router.get("/{id}/items", response_model=None)
async def conversation_items(
    tenant: Tenant,
    the: The,
    id: str,
    limit: PageLimit = 20,
    order: PageOrder = "desc",
    after: PageAfter = None,
) -> _Json:
    """List the items of a conversation."""
    return page(the.responses.of(tenant).conversation(id).items, limit, order, after)


@router.post("/{id}/items", response_model=None)
async def add_items(tenant: Tenant, the: The, id: str, body: MoreItems) -> _Json:
    """Add items to the end of a conversation; return those that were not in it yet."""
    store = the.responses.of(tenant)
    found = store.conversation(id)
    items, unused = _read(the, store, body.items)
    store.check_room(found, items)
    with found.answering():
        added = found.add(items)
    told = page(added, MOST_ADDED, "asc", None)
    return _saying(told, unused)


@router.get("/{id}/items/{item}", response_model=None)
async def conversation_item(tenant: Tenant, the: The, id: str, item: str) -> _Json:
    """Return one item of a conversation."""
    found = the.responses.of(tenant).conversation(id).by_id.get(item)
    if found is None:
        raise NotStored("item", item)
    return found


@router.delete("/{id}/items/{item}", response_model=None)
async def delete_item(tenant: Tenant, the: The, id: str, item: str) -> _Json:
    """Take an item out of a conversation; what stands behind it is reused all the same."""
    found = the.responses.of(tenant).conversation(id)
    with found.answering():
        found.drop(item)
    return found.told()


def _read(
    the: ServerState, store: NamespaceStore, given: list[_Json]
) -> tuple[list[ResponseItem], list[str]]:
    """Return items, and the names of what of them changes nothing. Raises InvalidArgument."""
    items = read_items(given, store.item, "items")
    unused = unread_tools(items, the.renderer.template, "items")
    return items, [*unread(given, "items"), *unused]


def _saying(told: _Json, ignored: list[str]) -> _Json:
    """Return what is told, and what of the request changed nothing."""
    return told | {"kvweave": told.get("kvweave", {}) | {"ignored": ignored}} if ignored else told

"""What is kept of responses, conversations and compactions, each namespace's by itself.

It is text in memory: KV is found again by tokens, as for every prompt, and a server that starts anew
knows no responses. Used in the event loop only.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kvweave.errors import ContextBusy, NameTaken, NotStored, OverQuota, PreviousResponseNotFound
from kvweave.serve.responses.items import ResponseItem

MOST_RESPONSES = 4096  # of a namespace; the one that was used least recently goes first
MOST_BYTES = 64 << 20  # of text of a namespace, of responses and compactions together
MOST_CONVERSATIONS = 256  # of a namespace
MOST_ITEMS = 16_384  # of a conversation
POINTER = 8  # bytes that one more response on the same items takes for each


@dataclass(slots=True)
class StoredResponse:
    """A response: its body, and all items that went in."""

    body: dict[str, Any]
    items: tuple[ResponseItem, ...]
    n_own: int  # of these, the last ones, that came with it
    used: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def all_items(self) -> tuple[ResponseItem, ...]:
        """What the next response goes on from."""
        return (*self.items, *self.body["output"])

    @property
    def n_bytes(self) -> int:
        own = self.items[len(self.items) - self.n_own :]
        return len(json.dumps([self.body, own])) + POINTER * len(self.items)


@dataclass(slots=True)
class Compaction:
    """A summary, what it stands for, and whether that is shown instead."""

    id: str
    summary: str
    items: tuple[ResponseItem, ...]  # all up to it, in order; those kept beside it too
    covered: tuple[ResponseItem, ...]  # what is left out for it
    created: int
    n_before: int  # tokens of the prompt
    n_after: int
    n_written: int
    of: Literal["items", "messages"] = "items"  # of which API what it stands for is
    undone: bool = False
    used: float = field(default_factory=time.time)

    @property
    def n_bytes(self) -> int:
        return len(json.dumps([self.summary, self.covered])) + POINTER * len(self.items)

    def told(self) -> dict[str, Any]:
        """Return what a client may know of it."""
        return {
            "id": self.id,
            "object": "compaction",
            "created_at": self.created,
            "undone": self.undone,
            "summary": self.summary,
            "items": list(self.items),
            "covered": [item.get("id", i) for i, item in enumerate(self.covered)],
            "tokens": {"before": self.n_before, "after": self.n_after, "written": self.n_written},
        }


@dataclass(slots=True)
class StoredConversation:
    """Items under a name; each response of it adds what came in and out."""

    id: str
    metadata: dict[str, str]
    items: list[ResponseItem] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(default_factory=time.time)
    context: str | None = None  # where its last answer came to be
    n_bytes: int = 0
    busy: bool = False

    def told(self) -> dict[str, Any]:
        """Return it as the API has it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": self.metadata,
            "kvweave": {"context": self.context, "items": len(self.items)},
        }

    def add(self, items: Iterable[ResponseItem]) -> None:
        """Add items to its end; those that are in it already stay where they are."""
        known = {item["id"] for item in self.items}
        more = [item for item in items if item["id"] not in known]
        self.items += more
        self.n_bytes += len(json.dumps(more))
        self.used = time.time()

    def drop(self, id: str) -> None:
        """Take an item out. Raises NotStored."""
        gone = [item for item in self.items if item["id"] == id]
        if not gone:
            raise NotStored("item", id)
        self.items.remove(gone[0])
        self.n_bytes -= len(json.dumps(gone))

    @contextmanager
    def held(self) -> Iterator[StoredConversation]:
        """Hold it while an answer of it is under way. Raises ContextBusy."""
        if self.busy:
            raise ContextBusy(self.id)
        self.busy = True
        try:
            yield self
        finally:
            self.busy = False


@dataclass(slots=True)
class NamespaceStore:
    """What is kept of one namespace."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    compactions: OrderedDict[str, Compaction] = field(default_factory=OrderedDict)
    conversations: OrderedDict[str, StoredConversation] = field(default_factory=OrderedDict)
    _by_id: dict[str, tuple[str, ResponseItem]] = field(
        default_factory=dict
    )  # item -> its response
    _sizes: dict[str, int] = field(default_factory=dict)

    # ---- responses

    def response(self, id: str, *, previous: bool = False) -> StoredResponse:
        """Return a response. Raises NotStored, or where it was to be gone on from
        PreviousResponseNotFound."""
        found = self.responses.get(id)
        if found is None:
            raise PreviousResponseNotFound(id) if previous else NotStored("response", id)
        found.used = time.time()
        self.responses.move_to_end(id)
        return found

    def keep(self, response: StoredResponse) -> None:
        """Keep a response; those that were used least recently go where there are too many."""
        self.responses[response.id] = response
        own = response.items[len(response.items) - response.n_own :]
        for item in (*own, *response.body["output"]):
            self._by_id[item["id"]] = (response.id, item)
        self._count(response.id, response.n_bytes)
        while len(self.responses) > MOST_RESPONSES:
            self.drop(next(iter(self.responses)))

    def drop(self, id: str) -> None:
        """Forget a response. Raises NotStored."""
        if self.responses.pop(id, None) is None:
            raise NotStored("response", id)
        self._sizes.pop(id, None)
        for each in [each for each, (owner, _) in self._by_id.items() if owner == id]:
            del self._by_id[each]

    def item(self, id: str) -> ResponseItem | None:
        """Return an item of a stored response or conversation by its id."""
        if id in self._by_id:
            return self._by_id[id][1]
        every = (item for each in self.conversations.values() for item in each.items)
        return next((item for item in every if item["id"] == id), None)

    # ---- compactions

    def compaction(self, id: str) -> Compaction:
        """Return a compaction. Raises NotStored."""
        found = self.compactions.get(id)
        if found is None:
            raise NotStored("compaction", id)
        found.used = time.time()
        return found

    def keep_compaction(self, compaction: Compaction) -> None:
        """Keep what a summary stands for."""
        self.compactions[compaction.id] = compaction
        self._count(compaction.id, compaction.n_bytes)

    # ---- conversations

    def conversation(self, id: str) -> StoredConversation:
        """Return a conversation. Raises NotStored."""
        found = self.conversations.get(id)
        if found is None:
            raise NotStored("conversation", id)
        found.used = time.time()
        return found

    def check_room(
        self, conversation: StoredConversation | None, more: Sequence[ResponseItem]
    ) -> None:
        """Raise OverQuota unless these may be added to a conversation, None for a new one."""
        n, used = 0 if conversation is None else len(conversation.items), len(self.conversations)
        if n + len(more) > MOST_ITEMS:
            raise OverQuota("items of a conversation", len(more), n, MOST_ITEMS)
        if conversation is None and used >= MOST_CONVERSATIONS:
            raise OverQuota("conversations", 1, used, MOST_CONVERSATIONS)
        n_bytes = sum(each.n_bytes for each in self.conversations.values())
        needed = len(json.dumps(list(more)))
        if n_bytes + needed > MOST_BYTES:
            raise OverQuota("bytes of conversations", needed, n_bytes, MOST_BYTES)

    def open(self, name: str | None, metadata: dict[str, str]) -> StoredConversation:
        """Open a conversation, under a name or one that is made up. Raises NameTaken."""
        if name in self.conversations:
            raise NameTaken(name or "", 0)
        made = StoredConversation(name or f"conv_{uuid.uuid4().hex}", metadata)
        self.conversations[made.id] = made
        return made

    # ---- forgetting

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``."""
        for response in [r for r in self.responses.values() if r.used < before]:
            self.drop(response.id)
        for id in [c.id for c in self.compactions.values() if c.used < before]:
            self._sizes.pop(id, None)
            del self.compactions[id]
        for id in [c.id for c in self.conversations.values() if c.used < before and not c.busy]:
            del self.conversations[id]

    def _count(self, id: str, n_bytes: int) -> None:
        self._sizes[id] = n_bytes
        while sum(self._sizes.values()) > MOST_BYTES and len(self._sizes) > 1:
            oldest = next(iter(self.responses), None)
            if oldest is not None and oldest != id:
                self.drop(oldest)
                continue
            old = next((each for each in self.compactions if each != id), None)
            if old is None:
                return
            self._sizes.pop(old, None)
            del self.compactions[old]


class ResponseStore:
    """What is kept, by namespace."""

    def __init__(self) -> None:
        self._of: dict[str, NamespaceStore] = {}

    def of(self, namespace: str) -> NamespaceStore:
        """Return what is kept of a namespace."""
        return self._of.setdefault(namespace, NamespaceStore())

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``."""
        for each in self._of.values():
            each.expire(before)


def page(
    items: Sequence[ResponseItem], limit: int, order: str, after: str | None
) -> dict[str, Any]:
    """Return a page of items as the API lists them. Raises NotStored for an unknown ``after``."""
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [i for i, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise NotStored("item", after)
        listed = listed[places[0] + 1 :]
    shown = listed[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(listed) > limit,
    }

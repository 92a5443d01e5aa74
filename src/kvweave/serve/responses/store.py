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
from typing import Any, Literal, Protocol, TypeVar

from kvweave.errors import ContextBusy, NameTaken, NotStored, OverQuota, PreviousResponseNotFound
from kvweave.serve.responses.held import HeldItems, size_of, summaries_in
from kvweave.serve.responses.items import ResponseItem, fresh

MOST_RESPONSES = 4096  # of a namespace; the one that was used least recently goes first
MOST_BYTES = 64 << 20  # of text of a namespace: of responses and compactions, and of conversations
MOST_CONVERSATIONS = 256  # of a namespace
MOST_ITEMS = 16_384  # of a conversation


class _Used(Protocol):
    used: float


_T = TypeVar("_T", bound=_Used)


class RecentlyUsed(OrderedDict[str, _T]):
    """What is kept by id, what was used least recently first: to get it is to use it."""

    def get(self, id: str, default: Any = None) -> Any:
        """Return what has this id, and note that it was used."""
        found = super().get(id)
        if found is None:
            return default
        found.used = time.time()
        self.move_to_end(id)
        return found

    def unused(self, before: float) -> list[str]:
        """Return the ids of what was not used since ``before``."""
        return [id for id, each in self.items() if each.used < before]


@dataclass(slots=True)
class StoredResponse:
    """A response: its body, and all items that went in."""

    body: dict[str, Any]
    items: tuple[ResponseItem, ...]
    used: float = field(default_factory=time.time)
    n_own: int = 0  # bytes besides those of items

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def all_items(self) -> tuple[ResponseItem, ...]:
        """What the next response goes on from."""
        return (*self.items, *self.body["output"])


@dataclass(slots=True)
class Compaction:
    """A summary, what it stands for, and whether that is shown instead."""

    id: str
    summary: str
    items: tuple[ResponseItem, ...]  # all up to it, in order; those kept beside it too
    covered: tuple[ResponseItem, ...]  # of these, what is left out for it
    created: int
    n_before: int  # tokens of the prompt
    n_after: int
    n_written: int
    of: Literal["items", "messages"] = "items"  # of which API what it stands for is
    undone: bool = False
    used: float = field(default_factory=time.time)
    n_own: int = 0  # bytes besides those of items
    n_bytes: int = 0  # with those of items, whoever holds them too

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
    held: HeldItems
    by_id: dict[str, ResponseItem] = field(default_factory=dict)  # in order
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(default_factory=time.time)
    context: str | None = None  # where its last answer came to be
    busy: bool = False

    @property
    def items(self) -> tuple[ResponseItem, ...]:
        return tuple(self.by_id.values())

    def told(self) -> dict[str, Any]:
        """Return it as the API has it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": self.metadata,
            "kvweave": {"context": self.context, "items": len(self.by_id)},
        }

    def add(self, items: Iterable[ResponseItem]) -> list[ResponseItem]:
        """Add items to its end; those that are in it already stay where they are, and one that has
        the id of another gets an id of its own. Return what was added."""
        more = fresh(self.by_id, items)
        self.held.hold(more)
        self.by_id.update((item["id"], item) for item in more)
        self.used = time.time()
        return more

    def drop(self, id: str) -> None:
        """Take an item out. Raises NotStored."""
        gone = self.by_id.pop(id, None)
        if gone is None:
            raise NotStored("item", id)
        self.held.release([gone])

    @contextmanager
    def answering(self) -> Iterator[StoredConversation]:
        """Hold it while an answer of it is under way. Raises ContextBusy."""
        if self.busy:
            raise ContextBusy(self.id)
        self.busy = True
        try:
            yield self
        finally:
            self.busy = False


class NamespaceStore:
    """What is kept of one namespace."""

    def __init__(self) -> None:
        self.responses: RecentlyUsed[StoredResponse] = RecentlyUsed()
        self.compactions: RecentlyUsed[Compaction] = RecentlyUsed()
        self.conversations: RecentlyUsed[StoredConversation] = RecentlyUsed()
        self.kept = HeldItems()  # by responses and compactions: it goes when there is too much
        self.said = HeldItems()  # by conversations: when there is too much, more is refused
        self._n_own = 0  # bytes of responses and compactions besides items

    @property
    def n_bytes(self) -> int:
        """Bytes of all responses and compactions."""
        return self.kept.n_bytes + self._n_own

    def item(self, id: str) -> ResponseItem | None:
        """Return an item that something here holds, by its id."""
        return self.kept.find(id) or self.said.find(id)

    # ---- responses

    def response(self, id: str, *, previous: bool = False) -> StoredResponse:
        """Return a response. Raises NotStored, or where it was to be gone on from
        PreviousResponseNotFound."""
        found: StoredResponse | None = self.responses.get(id)
        if found is None:
            raise PreviousResponseNotFound(id) if previous else NotStored("response", id)
        return found

    def keep(self, response: StoredResponse) -> None:
        """Keep a response; those that were used least recently go where there are too many."""
        response.n_own = len(json.dumps(response.body | {"output": []}))
        self.responses[response.id] = response
        self.kept.hold(response.all_items)
        self._n_own += response.n_own
        self._make_room(response.id)

    def drop(self, id: str) -> None:
        """Forget a response. Raises NotStored."""
        gone = self.responses.pop(id, None)
        if gone is None:
            raise NotStored("response", id)
        self.kept.release(gone.all_items)
        self._n_own -= gone.n_own

    # ---- compactions

    def compaction(self, id: str) -> Compaction:
        """Return a compaction. Raises NotStored."""
        found: Compaction | None = self.compactions.get(id)
        if found is None:
            raise NotStored("compaction", id)
        return found

    def keep_compaction(self, compaction: Compaction) -> None:
        """Keep what a summary stands for."""
        compaction.n_own = len(json.dumps(compaction.summary))
        self.compactions[compaction.id] = compaction
        compaction.n_bytes = compaction.n_own + self.kept.hold(compaction.items)
        self._n_own += compaction.n_own
        self._make_room(compaction.id)

    def take_back(self, id: str, *, undone: bool) -> Compaction:
        """Have the items given in the place of a summary, or the summary again.

        What is undone stays as long as it is used: it does not go where there is too much. Raises
        NotStored, OverQuota for too much of that.
        """
        found = self.compaction(id)
        others = sum(c.n_bytes for c in self.compactions.values() if c.undone and c is not found)
        if undone and others + found.n_bytes > MOST_BYTES // 2:
            raise OverQuota("bytes of what is undone", found.n_bytes, others, MOST_BYTES // 2)
        found.undone = undone
        return found

    def _drop_compaction(self, id: str) -> Compaction:
        gone = self.compactions.pop(id)
        self.kept.release(gone.items)
        self._n_own -= gone.n_own
        return gone

    # ---- conversations

    def conversation(self, id: str) -> StoredConversation:
        """Return a conversation. Raises NotStored."""
        found: StoredConversation | None = self.conversations.get(id)
        if found is None:
            raise NotStored("conversation", id)
        return found

    def check_room(
        self, conversation: StoredConversation | None, more: Sequence[ResponseItem]
    ) -> None:
        """Raise OverQuota unless these may be added to a conversation, None for a new one."""
        n, used = 0 if conversation is None else len(conversation.by_id), len(self.conversations)
        if n + len(more) > MOST_ITEMS:
            raise OverQuota("items of a conversation", len(more), n, MOST_ITEMS)
        if conversation is None and used >= MOST_CONVERSATIONS:
            raise OverQuota("conversations", 1, used, MOST_CONVERSATIONS)
        needed, n_bytes = size_of(more), self.said.n_bytes
        if n_bytes + needed > MOST_BYTES:
            raise OverQuota("bytes of conversations", needed, n_bytes, MOST_BYTES)

    def open(self, name: str | None, metadata: dict[str, str]) -> StoredConversation:
        """Open a conversation, under a name or one that is made up. Raises NameTaken."""
        if name in self.conversations:
            raise NameTaken(name or "", 0)
        made = StoredConversation(name or f"conv_{uuid.uuid4().hex}", metadata, self.said)
        self.conversations[made.id] = made
        return made

    def close(self, id: str) -> None:
        """Forget a conversation."""
        self.said.release(self.conversations.pop(id).items)

    # ---- forgetting

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``; no compaction that something else leads to."""
        for id in self.responses.unused(before):
            self.drop(id)
        for id in self.conversations.unused(before):
            if not self.conversations[id].busy:
                self.close(id)
        waiting = self.compactions.unused(before)
        while waiting:
            id = waiting.pop()
            found = OrderedDict.get(self.compactions, id)  # which is no use of it
            if found is None or found.used >= before or self._leads_to(id):
                continue
            for item in self._drop_compaction(id).items:
                waiting += summaries_in(item)

    def _leads_to(self, compaction: str) -> bool:
        return self.kept.leads_to(compaction) or self.said.leads_to(compaction)

    def _make_room(self, but: str) -> None:
        """Forget what was used least recently, while there is too much: responses first."""
        while len(self.responses) > MOST_RESPONSES or self.n_bytes > MOST_BYTES:
            oldest = next((each for each in self.responses if each != but), None)
            if oldest is not None:
                self.drop(oldest)
                continue
            others = (c.id for c in self.compactions.values() if c.id != but and not c.undone)
            old = next(others, None)
            if old is None:
                return
            self._drop_compaction(old)


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

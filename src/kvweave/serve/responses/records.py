"""A response, a summary, a conversation: what is kept of each, and the same for a file.

For a file each is JSON without its items, which are stored once and told apart by numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kvweave.errors import ContextBusy, NotStored
from kvweave.serve.responses.held import HeldItems
from kvweave.serve.responses.items import ResponseItem, fresh
from kvweave.serve.responses.used import now


@dataclass(slots=True)
class StoredResponse:
    """A response: its body, and all items that went in."""

    body: dict[str, Any]
    items: tuple[ResponseItem, ...]
    used: float = field(default_factory=now)
    n_own: int = 0  # bytes besides those of items

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def all_items(self) -> tuple[ResponseItem, ...]:
        """What the next response goes on from."""
        return (*self.items, *self.body["output"])

    def saved(self) -> dict[str, Any]:
        """Return it without its items."""
        return {"body": self.body | {"output": []}, "given": len(self.items)}

    @classmethod
    def read(
        cls, saved: dict[str, Any], items: Sequence[ResponseItem], used: float
    ) -> StoredResponse:
        """Return it again, of what `saved` gave and of all items."""
        n = int(saved["given"])
        return cls(saved["body"] | {"output": list(items[n:])}, tuple(items[:n]), used)


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
    used: float = field(default_factory=now)
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

    def saved(self) -> dict[str, Any]:
        """Return it without its items."""
        names = ("id", "summary", "created", "n_before", "n_after", "n_written", "of", "undone")
        covered = {id(item) for item in self.covered}
        places = [i for i, item in enumerate(self.items) if id(item) in covered]
        return {name: getattr(self, name) for name in names} | {"covered": places}

    @classmethod
    def read(cls, saved: dict[str, Any], items: Sequence[ResponseItem], used: float) -> Compaction:
        """Return it again, of what `saved` gave and of all items."""
        covered = tuple(items[i] for i in saved["covered"])
        return cls(**saved | {"items": tuple(items), "covered": covered, "used": used})


@dataclass(slots=True)
class LapsedSummary:
    """What is left of a summary that was taken back, once what it stands for is forgotten."""

    id: str
    used: float = field(default_factory=now)
    items: tuple[ResponseItem, ...] = ()

    def told(self) -> dict[str, Any]:
        """Return what a client may know of it."""
        return {"id": self.id, "object": "compaction", "undone": False, "items": []}

    def saved(self) -> dict[str, Any]:
        """Return it for a file."""
        return {}


@dataclass(slots=True)
class StoredConversation:
    """Items under a name; each response of it adds what came in and out."""

    id: str
    metadata: dict[str, str]
    held: HeldItems
    changed: Callable[[StoredConversation], None]  # called when there is something to write down
    by_id: dict[str, ResponseItem] = field(default_factory=dict)  # in order
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(default_factory=now)
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

    def saved(self) -> dict[str, Any]:
        """Return it without its items."""
        return {"metadata": self.metadata, "created": self.created}

    def note(self, metadata: dict[str, str]) -> None:
        """Note something else of it."""
        self.metadata = metadata
        self.changed(self)

    def add(self, items: Iterable[ResponseItem]) -> list[ResponseItem]:
        """Add items to its end; those that are in it already stay where they are, and one that has
        the id of another gets an id of its own. Return what was added."""
        more = fresh(self.by_id, items)
        self.held.hold(more)
        self.by_id.update((item["id"], item) for item in more)
        self.used = now()
        self.changed(self)
        return more

    def drop(self, id: str) -> None:
        """Take an item out. Raises NotStored."""
        gone = self.by_id.pop(id, None)
        if gone is None:
            raise NotStored("item", id)
        self.changed(self)
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

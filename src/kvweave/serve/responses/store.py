"""What is kept of responses, conversations and compactions, each namespace's by itself.

It is text in memory: KV is found again by tokens, as for every prompt. With a home it is written
down as well (`kvweave.serve.responses.saved`), and a server that starts anew knows it. Used in the
event loop only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from kvweave.errors import (
    NameTaken,
    NotStored,
    OverQuota,
    PreviousResponseNotFound,
    SummaryForgotten,
)
from kvweave.serve.responses.held import HeldItems, size_of, summaries_in
from kvweave.serve.responses.items import ResponseItem
from kvweave.serve.responses.records import (
    Compaction,
    LapsedSummary,
    StoredConversation,
    StoredResponse,
)
from kvweave.serve.responses.saved import (
    FILE,
    NamespaceFile,
    SavedRecord,
    SavedResponses,
    Statement,
    item_row,
)
from kvweave.serve.responses.used import NotedUses, now

MOST_RESPONSES = 4096  # of a namespace; the one that was used least recently goes first
MOST_BYTES = 64 << 20  # of text of a namespace: of responses and compactions, and of conversations
MOST_CONVERSATIONS = 256  # of a namespace
MOST_ITEMS = 16_384  # of a conversation
MOST_LAPSED = 16_384  # summaries that were taken back, of a namespace: also of those forgotten
PATIENCE = 2.0  # seconds that an answer waits for the disk
RESPONSE, COMPACTION, CONVERSATION, LAPSED = "response", "compaction", "conversation", "lapsed"
Numbers: TypeAlias = "Sequence[int] | None"
log = logging.getLogger("kvweave.serve")


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
        found.used = now()
        self.move_to_end(id)
        return found

    def unused(self, before: float) -> list[str]:
        """Return the ids of what was not used since ``before``."""
        return [id for id, each in self.items() if each.used < before]


class KeptSummaries(RecentlyUsed[Compaction]):
    """Summaries by id; one that was taken back is never taken for one that was not."""

    def __init__(self) -> None:
        super().__init__()
        self.lapsed: dict[str, LapsedSummary] = {}

    def get(self, id: str, default: Any = None) -> Any:
        """As `RecentlyUsed.get`. Raises SummaryForgotten."""
        if id in self.lapsed:
            raise SummaryForgotten(id)
        return super().get(id, default)

    @property
    def n_undone(self) -> int:
        """How many were taken back."""
        return len(self.lapsed) + sum(each.undone for each in self.values())


class NamespaceStore:
    """What is kept of one namespace."""

    def __init__(self, file: NamespaceFile | None = None) -> None:
        self.responses: RecentlyUsed[StoredResponse] = RecentlyUsed()
        self.compactions = KeptSummaries()
        self.conversations: RecentlyUsed[StoredConversation] = RecentlyUsed()
        self._file = file or NamespaceFile()
        # by responses and compactions: it goes when there is too much
        self.kept = HeldItems(self._file)
        self.said = HeldItems(self._file)  # by conversations: more than too much is refused
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
        self._hold_response(response)
        self._file.put_record(RESPONSE, response, self.kept.numbers(response.all_items))
        self._make_room(response.id)

    def _hold_response(self, response: StoredResponse, numbers: Numbers = None) -> None:
        response.n_own = len(json.dumps(response.body | {"output": []}))
        self.responses[response.id] = response
        self.kept.hold(response.all_items, numbers)
        self._n_own += response.n_own

    def drop(self, id: str) -> None:
        """Forget a response. Raises NotStored."""
        gone = self.responses.pop(id, None)
        if gone is None:
            raise NotStored("response", id)
        self._file.drop_record(RESPONSE, id)
        self.kept.release(gone.all_items)
        self._n_own -= gone.n_own

    # ---- compactions

    def compaction(self, id: str) -> Compaction:
        """Return a compaction. Raises NotStored, SummaryForgotten."""
        found: Compaction | None = self.compactions.get(id)
        if found is None:
            raise NotStored("compaction", id)
        return found

    def keep_compaction(self, compaction: Compaction) -> None:
        """Keep what a summary stands for."""
        self._hold_compaction(compaction)
        self._save_compaction(compaction)
        self._make_room(compaction.id)

    def _hold_compaction(self, compaction: Compaction, numbers: Numbers = None) -> None:
        compaction.n_own = len(json.dumps(compaction.summary))
        self.compactions[compaction.id] = compaction
        compaction.n_bytes = compaction.n_own + self.kept.hold(compaction.items, numbers)
        self._n_own += compaction.n_own

    def _save_compaction(self, compaction: Compaction) -> None:
        self._file.put_record(COMPACTION, compaction, self.kept.numbers(compaction.items))

    def take_back(self, id: str, *, undone: bool) -> Compaction | LapsedSummary:
        """Have the items given in the place of a summary, or the summary again.

        What is undone stays as long as it is used: it does not go where there is too much, and once it
        is forgotten the summary is refused until it is to be given again. Raises NotStored,
        SummaryForgotten, OverQuota for too much of that.
        """
        if not undone and (lapsed := self.compactions.lapsed.pop(id, None)) is not None:
            self._file.drop_record(LAPSED, id)
            return lapsed
        found = self.compaction(id)
        n = self.compactions.n_undone
        if undone and not found.undone and n >= MOST_LAPSED:
            raise OverQuota("summaries that were taken back", 1, n, MOST_LAPSED)
        others = sum(c.n_bytes for c in self.compactions.values() if c.undone and c is not found)
        if undone and others + found.n_bytes > MOST_BYTES // 2:
            raise OverQuota("bytes of what is undone", found.n_bytes, others, MOST_BYTES // 2)
        found.undone = undone
        self._save_compaction(found)
        return found

    def _drop_compaction(self, id: str) -> Compaction:
        gone = self.compactions.pop(id)
        if gone.undone:
            self._lapse(id)
        self._file.drop_record(COMPACTION, id)
        self.kept.release(gone.items)
        self._n_own -= gone.n_own
        return gone

    def _lapse(self, id: str) -> None:
        lapsed = self.compactions.lapsed[id] = LapsedSummary(id)
        self._file.put_record(LAPSED, lapsed, ())

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
            raise NameTaken(name or "", 0, "conversation")
        id = name or f"conv_{uuid.uuid4().hex}"
        made = StoredConversation(id, metadata, self.said, self._save_conversation)
        self.conversations[made.id] = made
        self._save_conversation(made)
        return made

    def close(self, id: str) -> None:
        """Forget a conversation."""
        self._file.drop_record(CONVERSATION, id)
        self.said.release(self.conversations.pop(id).items)

    def _save_conversation(self, talk: StoredConversation) -> None:
        self._file.put_record(CONVERSATION, talk, self.said.numbers(talk.items))

    # ---- the file

    def read(self, saved: SavedRecord) -> None:
        """Keep what a record of the file says. Raises KeyError and the like for one of no form."""
        if saved.kind == LAPSED:
            self.compactions.lapsed[saved.id] = LapsedSummary(saved.id, saved.used)
        elif saved.told is None:  # whether it was taken back is not known either
            if saved.kind not in (RESPONSE, CONVERSATION):
                self._lapse(saved.id)
        elif saved.kind == RESPONSE:
            response = StoredResponse.read(saved.told, saved.items, saved.used)
            self._hold_response(response, saved.numbers)
        elif saved.kind == COMPACTION:
            compaction = Compaction.read(saved.told, saved.items, saved.used)
            self._hold_compaction(compaction, saved.numbers)
        else:
            metadata, created = saved.told["metadata"], saved.told["created"]
            talk = StoredConversation(saved.id, metadata, self.said, self._save_conversation)
            talk.created, talk.used = created, saved.used
            talk.by_id.update((item["id"], item) for item in saved.items)
            self.said.hold(talk.items, saved.numbers)
            self.conversations[talk.id] = talk

    def note_uses(self, since: float) -> None:
        """Write down what was used since then."""
        for kind, records, _ in self._records():
            for record in records:
                if record.used >= since:
                    self._file.use_record(kind, record)

    def rows(self) -> Iterator[Statement]:
        """Yield all there is, for a file that has nothing of it."""
        for held in (self.kept, self.said):
            yield from (item_row(n, json.dumps(item)) for n, item in held.numbered())
        for kind, records, held in self._records():
            for record in records:
                items = getattr(record, "all_items", None) or record.items
                yield self._file.row(kind, record, held.numbers(items))

    def _records(self) -> Iterator[tuple[str, list[Any], HeldItems]]:
        yield RESPONSE, list(self.responses.values()), self.kept
        yield COMPACTION, list(self.compactions.values()), self.kept
        yield CONVERSATION, list(self.conversations.values()), self.said
        yield LAPSED, list(self.compactions.lapsed.values()), self.kept

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

    def __init__(self, home: Path | None = None) -> None:
        """Read what is kept in a home. Raises InvalidArgument when another process has it, StoreError."""
        self._of: dict[str, NamespaceStore] = {}
        self._saved = None if home is None else SavedResponses(home / FILE)
        self._noted = NotedUses()
        records = [] if self._saved is None else list(self._saved.load())
        spaces = {record.namespace for record in records if record.told is not None}
        for record in records:  # whose a hurt row was nobody knows
            try:
                for space in {record.namespace, *(spaces if record.told is None else ())}:
                    self.of(space).read(record)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                log.warning("%s %r is not read: %r", record.kind, record.id, error)

    def of(self, namespace: str) -> NamespaceStore:
        """Return what is kept of a namespace."""
        found = self._of.get(namespace)
        if found is None:
            found = NamespaceStore(NamespaceFile(self._saved, namespace))
            self._of[namespace] = found
        return found

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``; note in the file what was, and mend that."""
        for each in self._of.values():
            each.expire(before)
        self._note()
        if self._saved is not None:
            self._saved.wipe()

    async def settled(self) -> None:
        """Wait until what was changed is in the file; not for ever, nor where that cannot be."""
        if self._saved is not None:
            await asyncio.wait([asyncio.wrap_future(self._saved.settled())], timeout=PATIENCE)

    def close(self) -> None:
        """Write down what is not yet, and let the file go."""
        if self._saved is not None:
            self._note()
            self._saved.close()

    def _note(self) -> None:
        if self._saved is None:
            return
        if self._saved.is_behind:
            self._saved.rewrite([row for each in self._of.values() for row in each.rows()])
        since = self._noted.again()
        for each in self._of.values():
            each.note_uses(since)


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

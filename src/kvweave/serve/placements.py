"""Which chunks have KV here, in which tier, as a feed: a snapshot, then what changed since.

The log keeps the last change of each chunk only, so it is as long as there are chunks, and to begin at 0
is the snapshot. What is told is what is true when it is read. Chunks that are gone are told for a while;
who comes later than that, or knew another run of the server, begins anew.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.prints import prints
from kvweave.chunk.record import Record
from kvweave.engine import Engine
from kvweave.errors import ChunkNotFound, InvalidArgument

MOST = 64  # chunks of one answer: their text is decoded between two steps of the model
MAX_GONE = 10_000  # of a namespace, that are told
MAX_KNOWN = 10_000  # chunks whose prints are remembered
ROLES = ("system", "user", "assistant", "tool")  # kinds that a chat template wraps


@dataclass(slots=True)
class _Feed:
    """Changes of one namespace: chunk -> the number of its last one, in order."""

    seq: int = 0
    floor: int = 0  # changes up to here are not known any more
    changes: OrderedDict[int, int] = field(default_factory=OrderedDict)
    gone: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def note(self, id: int, is_gone: bool) -> None:
        self.seq += 1
        self.changes.pop(id, None)
        self.changes[id] = self.seq
        self.gone.pop(id, None)
        if is_gone:
            self.gone[id] = None
        while len(self.gone) > MAX_GONE:
            old, _ = self.gone.popitem(last=False)
            self.floor = max(self.floor, self.changes.pop(old))

    def since(self, seq: int) -> Iterator[tuple[int, int]]:
        """Yield chunks and their changes behind ``seq``, the oldest first."""
        newest = []
        for id, at in reversed(self.changes.items()):
            if at <= seq:
                break
            newest.append((id, at))
        return reversed(newest)


class Placements:
    """Listens to an engine's shelf and table; `read` gives one namespace what changed in it.

    Nothing is kept of a namespace before it is first read. Reading is done in the engine's thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.run = engine, secrets.token_hex(8)
        self._feeds: dict[str, _Feed] = {}
        self._spaces: dict[int, str] = {}  # chunk -> namespace, which is asked when it is gone
        self._prints: OrderedDict[int, list[str]] = OrderedDict()
        self._lock = threading.Lock()  # tiers are told of by their own threads
        self._tier, engine.shelf.on_tier = engine.shelf.on_tier, self._moved
        self._free, engine.table.on_free = engine.table.on_free, self._freed

    def _moved(self, id: int, tier: str, n_bytes: int) -> None:
        self._tier(id, tier, n_bytes)
        if not self._feeds:
            return
        try:
            record = self.engine.table.get(ChunkId(id))
        except ChunkNotFound:
            return
        with self._lock:
            feed = self._feeds.get(record.namespace)
            if feed is not None:
                self._spaces[id] = record.namespace
                feed.note(id, tier == "none")

    def _freed(self, id: ChunkId) -> None:
        if self._free is not None:
            self._free(id)
        with self._lock:
            namespace = self._spaces.pop(id, None)
            self._prints.pop(id, None)
            if namespace is not None:
                self._feeds[namespace].note(id, True)

    def _feed(self, namespace: str) -> _Feed:
        """Return a feed; a new one begins with all there is. The lock is held."""
        feed = self._feeds.get(namespace)
        if feed is None:
            feed = self._feeds[namespace] = _Feed()
            for record in self.engine.table:
                if record.namespace == namespace and self.engine.shelf.tier(record.id) != "none":
                    self._spaces[record.id] = namespace
                    feed.note(record.id, False)
        return feed

    def read(self, namespace: str, run: str, since: int, limit: int = MOST) -> dict[str, Any]:
        """Return what changed behind number ``since`` of ``run``, or all there is, page by page.

        ``snapshot`` says that what was known before is to be forgotten; ``more``, that there is more
        behind ``seq``. Raises InvalidArgument.
        """
        if since < 0:
            raise InvalidArgument("since", f"{since} is below 0")
        with self._lock:
            feed = self._feed(namespace)
            anew = run != self.run or since < feed.floor or since > feed.seq
            since = 0 if anew else since
            changes = list(feed.since(since))
            last = feed.seq
        page = changes[:limit]
        told = [self._told(id, namespace) for id, _ in page]
        return {
            "run": self.run,
            "seq": (page[-1][1] if page else since) if len(page) < len(changes) else last,
            "snapshot": anew or since == 0,
            "more": len(page) < len(changes),
            "chunks": [each for each in told if each is not None],
            "gone": [id for (id, _), each in zip(page, told, strict=True) if each is None],
        }

    def _told(self, id: int, namespace: str) -> dict[str, Any] | None:
        record = self.engine.table.lookup(f"#{id}", namespace)
        tier = self.engine.shelf.tier(id)
        if record is None or tier == "none":
            return None
        return {
            "id": id,
            "digest": record.digest.hex(),
            "names": list(record.names),
            "tier": tier,
            "n_tokens": record.n_tokens,
            "prints": self._of(record),
        }

    def _of(self, record: Record) -> list[str]:
        """Return the prints of what a chunk says, in hexadecimal; of a message, of its content."""
        known = self._prints.get(record.id)
        if known is None:
            text = self._text(record)
            known = [f"{hash:016x}" for hash in prints(text).hashes.tolist()]
            self._prints[record.id] = known
            while len(self._prints) > MAX_KNOWN:
                self._prints.popitem(last=False)
        self._prints.move_to_end(record.id)
        return known

    def _text(self, record: Record) -> str:
        tokenizer, chat = self.engine.runner.tokenizer, self.engine.maker.chat
        if tokenizer is None:
            return ""
        ids = [int(token) for token in self.engine.table.tokens(record.id)]
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if record.kind not in ROLES or not chat.has_template:
            return text
        try:
            wrap = chat.wrap(record.kind)
        except InvalidArgument:  # a role that the template does not know
            return text
        return text.removeprefix(wrap.before).removesuffix(wrap.after)

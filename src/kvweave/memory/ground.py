"""What the pieces of one memory work on, and how a part comes to stand for an item."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.memory.items import ANCHORS, Items
from kvweave.memory.limits import MemoryBudget
from kvweave.memory.told import Zone
from kvweave.memory.zones import Zones
from kvweave.weave.context import Context
from kvweave.weave.parts import Part


@dataclass(frozen=True, slots=True)
class Ground:
    """One conversation: its context, its items, and which part is what."""

    engine: Engine
    context: Context
    items: Items
    zones: Zones
    budget: MemoryBudget

    @property
    def base(self) -> ChunkId | None:
        """The chunk that the context's other chunks are computed after."""
        return self.context.snapshot().base

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep others from the context, and from its memory, while a task inside one step waits."""
        session = self.context.session
        session.held = True
        try:
            yield
        finally:
            session.held = False

    def learn(self) -> None:
        """Know the zones of parts that came without (`Zones.learn`): system messages are anchors, and
        items where their names say so; others are summaries by their kind, or recalled."""
        self.zones.learn(self.context.parts, self._told)

    def _told(self, part: Part) -> Zone:
        root, kind = self.items.root + "/", self.items.table.get(part.id).kind
        if part.id == self.base or kind == "system":
            return "anchor"
        if not part.name.startswith(root) or (kind != "summary" and self.items.is_said(part)):
            return "turn"
        if part.name.startswith(f"{root}{ANCHORS}/"):
            return "anchor"
        return "summary" if kind == "summary" else "recalled"

    def parts(self, zone: Zone) -> list[Part]:
        """Return the parts of a zone, front to back."""
        return self.zones.parts(self.context.parts, zone)

    def turns(self) -> list[list[Part]]:
        """Return the turns in the context, the oldest first."""
        return self.zones.turns(self.context.parts)

    def first(self, *zones: Zone) -> int:
        """Return the index of the first part in one of ``zones``."""
        return self.zones.first(self.context.parts, *zones)

    def place(self, index: int, name: str, zone: Zone) -> Part:
        """Let an item stand at ``index``."""
        part = self.context.insert_chunk(index, name)
        self.zones.mark(part, zone)
        return part

    def refresh(self) -> None:
        """Have every part that stands for an item be what the item is now: chunks under a name may
        be edited by anybody. Parts of items that are gone leave. Inside an edit."""
        for part in self.context.parts:
            zone = self.zones.of(part)
            if zone == "turn" or not part.name.startswith(self.items.root + "/"):
                continue
            record = self.items.find(part.name)
            if record is not None and record.id == part.id:
                continue
            index = self.context.index(part)
            self.context.drop(part)
            if record is not None:
                self.place(index, part.name, zone)

    def require_ordered(self) -> None:
        """Raise InvalidArgument for a context in which nothing can be put before something."""
        if self.context.settings.positions == "keep":
            reason = 'a memory puts items in front of turns, positions="keep" has no room there'
            raise InvalidArgument("positions", reason, 'use "compact"')

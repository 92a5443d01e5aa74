"""Which part of a context is what to a memory: an anchor, recalled, a summary, or of a turn.

Marks are of an open context. Where parts come without them (behind a restart, in a fork, from a snapshot of
another context), their names say it again: a memory places items only, in front of all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from kvweave.memory.told import Zone
from kvweave.weave.context import Context
from kvweave.weave.naming import LETTERS
from kvweave.weave.parts import Part

BEGINS_TURN = LETTERS["user"] + "-"


class Zones:
    """The zone of each part by its uid, which means the same for ever; all others are turns."""

    _known: ClassVar[WeakKeyDictionary[Context, Zones]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._marks: dict[int, Zone] = {}

    @classmethod
    def of_context(cls, context: Context) -> Zones:
        """Return what memories of an open context marked, the one that is made now included."""
        return cls._known.setdefault(context, cls())

    def mark(self, part: Part, zone: Zone) -> None:
        """Put a part into a zone."""
        self._marks[part.uid] = zone

    def learn(self, parts: Sequence[Part], told: Callable[[Part], Zone]) -> None:
        """Mark those in front of the first turn that nobody marked, by what is ``told`` of them."""
        for part in parts:
            zone = self._marks.get(part.uid) or told(part)
            if zone == "turn":
                return
            self._marks[part.uid] = zone

    def of(self, part: Part) -> Zone:
        """Return the zone of a part."""
        return self._marks.get(part.uid, "turn")

    def parts(self, parts: Sequence[Part], zone: Zone) -> list[Part]:
        """Return the parts of a zone, front to back."""
        return [part for part in parts if self.of(part) == zone]

    def turns(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Return the turns, the oldest first: each begins with what a user said."""
        turns: list[list[Part]] = []
        for part in self.parts(parts, "turn"):
            if not turns or part.name.rpartition("/")[2].startswith(BEGINS_TURN):
                turns.append([])
            turns[-1].append(part)
        return turns

    def first(self, parts: Sequence[Part], *zones: Zone) -> int:
        """Return the index of the first part in one of ``zones``; behind all where there is none."""
        found = (i for i, part in enumerate(parts) if self.of(part) in zones)
        return next(found, len(parts))

"""Memory blocks: labelled texts that always stand in front, each up to a number of characters."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.errors import InvalidArgument, nearest
from kvweave.memory.items import ANCHORS
from kvweave.memory.scheduler import Memory
from kvweave.memory.told import BLOCK_LIMIT, MemoryBlock
from kvweave.verbs import checked


@checked
class MemoryBlocks:
    """Blocks over the anchors of a memory: ``human`` is the chunk ``memory/anchors/human``.

    Limits and descriptions are the program's: only values are stored. Anchors that were there before
    are blocks too.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._about: dict[str, tuple[int, str]] = {}

    def __iter__(self) -> Iterator[MemoryBlock]:
        """Yield the blocks by label."""
        for item in self.memory.items(f"{ANCHORS}/"):
            yield self.get(item.name.removeprefix(f"{self.memory.root}/{ANCHORS}/"))

    def add(
        self, label: str, value: str = "", limit: int = BLOCK_LIMIT, description: str = ""
    ) -> MemoryBlock:
        """Make a block. Raises NameTaken, InvalidName, InvalidArgument for a value over the limit."""
        _check(label, value, limit)
        self.memory.anchor(label, value)
        self._about[label] = limit, description
        return self.get(label)

    def get(self, label: str) -> MemoryBlock:
        """Return a block. Raises InvalidArgument where there is none."""
        items = self.memory.items_below
        name = items.full(f"{ANCHORS}/{label}")
        if items.find(name) is None:
            start = items.full(ANCHORS) + "/"
            known = [n[len(start) :] for n in items.table.names(items.namespace, start)]
            near = nearest(label, known) or tuple(known[:8])
            hint = f"there are {', '.join(near)}" if near else "add one first"
            raise InvalidArgument("label", f"there is no block {label!r}", hint)
        return MemoryBlock(label, items.text(name), *self._about.get(label, (BLOCK_LIMIT, "")))

    def set(self, label: str, value: str) -> MemoryBlock:
        """Give a block another value. Raises InvalidArgument for one over the limit."""
        _check(label, value, self.get(label).limit)
        self.memory.write(f"{ANCHORS}/{label}", value)
        return self.get(label)

    def append(self, label: str, line: str) -> MemoryBlock:
        """Add a line to a block. Raises InvalidArgument when it is over the limit then."""
        value = self.get(label).value
        return self.set(label, f"{value}\n{line}" if value else line)

    def replace(self, label: str, old: str, new: str) -> MemoryBlock:
        """Change the one place where a block says ``old``. Raises InvalidArgument."""
        value = self.get(label).value
        if not old or value.count(old) != 1:
            n = value.count(old) if old else 0
            hint = "give text that occurs once" if n else "read the block first"
            raise InvalidArgument("old", f"it occurs {n} times in block {label!r}", hint)
        return self.set(label, value.replace(old, new))


def _check(label: str, value: str, limit: int) -> None:
    if len(value) > limit:
        reason = f"{len(value)} characters are over the {limit} of block {label!r}"
        raise InvalidArgument("value", reason, f"shorten it by {len(value) - limit}")

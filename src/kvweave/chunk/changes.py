"""What an open transaction changed: how to undo it, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvweave.chunk.identity import ChunkId

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Changes:
    """Change things through this, and ``undo`` puts back what was there.

    ``chunks`` and ``names`` are what differs from the journal; after an undo they may hold more
    than that, which costs a write and is otherwise harmless.
    """

    chunks: set[ChunkId] = field(default_factory=set)
    names: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of namespace and name."""
    tokens: dict[ChunkId, bytes] = field(default_factory=dict)
    """Tokens of new chunks, which the journal does not have yet."""
    loose: dict[ChunkId, None] = field(default_factory=dict)
    """Chunks something let go of: at the end, those nothing keeps are freed."""
    freed: list[ChunkId] = field(default_factory=list)
    given: int = 0
    """How many ids were given out."""
    write_uses: bool = False
    """Whether to write the use statistics too."""
    marks: list[int] = field(default_factory=list)
    """Where each open transaction began, the outermost first."""
    _undo: list[tuple[Callable[..., object], tuple[object, ...]]] = field(default_factory=list)

    def mark(self) -> int:
        """Return the point ``undo`` can go back to."""
        return len(self._undo)

    def on_undo(self, call: Callable[..., object], *args: object) -> None:
        """Remember a call that takes back the change made next."""
        self._undo.append((call, args))

    def set_item(self, target: dict[K, V], key: K, value: V) -> None:
        """Do ``target[key] = value``."""
        if key in target:
            self._undo.append((target.__setitem__, (key, target[key])))
        else:
            self._undo.append((target.__delitem__, (key,)))
        target[key] = value

    def del_item(self, target: dict[K, V], key: K) -> V:
        """Do ``del target[key]`` and return what was there."""
        value = target.pop(key)
        self._undo.append((target.__setitem__, (key, value)))
        return value

    def set_field(self, target: object, name: str, value: object) -> None:
        """Do ``target.name = value``."""
        self._undo.append((setattr, (target, name, getattr(target, name))))
        setattr(target, name, value)

    def undo(self, mark: int) -> None:
        """Take back every change since ``mark``, the last one first."""
        while len(self._undo) > mark:
            call, args = self._undo.pop()
            call(*args)


class Transaction:
    """What ``with`` wants; a generator would take three times as long, twice in each verb."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kind is not None)

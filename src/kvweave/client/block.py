"""``with context.edit() as edit:``: edits that are sent as one, and happen all or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvweave.client import parse
from kvweave.client.course import Course
from kvweave.client.settle import settle
from kvweave.client.wires import Wire
from kvweave.errors import InvalidArgument

T = TypeVar("T")
_OPEN: ContextVar[Collection[str]] = ContextVar("kvweave_edits", default=())  # paths of contexts


@dataclass(frozen=True, slots=True)
class OneEdit(Generic[T]):
    """One edit of a context: its verb and fields, and how to read what it made."""

    verb: str
    body: dict[str, object]
    read: Callable[[Any], T]


@dataclass(slots=True)
class Promise(Generic[T]):
    """What an edit makes once the block it stands in has ended."""

    edit: OneEdit[T]
    found: list[T] = field(default_factory=list)

    @property
    def part(self) -> T:
        """What it made. Raises InvalidArgument inside the block, and where the block took it away."""
        if not self.found:
            reason = "it is not made yet, or the block dropped it again"
            raise InvalidArgument("part", reason, "the block has to end first")
        return self.found[0]


class Block:
    """Collects edits of a context. What an edit makes is its ``part`` when the block has ended.

    ``version``: what the context's has to be; after the block, what it is.
    """

    def __init__(self, wire: Wire, path: str, version: int | None) -> None:
        self.version = version
        self._wire: Any = wire
        self._peer, self._path = wire.peer, path
        self._edits: list[Promise[Any]] = []

    def take(self, edit: OneEdit[T]) -> Promise[T]:
        """Collect one more edit."""
        made = Promise(edit)
        self._edits.append(made)
        return made

    def _enter(self) -> None:
        require_closed(self._path)
        _OPEN.set((*_OPEN.get(), self._path))

    def _leave(self) -> None:
        _OPEN.set([path for path in _OPEN.get() if path != self._path])

    def _course(self) -> Course[None]:
        if not self._edits:
            return
        yield from settle(self._peer, self._path)
        edits = [{"verb": each.edit.verb, **each.edit.body} for each in self._edits]
        told = yield from self._peer.call(
            "POST", f"{self._path}:edit", {"edits": edits}, headers=if_match(self.version)
        )
        self.version = told.get("version")
        for each, entry in zip(self._edits, told["made"], strict=True):
            if entry is not None or each.edit.read is not parse.part:
                each.found.append(each.edit.read(entry))


def if_match(version: int | None) -> dict[str, str]:
    """Return the header of a request that is for this version of a context only."""
    return {} if version is None else {"if-match": f'"{version}"'}


def require_closed(path: str) -> None:
    """Raise InvalidArgument within a block of edits of this context: what is sent by itself would not
    be one of them."""
    if path in _OPEN.get():
        raise InvalidArgument(
            "edit",
            "a block of edits is open, and this would not be one of them",
            "edit through what the block gives: with context.edit() as edit: edit.append(...)",
        )

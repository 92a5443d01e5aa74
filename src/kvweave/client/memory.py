"""The memory over a server's context: the verbs of `kvweave.Memory`, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from kvweave.client import parse
from kvweave.client.context import ContextVerbs, sent
from kvweave.client.course import Course
from kvweave.client.edits import content_of
from kvweave.client.faces import Awaited, Blocking, Streamed, Told, Verb
from kvweave.client.peer import part_of_path
from kvweave.client.settle import settle
from kvweave.client.turn import AsyncRemoteTurn, RemoteTurn, TurnVerbs
from kvweave.client.wires import Wire
from kvweave.errors import InvalidArgument
from kvweave.memory.told import (
    BLOCK_LIMIT,
    RANKED,
    By,
    MemoryBlock,
    MemoryItem,
    Slept,
    ToolReply,
    Zone,
)
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.parts import Part, TextOrTokens

MEMORY = "/v1/memory"
_TurnT = TypeVar("_TurnT", bound=TurnVerbs)
_Json = dict[str, Any]


class MemoryVerbs(Generic[_TurnT]):
    """A memory of a server, by the name of its context: the one that an object of that has now."""

    _turn: type[_TurnT]

    def __init__(self, wire: Wire, of: str | ContextVerbs[Any, Any]) -> None:
        self._of = of
        self._wire: Any = wire
        self._peer = wire.peer

    @property
    def name(self) -> str:
        """The name of its context."""
        return self._of if isinstance(self._of, str) else self._of.name

    @property
    def _path(self) -> str:
        return f"{MEMORY}/{part_of_path(self.name)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # ---- reading

    @Verb
    def describe(self) -> Course[_Json]:
        """Return all the server tells about it: root, budget, zones, how many steps can be undone."""
        return parse.told((yield from self._peer.get(self._path)), "name", "zones")

    @Told
    def root(self) -> Course[str]:
        """The name all items are below."""
        return str((yield from MemoryVerbs.describe.course(self))["root"])

    @Told
    def n_steps(self) -> Course[int]:
        """How many steps `undo` can take back."""
        return int((yield from MemoryVerbs.describe.course(self))["n_steps"])

    @Verb
    def zone(self, zone: Zone) -> Course[list[Part]]:
        """Return the parts of a zone: ``anchor``, ``recalled``, ``summary`` or ``turn``."""
        told = (yield from MemoryVerbs.describe.course(self))["zones"]
        if zone not in told:
            raise InvalidArgument("zone", f"{zone!r} is none of {', '.join(told)}")
        return [*map(parse.part, told[zone])]

    @Verb
    def items(self, pattern: str = "**") -> Course[list[MemoryItem]]:
        """Return the items that match, by name. Raises ChunkNotFound."""
        found = yield from self._peer.get(f"{self._path}:items", pattern=pattern)
        return [parse.item(each) for each in found["data"]]

    @Verb
    def read(self, name: str) -> Course[str]:
        """Return what an item says. Raises ChunkNotFound."""
        return str((yield from self._peer.get(f"{self._path}:read", item=name))["text"])

    # ---- talking

    @Verb
    def ask(
        self,
        /,
        content: str,
        max_tokens: int = 256,
        *,
        recall: By | None = "embedding",
        question: str | None = None,
        **options: object,
    ) -> Course[Answer]:
        """Make room, recall what the message (or ``question``) calls for, and answer it."""
        turn = self._begin(content, max_tokens, recall, question, options)
        return (yield from turn.course())

    @Streamed
    def stream(
        self,
        /,
        content: str,
        max_tokens: int = 256,
        *,
        recall: By | None = "embedding",
        question: str | None = None,
        **options: object,
    ) -> _TurnT:
        """As `ask`, and yield the answer's text as it comes; closing the iterator cancels."""
        return self._begin(content, max_tokens, recall, question, options)

    @Verb
    def tell(self, content: TextOrTokens, kind: str = "user") -> Course[Part]:
        """Make room, and add a message of ``user``, ``assistant`` or ``tool`` without an answer."""
        return parse.part((yield from self._do("tell", **content_of(content), kind=kind)))

    @Verb
    def settle(self) -> Course[list[str]]:
        """Bring window and summaries under their budgets now; return the names of new items."""
        return list((yield from self._do("settle"))["names"])

    # ---- recalling

    @Verb
    def search(
        self, question: TextOrTokens, by: By = "embedding", n: int = RANKED
    ) -> Course[list[tuple[str, float]]]:
        """Return up to ``n`` names of items and scores, the best first, and change nothing."""
        found = yield from self._do("search", question=_asked(question), by=by, n=n)
        return [(str(each["name"]), float(each["score"])) for each in found["data"]]

    @Verb
    def recall(
        self, question: TextOrTokens, by: By = "embedding", n: int | None = None
    ) -> Course[list[str]]:
        """Let items that ``question`` calls for stand between anchors and summaries; return their
        names."""
        return list((yield from self._do("recall", question=_asked(question), by=by, n=n))["names"])

    @Verb
    def release(self, pattern: str = "**") -> Course[list[str]]:
        """Take recalled items out of the context; they stay items. Return their names."""
        return list((yield from self._do("release", pattern=pattern))["names"])

    # ---- writing

    @Verb
    def anchor(self, label: str, content: TextOrTokens) -> Course[str]:
        """Pin a text in front of all but other anchors; return its name. Raises NameTaken."""
        return str((yield from self._do("anchor", label=label, **content_of(content)))["name"])

    @Verb
    def write(self, name: str, content: TextOrTokens, *, replace: bool = True) -> Course[str]:
        """Write an item, in the context too where it stands there; return its whole name."""
        body = {**content_of(content), "name": name, "replace": replace}
        return str((yield from self._do("write", **body))["name"])

    @Verb
    def delete(self, pattern: str, *, dry_run: bool = False) -> Course[list[str]]:
        """Remove items, from the context too; return their names. Raises ChunkNotFound."""
        return list((yield from self._do("delete", pattern=pattern, dry_run=dry_run))["names"])

    @Verb
    def rename(self, name: str, to: str) -> Course[str]:
        """Give an item, or all below a ``directory/``, another name; return the whole new name."""
        return str((yield from self._do("rename", name=name, to=to))["name"])

    # ---- for agents

    @Verb
    def tool(self, call: Mapping[str, Any]) -> Course[ToolReply]:
        """Answer a call of the memory tool, as `kvweave.memory.MemoryTool` does."""
        return ToolReply(**(yield from self._do("tool", **call)))

    @Verb
    def blocks(self) -> Course[list[MemoryBlock]]:
        """Return the memory blocks by label."""
        found = yield from self._peer.get(f"{self._path}:blocks")
        return [MemoryBlock(**each) for each in found["data"]]

    @Verb
    def add_block(
        self, label: str, value: str = "", limit: int = BLOCK_LIMIT, description: str = ""
    ) -> Course[MemoryBlock]:
        """Make a memory block. Raises NameTaken, InvalidName, InvalidArgument."""
        body = {"value": value, "limit": limit, "description": description}
        return (yield from self._block("add", label, **body))

    @Verb
    def set_block(self, label: str, value: str) -> Course[MemoryBlock]:
        """Give a block another value. Raises InvalidArgument for one over its limit."""
        return (yield from self._block("set", label, value=value))

    @Verb
    def append_block(self, label: str, line: str) -> Course[MemoryBlock]:
        """Add a line to a block."""
        return (yield from self._block("append", label, value=line))

    @Verb
    def replace_block(self, label: str, old: str, new: str) -> Course[MemoryBlock]:
        """Change the one place where a block says ``old``."""
        return (yield from self._block("replace", label, old=old, value=new))

    # ---- steps

    @Verb
    def undo(self) -> Course[str | None]:
        """Take back the last step; return what it was, or None. Raises ContextChanged."""
        found: str | None = (yield from self._do("undo"))["undone"]
        return found

    @Verb
    def idle(self) -> Course[Slept | None]:
        """Do one bounded step of what can wait, None where nothing does. A server lays items down by
        itself while nobody asks; it settles only when it is asked to."""
        slept = (yield from self._do("idle"))["slept"]
        return None if slept is None else Slept(**slept)

    @Verb
    def close(self) -> Course[None]:
        """Unpin what was pinned here; items and context stay, steps are forgotten."""
        yield from settle(self._peer, self._path)
        parse.told((yield from self._peer.call("DELETE", self._path)), "name")

    # ---- inside

    def _do(self, verb: str, /, **body: object) -> Course[Any]:
        yield from settle(self._peer, self._path)
        return (yield from self._peer.call("POST", f"{self._path}:{verb}", body))

    def _block(self, verb: str, label: str, **body: object) -> Course[MemoryBlock]:
        return MemoryBlock(**(yield from self._do("block", verb=verb, label=label, **body)))

    def _begin(
        self,
        content: str,
        max_tokens: int,
        recall: By | None,
        question: str | None,
        options: dict[str, object],
    ) -> _TurnT:
        sampling, max_drift = request_from(max_tokens, options)
        body = sent(sampling) | {"max_drift": max_drift, "content": content, "stream": True}
        body |= {"recall": recall or "none", "question": question}
        return self._turn(self._wire, self._path, "ask", body)


class RemoteMemory(MemoryVerbs[RemoteTurn], Blocking):
    """A memory of a server; its verbs return when they are done."""

    _turn = RemoteTurn


class AsyncRemoteMemory(MemoryVerbs[AsyncRemoteTurn], Awaited):
    """A memory of a server; its verbs are awaited, and so is ``await memory.root``."""

    _turn = AsyncRemoteTurn


def _asked(question: TextOrTokens) -> str | list[int]:
    return question if isinstance(question, str) else [*map(int, question)]

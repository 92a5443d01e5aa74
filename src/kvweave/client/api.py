"""The facade: one server, its chunks and its contexts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvweave.chunk.files import Entry
from kvweave.chunk.identity import Kind, TierName, check_name
from kvweave.client import parse
from kvweave.client.context import CONTEXTS, AsyncRemoteContext, ContextVerbs, RemoteContext
from kvweave.client.course import AtOnce, Course, Disconnect, Journey
from kvweave.client.edits import content_of
from kvweave.client.faces import Awaited, Blocking, Told, Verb
from kvweave.client.files import CHUNKS, AsyncRemoteFiles, FileVerbs, RemoteFiles
from kvweave.client.memory import MEMORY, AsyncRemoteMemory, MemoryVerbs, RemoteMemory
from kvweave.client.peer import Peer, part_of_path
from kvweave.client.wires import AwaitedWire, BlockingWire, Wire, require_httpx
from kvweave.errors import InvalidArgument
from kvweave.memory.limits import MemoryBudget
from kvweave.run.capability import Capability
from kvweave.verbs import checked
from kvweave.weave.answer import Answer
from kvweave.weave.parts import TextOrTokens
from kvweave.weave.template import Ref, Template

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8700"  # where `kvweave serve` listens
TIMEOUT = 600.0  # seconds without a byte; a long text takes a small machine minutes

_ContextT = TypeVar("_ContextT", bound=ContextVerbs[Any, Any])
_MemoryT = TypeVar("_MemoryT", bound=MemoryVerbs[Any])


class ClientVerbs(Generic[_ContextT, _MemoryT]):
    """What both clients can do."""

    _context: type[_ContextT]
    _memory: type[_MemoryT]

    def __init__(self, wire: Wire) -> None:
        self._wire: Any = wire
        self._peer = wire.peer
        self.url = wire.peer.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # ---- life

    @Verb
    def close(self) -> Course[None]:
        """Close the connections; the server's contexts stay open."""
        yield Disconnect()

    @Verb
    def health(self) -> Course[dict[str, Any]]:
        """Return whether the server takes requests, which needs no key."""
        return parse.told((yield from self._peer.get("/health")), "status")

    @Verb
    def status(self) -> Course[dict[str, Any]]:
        """Return what the server is doing and how full it is."""
        return parse.told((yield from self._peer.get("/v1/status")), "model", "can", "uptime")

    @Verb
    def can(self, what: str) -> Course[Capability]:
        """Tell whether the server's model can ``run``, and ``move`` (chunks at any position); if not, why."""
        told = (yield from self._peer.get("/v1/status"))["can"]
        if what not in told:
            known = " or ".join(map(repr, told))
            raise InvalidArgument("can", f"nothing is known about {what!r}", f"ask for {known}")
        return Capability(bool(told[what]["ok"]), str(told[what]["reason"]))

    # ---- chunks

    @Verb
    def put(
        self,
        name: str,
        text: TextOrTokens,
        *,
        kind: Kind = "document",
        replace: bool = False,
        durable: bool = False,
        special_tokens: bool = False,
    ) -> Course[Entry]:
        """Store a chunk with its canonical KV under ``name``.

        With ``durable`` it is on the server's disk when this returns; with ``special_tokens`` the
        names of special tokens in the text are these, so it can change roles. Raises as `Engine.put`.
        """
        body = {**content_of(text), "kind": kind, "replace": replace, "durable": durable}
        body["special_tokens"] = special_tokens
        path = f"{CHUNKS}/{part_of_path(name)}"
        return parse.entry((yield from self._peer.call("PUT", path, body)))

    @Verb
    def put_many(
        self,
        items: Iterable[tuple[str, TextOrTokens]],
        *,
        kind: Kind = "document",
        replace: bool = False,
        durable: bool = False,
        special_tokens: bool = False,
        progress: Callable[[int], None] = lambda n: None,
    ) -> Course[list[Entry]]:
        """Store several chunks with one request, all of them or none.

        ``progress`` is told the tokens of each when all are stored.
        """
        more = {"kind": kind, "special_tokens": special_tokens}
        wanted = [{"name": check_name(name), **content_of(text), **more} for name, text in items]
        if not wanted:
            return []
        body = {"items": wanted, "replace": replace, "durable": durable}
        found = yield from self._peer.call("POST", f"{CHUNKS}:put", body)
        entries = [parse.entry(each) for each in found["data"]]
        for entry in entries:
            progress(entry.n_tokens)
        return entries

    @Verb
    def place(
        self, pattern: str, tier: TierName, *, codec: str | None = None, dry_run: bool = False
    ) -> Course[list[Entry]]:
        """Move the canonical KV of matching chunks to ram, disk, remote or none (tokens only)."""
        files = FileVerbs(self._wire)
        place = FileVerbs.place.course
        return (yield from place(files, pattern, tier, codec=codec, dry_run=dry_run))

    @Verb
    def compress(
        self, ref: str, keep: str, *, to: str | None = None, dry_run: bool = False
    ) -> Course[Entry]:
        """Leave of a chunk's KV what a token policy keeps; see `Engine.compress`."""
        files = FileVerbs(self._wire)
        return (yield from FileVerbs.compress.course(files, ref, keep, to=to, dry_run=dry_run))

    @Verb
    def denoise(self) -> Course[int]:
        """Compute canonical KV for every named chunk that has none; return the tokens computed."""
        files = FileVerbs(self._wire)
        cold = yield from FileVerbs.find.course(files, "**", tier="none")
        yield from FileVerbs.denoise.course(files)
        return sum({entry.id: entry.n_tokens for entry in cold}.values())

    # ---- contexts

    @Told
    def contexts(self) -> Course[dict[str, _ContextT]]:
        """The open contexts by name."""
        names = [each["name"] for each in (yield from ClientVerbs.summaries.course(self))]
        return {name: self._context(self._wire, name) for name in names}

    @Verb
    def summaries(self) -> Course[list[dict[str, Any]]]:
        """Return name, length and whether an answer is under way of each open context, by name."""
        return [
            parse.told(each, "name", "n_tokens") for each in (yield from self._peer.pages(CONTEXTS))
        ]

    @Verb
    def context(
        self, /, name: str, *, system: str | None = None, **options: object
    ) -> Course[_ContextT]:
        """Open a conversation.

        Args:
            system: the first message; all other chunks' canonical KV is computed after it.
            options: ``repair``, ``share``, ``max_drift``, ``prune``, ``positions``, ``keep``, ``bases``.

        Raises NameTaken, InvalidName, InvalidArgument.
        """
        body = {**options, "name": name, "system": system}
        return self._made((yield from self._peer.call("POST", CONTEXTS, body)))

    @Verb
    def compose(
        self,
        /,
        template: str | Template,
        values: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        repair: str | None = None,
        share: float | None = None,
        max_drift: float | None = None,
        keep: str | None = None,
        bases: str | None = None,
        **holes: object,
    ) -> Course[_ContextT]:
        """Make a context from text with ``{holes}``; see `Engine.compose`."""
        body = {
            "template": template.text if isinstance(template, Template) else template,
            "values": {k: _value(k, v) for k, v in {**(values or {}), **holes}.items()},
            "name": name,
            "repair": repair,
            "share": share,
            "max_drift": max_drift,
            "keep": keep,
            "bases": bases,
        }
        return self._made((yield from self._peer.call("POST", f"{CONTEXTS}:compose", body)))

    @Verb
    def get_context(self, name: str) -> Course[_ContextT]:
        """Return an open context. Raises ContextNotFound."""
        found = self._context(self._wire, name)
        yield from ContextVerbs.describe.course(found)
        return found

    @Verb
    def fork(self, context: _ContextT, name: str) -> Course[_ContextT]:
        """Return a copy of ``context`` under another name."""
        yield from ContextVerbs.fork.course(context, name)
        return self._context(self._wire, name)

    @Verb
    def rename_context(self, name: str, to: str) -> Course[_ContextT]:
        """Give a context another name, and return it. Raises ContextNotFound, NameTaken, InvalidName."""
        context = self._context(self._wire, name)
        yield from ContextVerbs.rename.course(context, to)
        return context

    @Verb
    def close_context(self, name: str) -> Course[None]:
        """Free a context's rows and let go of its chunks. Raises ContextNotFound."""
        yield from ContextVerbs.close.course(self._context(self._wire, name))

    @Verb
    def generate_many(
        self, /, contexts: Sequence[_ContextT], max_tokens: int = 256, **options: object
    ) -> Course[list[Answer]]:
        """Continue several contexts at the same time; the server packs them into one model pass a step.

        When one fails, the others are stopped.
        """
        if len({context.name for context in contexts}) < len(contexts):
            raise InvalidArgument("contexts", "one of them is there twice", "name each once")
        generate = ContextVerbs.generate.course
        several = [Journey(generate(context, max_tokens, **options)) for context in contexts]
        return list((yield AtOnce(several)))

    # ---- memories

    @Verb
    def memory(
        self,
        context: _ContextT | str,
        *,
        root: str = "memory",
        budget: MemoryBudget | None = None,
        summarise: str = "model",
        sentences: int = 1,
    ) -> Course[_MemoryT]:
        """Open a memory over a context; see `kvweave.Memory`. Summaries are written by the ``model``, or are
        the first ``sentences`` (0: all) of each message. Raises ContextNotFound, NameTaken, InvalidArgument."""
        name = context if isinstance(context, str) else context.name
        body = {
            "root": root,
            "budget": _json(budget),
            "summarise": summarise,
            "sentences": sentences,
        }
        yield from self._peer.call("POST", f"{MEMORY}/{part_of_path(name)}:open", body)
        return self._memory(self._wire, context)

    @Verb
    def get_memory(self, name: str) -> Course[_MemoryT]:
        """Return the memory over a context. Raises ContextNotFound, MemoryNotFound."""
        found = self._memory(self._wire, name)
        yield from MemoryVerbs.describe.course(found)
        return found

    @Told
    def memories(self) -> Course[dict[str, _MemoryT]]:
        """The memories by the names of their contexts."""
        names = [each["name"] for each in (yield from self._peer.pages(MEMORY))]
        return {name: self._memory(self._wire, name) for name in names}

    # ---- inside

    def _made(self, told: Mapping[str, Any]) -> _ContextT:
        return self._context(self._wire, str(told["name"]))


@checked
class Client(ClientVerbs[RemoteContext, RemoteMemory], Blocking):
    """A server's chunks and contexts, as far as its key lets us see them.

    Args:
        url: such as ``http://127.0.0.1:8700``; by default KVWEAVE_URL, else that one.
        key: an API key, by default KVWEAVE_KEY; a server on the own machine may need none.
        timeout: seconds to wait for the next byte.
        retries: how often to try again what a busy server refused, or what broke off.
        transport: what carries requests, for tests.

    All verbs raise what `kvweave.Engine`'s raise, and KeyRefused, Overloaded, Unreachable. Threads
    may share a client.
    """

    _context, _memory = RemoteContext, RemoteMemory

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = 2,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(BlockingWire(_peer(url, key, retries), timeout, transport))
        self.files = RemoteFiles(self._wire)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@checked
class AsyncClient(ClientVerbs[AsyncRemoteContext, AsyncRemoteMemory], Awaited):
    """A `Client` whose verbs are awaited, on asyncio or trio; ``async with`` closes it.

    What a `Client` has as a property is awaited too: ``await client.contexts``. Cancelling a task
    that waits for an answer hangs up, and the server stops that answer.
    """

    _context, _memory = AsyncRemoteContext, AsyncRemoteMemory

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(AwaitedWire(_peer(url, key, retries), timeout, transport))
        self.files = AsyncRemoteFiles(self._wire)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _peer(url: str | None, key: str | None, retries: int) -> Peer:
    require_httpx()
    url = url or os.environ.get("KVWEAVE_URL") or URL
    return Peer(url, key or os.environ.get("KVWEAVE_KEY"), retries)


def _json(budget: MemoryBudget | None) -> dict[str, object]:
    given = {} if budget is None else asdict(budget)
    return {key: value for key, value in given.items() if value is not None}


def _value(hole: str, value: object) -> object:
    """Return what fills a hole, JSON-ready: text, or a list of chunk names."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, list | tuple):
        return [item.name if isinstance(item, Ref) else item for item in value]
    if isinstance(value, str):
        return value
    raise InvalidArgument(
        hole, f"cannot be {type(value).__name__}", "give a str of text or a list of chunk names"
    )

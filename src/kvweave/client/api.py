"""The facade: one server, its chunks and its contexts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvweave.chunk.files import Entry
from kvweave.chunk.identity import Kind, TierName, check_name
from kvweave.client import parse
from kvweave.client.context import CONTEXTS, RemoteContext
from kvweave.client.files import CHUNKS, RemoteFiles
from kvweave.client.http import Http, part_of_path
from kvweave.errors import ChunkNotFound, ContextNotFound, InvalidArgument, nearest
from kvweave.weave.parts import TextOrTokens
from kvweave.weave.template import Ref, Template

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8700"  # where `kvweave serve` listens
TIMEOUT = 600.0  # seconds without a byte; a long text takes a small machine minutes


class Client:
    """A server's chunks and contexts, as far as its key lets us see them.

    Args:
        url: such as ``http://127.0.0.1:8700``; by default KVWEAVE_URL, else that one.
        key: an API key, by default KVWEAVE_KEY; a server on the own machine may need none.
        timeout: seconds to wait for the next byte.
        retries: how often to try again what a busy server refused.
        transport: what carries requests, for tests.

    All verbs raise what `kvweave.Engine`'s raise, and KeyRefused, Overloaded, Unreachable. Threads
    may share a client.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = 2,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url = url or os.environ.get("KVWEAVE_URL") or URL
        key = key or os.environ.get("KVWEAVE_KEY")
        self._http = Http(url, key, timeout, retries, transport)
        self.url = self._http.url
        self.files = RemoteFiles(self._http)

    # ---- life

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close the connections; the server's contexts stay open."""
        self._http.close()

    def health(self) -> dict[str, Any]:
        """Return whether the server takes requests, which needs no key."""
        return dict(self._http.get("/health"))

    def status(self) -> dict[str, Any]:
        """Return what the server is doing and how full it is."""
        return dict(self._http.get("/v1/status"))

    # ---- chunks

    def put(
        self,
        name: str,
        text: TextOrTokens,
        *,
        kind: Kind = "document",
        replace: bool = False,
        durable: bool = False,
    ) -> Entry:
        """Store a chunk with its canonical KV under ``name``.

        With ``durable`` it is on the server's disk when this returns. Raises as `Engine.put`.
        """
        content = {"text": text} if isinstance(text, str) else {"tokens": [*map(int, text)]}
        body = {**content, "kind": kind, "replace": replace, "durable": durable}
        return parse.entry(self._http.call("PUT", f"{CHUNKS}/{part_of_path(name)}", body))

    def put_many(
        self,
        items: Iterable[tuple[str, TextOrTokens]],
        *,
        kind: Kind = "document",
        replace: bool = False,
        progress: Callable[[int], None] = lambda n: None,
    ) -> list[Entry]:
        """Store several chunks, one by one; ``progress`` is told the tokens of each.

        When one fails, the names made before it are removed again; unlike with `Engine.put_many`,
        those that were replaced stay replaced.
        """
        items = [(check_name(name), text) for name, text in items]
        known = {name for name, _ in items if replace and self._has(name)}
        made: list[Entry] = []
        try:
            for name, text in items:
                made.append(self.put(name, text, kind=kind, replace=replace))
                progress(made[-1].n_tokens)
        except BaseException:
            for entry in made:
                if entry.name not in known:
                    self.files.rm(entry.name)
            raise
        return made

    def place(
        self, pattern: str, tier: TierName, *, codec: str | None = None, dry_run: bool = False
    ) -> list[Entry]:
        """Move the canonical KV of matching chunks to ram, disk, remote or none (tokens only)."""
        return self.files.place(pattern, tier, codec=codec, dry_run=dry_run)

    # ---- contexts

    @property
    def contexts(self) -> dict[str, RemoteContext]:
        """The open contexts by name."""
        names = [str(each["name"]) for each in self._http.get(CONTEXTS)["data"]]
        return {name: RemoteContext(self._http, name) for name in names}

    def context(self, name: str, *, system: str | None = None, **options: object) -> RemoteContext:
        """Open a conversation.

        Args:
            system: the first message; all other chunks' canonical KV is computed after it.
            options: ``repair``, ``share``, ``max_drift``, ``prune``, ``positions``.

        Raises NameTaken, InvalidName, InvalidArgument.
        """
        made = self._http.call("POST", CONTEXTS, {**options, "name": name, "system": system})
        return RemoteContext(self._http, str(made["name"]))

    def compose(
        self,
        template: str | Template,
        values: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        repair: str | None = None,
        share: float | None = None,
        max_drift: float | None = None,
        **holes: object,
    ) -> RemoteContext:
        """Make a context from text with ``{holes}``; see `Engine.compose`."""
        body = {
            "template": template.text if isinstance(template, Template) else template,
            "values": {k: _value(k, v) for k, v in {**(values or {}), **holes}.items()},
            "name": name,
            "repair": repair,
            "share": share,
            "max_drift": max_drift,
        }
        made = self._http.call("POST", "/v1/compose", body)
        return RemoteContext(self._http, str(made["name"]))

    def get_context(self, name: str) -> RemoteContext:
        """Return an open context. Raises ContextNotFound."""
        known = self.contexts
        if name not in known:
            raise ContextNotFound(name, nearest(name, known))
        return known[name]

    def fork(self, context: RemoteContext, name: str) -> RemoteContext:
        """Return a copy of ``context`` under another name."""
        return context.fork(name)

    def close_context(self, name: str) -> None:
        """Free a context's rows and let go of its chunks. Raises ContextNotFound."""
        RemoteContext(self._http, name).close()

    # ---- inside

    def _has(self, name: str) -> bool:
        try:
            self.files.stat(name)
        except ChunkNotFound:
            return False
        return True


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

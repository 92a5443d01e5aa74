"""The file verbs on a server's chunks: those of `kvweave.chunk.files.Files`, over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kvweave.chunk.files import Entry, Usage
from kvweave.chunk.identity import Kind, TierName
from kvweave.client import parse
from kvweave.client.course import Course
from kvweave.client.faces import Awaited, Blocking, Verb
from kvweave.client.peer import part_of_path
from kvweave.client.wires import Wire
from kvweave.errors import InvalidArgument

CHUNKS = "/v1/chunks"


class FileVerbs:
    """The verbs on the chunks of the namespace the key belongs to; see `Files` for what they do."""

    def __init__(self, wire: Wire) -> None:
        self._wire: Any = wire
        self._peer = wire.peer

    # --- reading ---

    @Verb
    def ls(
        self,
        pattern: str = "",
        *,
        sort: str = "name",
        reverse: bool = False,
        limit: int | None = None,
    ) -> Course[list[Entry]]:
        """Return the names that match, in order of an Entry's field."""
        query = {"pattern": pattern, "sort": sort, "reverse": reverse, "limit": limit}
        return _entries((yield from self._peer.pages(CHUNKS, **query)))

    @Verb
    def stat(self, ref: str) -> Course[Entry]:
        """Return the entry of one name or ``#17``; raise ChunkNotFound."""
        return parse.entry((yield from FileVerbs.about.course(self, ref)))

    @Verb
    def about(self, ref: str) -> Course[dict[str, Any]]:
        """Return the entry as a dict, with all names, the base's id and the digest."""
        found = yield from self._peer.get(f"{CHUNKS}/{part_of_path(ref)}")
        found = parse.told(found, "id", "names", "n_tokens")
        return {k: v for k, v in found.items() if k not in ("text", "tokens")}

    @Verb
    def text(self, ref: str) -> Course[dict[str, Any]]:
        """Return the ``tokens`` and the ``text`` of a chunk, None where the model has no tokenizer.

        Raises ChunkNotFound.
        """
        found = yield from self._peer.get(f"{CHUNKS}/{part_of_path(ref)}", text=True)
        return {"tokens": found["tokens"], "text": found["text"]}

    @Verb
    def find(
        self,
        pattern: str = "**",
        *,
        kind: Kind | None = None,
        tier: TierName | None = None,
        pinned: bool | None = None,
        min_tokens: int | None = None,
        unused_since: float | None = None,
    ) -> Course[list[Entry]]:
        """Return the names that match and whose chunk is as asked, by name."""
        query = {
            "pattern": pattern,
            "kind": kind,
            "tier": tier,
            "pinned": pinned,
            "min_tokens": min_tokens,
            "unused_since": unused_since,
        }
        return _entries((yield from self._peer.pages(f"{CHUNKS}:find", **query)))

    @Verb
    def du(
        self,
        pattern: str = "",
        by: Literal["tier", "kind", "namespace", "dir"] = "tier",
        *,
        all_namespaces: bool = False,
    ) -> Course[list[Usage]]:
        """Return what the chunks that match take, the largest group first.

        Raises InvalidArgument for ``all_namespaces``: a key sees its own only.
        """
        if all_namespaces:
            raise InvalidArgument(
                "all_namespaces", "a server shows each key its own", "take tier, kind or dir"
            )
        found = yield from self._peer.get(f"{CHUNKS}:du", pattern=pattern, by=by)
        return [parse.usage(group) for group in found["data"]]

    # --- names ---

    @Verb
    def cp(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> Course[list[Entry]]:
        """Give chunks another name and return the new entries; no KV is copied."""
        return (yield from self._do(src, "cp", {"to": dst, "replace": replace, "dry_run": dry_run}))

    @Verb
    def mv(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> Course[list[Entry]]:
        """As ``cp``, and take the old names away."""
        return (yield from self._do(src, "mv", {"to": dst, "replace": replace, "dry_run": dry_run}))

    @Verb
    def rm(
        self, pattern: str, *, dry_run: bool = False, force: bool = False
    ) -> Course[list[Entry]]:
        """Remove names and return them as they were."""
        if not pattern:
            raise InvalidArgument("pattern", "it is empty; '**' stands for everything")
        path = f"{CHUNKS}/{part_of_path(pattern)}"
        query = {"dry_run": dry_run, "force": force}
        return _entries((yield from self._peer.call("DELETE", path, params=query))["data"])

    # --- attributes ---

    @Verb
    def pin(self, pattern: str, *, dry_run: bool = False) -> Course[list[Entry]]:
        """Keep chunks from being removed or evicted."""
        return (yield from self._do(pattern, "pin", {"dry_run": dry_run}))

    @Verb
    def unpin(self, pattern: str, *, dry_run: bool = False) -> Course[list[Entry]]:
        """Take back ``pin``."""
        return (yield from self._do(pattern, "unpin", {"dry_run": dry_run}))

    @Verb
    def compress(
        self, ref: str, keep: str, *, to: str | None = None, dry_run: bool = False
    ) -> Course[Entry]:
        """Leave of a chunk's KV what a token policy keeps, under the name ``to``, by default its own."""
        body = {"keep": keep, "to": to, "dry_run": dry_run}
        return (yield from self._do(ref, "compress", body))[0]

    @Verb
    def place(
        self, pattern: str, tier: TierName, *, codec: str | None = None, dry_run: bool = False
    ) -> Course[list[Entry]]:
        """Move the KV of chunks to a tier and return the entries of those it moved."""
        return (
            yield from self._do(
                pattern, "place", {"tier": tier, "codec": codec, "dry_run": dry_run}
            )
        )

    @Verb
    def denoise(self, pattern: str = "**") -> Course[list[Entry]]:
        """Compute canonical KV for those of the chunks that match that have none; return all of them."""
        return (yield from self._do(pattern, "denoise", None))

    # --- how ---

    def _do(
        self, pattern: str, verb: str, body: Mapping[str, object] | None
    ) -> Course[list[Entry]]:
        path = f"{CHUNKS}/{part_of_path(pattern or '**')}:{verb}"
        return _entries((yield from self._peer.call("POST", path, body))["data"])


class RemoteFiles(FileVerbs, Blocking):
    """The verbs on a server's chunks; they return when they are done."""


class AsyncRemoteFiles(FileVerbs, Awaited):
    """The verbs on a server's chunks; they are awaited."""


def _entries(found: Iterable[Mapping[str, Any]]) -> list[Entry]:
    return [parse.entry(each) for each in found]

"""The file verbs on a server's chunks: those of `kvweave.chunk.files.Files`, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvweave.chunk.files import Entry, Usage
from kvweave.chunk.identity import Kind, TierName
from kvweave.client import parse
from kvweave.client.http import Http, part_of_path
from kvweave.errors import InvalidArgument

CHUNKS = "/v1/chunks"


class RemoteFiles:
    """The verbs on the chunks of the namespace the key belongs to; see `Files` for what they do."""

    def __init__(self, http: Http) -> None:
        self._http = http

    # --- reading ---

    def ls(
        self,
        pattern: str = "",
        *,
        sort: str = "name",
        reverse: bool = False,
        limit: int | None = None,
    ) -> list[Entry]:
        """Return the names that match, in order of an Entry's field."""
        query = {"pattern": pattern, "sort": sort, "reverse": reverse, "limit": limit}
        return self._entries(self._http.call("GET", CHUNKS, params=query))

    def stat(self, ref: str) -> Entry:
        """Return the entry of one name or ``#17``; raise ChunkNotFound."""
        return parse.entry(self.about(ref))

    def about(self, ref: str) -> dict[str, Any]:
        """Return the entry as a dict, with all names, the base's id and the digest."""
        found = self._http.get(f"{CHUNKS}/{part_of_path(ref)}")
        return {k: v for k, v in found.items() if k not in ("text", "tokens")}

    def text(self, ref: str) -> dict[str, Any]:
        """Return the ``tokens`` and the ``text`` of a chunk, None where the model has no tokenizer.

        Raises ChunkNotFound.
        """
        found = self._http.get(f"{CHUNKS}/{part_of_path(ref)}", text=True)
        return {"tokens": found["tokens"], "text": found["text"]}

    def find(
        self,
        pattern: str = "**",
        *,
        kind: Kind | None = None,
        tier: TierName | None = None,
        pinned: bool | None = None,
        min_tokens: int | None = None,
        unused_since: float | None = None,
    ) -> list[Entry]:
        """Return the names that match and whose chunk is as asked, by name."""
        query = {
            "pattern": pattern,
            "kind": kind,
            "tier": tier,
            "pinned": pinned,
            "min_tokens": min_tokens,
            "unused_since": unused_since,
        }
        return self._entries(self._http.call("GET", f"{CHUNKS}:find", params=query))

    def du(
        self,
        pattern: str = "",
        by: Literal["tier", "kind", "namespace", "dir"] = "tier",
        *,
        all_namespaces: bool = False,
    ) -> list[Usage]:
        """Return what the chunks that match take, the largest group first.

        Raises InvalidArgument for ``all_namespaces``: a key sees its own only.
        """
        if all_namespaces:
            raise InvalidArgument(
                "all_namespaces", "a server shows each key its own", "take tier, kind or dir"
            )
        found = self._http.get(f"{CHUNKS}:du", pattern=pattern, by=by)
        return [parse.usage(group) for group in found["data"]]

    # --- names ---

    def cp(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> list[Entry]:
        """Give chunks another name and return the new entries; no KV is copied."""
        return self._do(src, "cp", {"to": dst, "replace": replace, "dry_run": dry_run})

    def mv(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> list[Entry]:
        """As ``cp``, and take the old names away."""
        return self._do(src, "mv", {"to": dst, "replace": replace, "dry_run": dry_run})

    def rm(self, pattern: str, *, dry_run: bool = False, force: bool = False) -> list[Entry]:
        """Remove names and return them as they were."""
        if not pattern:
            raise InvalidArgument("pattern", "it is empty; '**' stands for everything")
        path = f"{CHUNKS}/{part_of_path(pattern)}"
        query = {"dry_run": dry_run, "force": force}
        return self._entries(self._http.call("DELETE", path, params=query))

    # --- attributes ---

    def pin(self, pattern: str, *, dry_run: bool = False) -> list[Entry]:
        """Keep chunks from being removed or evicted."""
        return self._do(pattern, "pin", {"dry_run": dry_run})

    def unpin(self, pattern: str, *, dry_run: bool = False) -> list[Entry]:
        """Take back ``pin``."""
        return self._do(pattern, "unpin", {"dry_run": dry_run})

    def place(
        self, pattern: str, tier: TierName, *, codec: str | None = None, dry_run: bool = False
    ) -> list[Entry]:
        """Move the KV of chunks to a tier and return the entries of those it moved."""
        return self._do(pattern, "place", {"tier": tier, "codec": codec, "dry_run": dry_run})

    # --- how ---

    def _do(self, pattern: str, verb: str, body: Mapping[str, object]) -> list[Entry]:
        path = f"{CHUNKS}/{part_of_path(pattern or '**')}:{verb}"
        return self._entries(self._http.call("POST", path, body))

    def _entries(self, found: Mapping[str, Any]) -> list[Entry]:
        return [parse.entry(each) for each in found["data"]]

"""A context that lives in a server: the verbs of `kvweave.weave.context.Context`, over HTTP.

Nothing is kept here but its name: what is asked for is asked of the server each time, since others
may edit it too.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Any

from kvweave.chunk.identity import Kind
from kvweave.client import parse
from kvweave.client.http import Http, part_of_path
from kvweave.client.turn import RemoteTurn
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.run.sampling import Sampling
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.check import Check
from kvweave.weave.edits import find
from kvweave.weave.parts import Mode, Part, Snapshot, TextOrTokens
from kvweave.weave.plan import Plan

CONTEXTS = "/v1/contexts"
SETTLE_SECONDS = 5.0  # a server ends an answer between two steps of the model
_PartRef = str | int | Part


class RemoteContext:
    """A context of a server; two of one name are the same context.

    A part is addressed by its name, its chunk's ``#id``, its index, or the `Part` itself.
    """

    def __init__(self, http: Http, name: str) -> None:
        self.name = name
        self._http = http
        self._path = f"{CONTEXTS}/{part_of_path(name)}"

    # ---- reading

    def describe(self) -> dict[str, Any]:
        """Return all the server tells about it, parts and plan included."""
        return dict(self._http.get(self._path))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in order."""
        return tuple(parse.part(part) for part in self.describe()["parts"])

    @property
    def n_tokens(self) -> int:
        """Tokens of all parts."""
        return int(self.describe()["n_tokens"])

    @property
    def plan(self) -> Plan:
        """What the last weave did; what the next one would do when there was none."""
        return parse.plan(self.describe()["plan"])

    def preview(self) -> Plan:
        """Say what a weave would do now, without doing it."""
        return parse.plan(self._do("preview"))

    def index(self, ref: _PartRef) -> int:
        """Return the index of a part. Raises ChunkNotFound."""
        return find(self.parts, ref)

    def oldest(self) -> Part:
        """Return the first part that may go: the one after the base. Raises ChunkNotFound."""
        told = self.describe()
        first = 1 if told["base"] is not None else 0
        if len(told["parts"]) <= first:
            raise ChunkNotFound(f"a part of {self.name} that can be dropped")
        return parse.part(told["parts"][first])

    # ---- editing

    def append(
        self, content: TextOrTokens, *, kind: Kind = "document", name: str | None = None
    ) -> Part:
        """Add text or token ids at the end; ``name`` stores it by that name."""
        return self._append(_content(content) | {"kind": kind, "name": name})

    def append_chunk(self, ref: str) -> Part:
        """Add a stored chunk at the end. Raises ChunkNotFound."""
        return self._append({"chunk": ref})

    def append_slice(self, ref: str, start: int, stop: int) -> Part:
        """Add tokens ``[start, stop)`` of a stored chunk at the end."""
        return self._append({"chunk": ref, "start": start, "stop": stop})

    def insert(
        self, index: int, content: TextOrTokens, *, kind: Kind = "document", name: str | None = None
    ) -> Part:
        """Add text or token ids before the part at ``index``."""
        return self._append(_content(content) | {"kind": kind, "name": name, "at": index})

    def insert_chunk(self, index: int, ref: str) -> Part:
        """Add a stored chunk before the part at ``index``. Raises ChunkNotFound."""
        return self._append({"chunk": ref, "at": index})

    def message(self, role: Kind, content: str) -> Part:
        """Add one chat message, wrapped by the model's chat template."""
        return parse.part(self._do("message", role=role, content=content))

    def drop(self, *refs: _PartRef, mode: Mode | None = None) -> None:
        """Remove parts: ``forget`` them, or ``evict`` only their memory; all of them or none."""
        self._do("drop", parts=self._refs(refs), mode=mode)

    def replace(self, ref: _PartRef, content: TextOrTokens, *, kind: Kind = "document") -> Part:
        """Put new text in the place of a part; what stands behind is woven anew."""
        [index] = self._refs([ref])
        return parse.part(self._do("replace", part=index, kind=kind, **_content(content)))

    def reorder(self, order: Sequence[_PartRef]) -> None:
        """Put the parts in another order; ``order`` names each of them once."""
        self._do("reorder", order=self._refs(order))

    def snapshot(self) -> Snapshot:
        """Return the parts as they are, to come back to."""
        return Snapshot(self.parts)

    def restore(self, snapshot: Snapshot) -> None:
        """Drop what was added behind the parts of a snapshot.

        Raises InvalidArgument when parts of the snapshot are gone or moved.
        """
        self._settle()
        now, n = self.parts, len(snapshot.parts)
        if [p.uid for p in now[:n]] != [p.uid for p in snapshot.parts]:
            raise InvalidArgument("snapshot", "not all of its parts are in the context any more")
        if now[n:]:
            self.drop(*now[n:], mode="forget")

    def fork(self, name: str) -> RemoteContext:
        """Return a new context with the same parts and rows."""
        self._do("fork", to=name)
        return RemoteContext(self._http, name)

    def close(self) -> None:
        """Free the rows and let go of the chunks. Names stay; unnamed chunks go."""
        self._settle()
        self._http.call("DELETE", self._path)

    # ---- weaving and answering

    def weave(
        self,
        repair: str | None = None,
        share: float | None = None,
        max_drift: float | None = None,
    ) -> Plan:
        """Bring all rows up to date and return the plan."""
        return parse.plan(self._do("weave", repair=repair, share=share, max_drift=max_drift))

    def begin(
        self, sampling: Sampling, max_drift: float | None = None, *, chat: bool = False
    ) -> RemoteTurn:
        """Return an answer that begins when it is read."""
        return self._begin(sampling, max_drift, "ask" if chat else "generate", None)

    def generate(self, max_tokens: int = 256, **options: object) -> Answer:
        """Continue the context; the new text becomes its last part. Options: see Sampling, begin."""
        return self.begin(*request_from(max_tokens, options)).run()

    def stream(self, max_tokens: int = 256, **options: object) -> Generator[str]:
        """Yield pieces of the continuation as they come; closing the iterator cancels."""
        return self.begin(*request_from(max_tokens, options)).stream()

    def ask(self, content: str, max_tokens: int = 256, **options: object) -> Answer:
        """Add a user message and return the model's answer; both become chunks."""
        sampling, max_drift = request_from(max_tokens, options)
        return self._begin(sampling, max_drift, "ask", content).run()

    def check(self) -> Check:
        """Weave, then measure the distance to a full prefill (costs that full prefill)."""
        return parse.check(self._do("check"))

    # ---- inside

    def _settle(self) -> None:
        """Wait until the server has ended an answer that was hung up on, so that edits can follow."""
        if self._path not in self._http.left:
            return
        self._http.left.discard(self._path)
        until = time.monotonic() + SETTLE_SECONDS
        while self.describe()["busy"] and time.monotonic() < until:
            time.sleep(0.02)

    def _do(self, verb: str, **body: object) -> Any:
        self._settle()
        return self._http.call("POST", f"{self._path}:{verb}", body)

    def _append(self, body: dict[str, object]) -> Part:
        return parse.part(self._do("append", **body))

    def _begin(
        self, sampling: Sampling, max_drift: float | None, verb: str, content: str | None
    ) -> RemoteTurn:
        body = asdict(sampling) | {"max_drift": max_drift, "content": content}
        self._settle()
        return RemoteTurn(self._http, self._path, verb, body)

    def _refs(self, refs: Sequence[_PartRef]) -> list[str | int]:
        """Return what the server understands: a `Part` becomes its index now."""
        if not any(isinstance(ref, Part) for ref in refs):
            return [ref for ref in refs if not isinstance(ref, Part)]
        parts = self.parts
        return [find(parts, ref) if isinstance(ref, Part) else ref for ref in refs]


def _content(content: TextOrTokens) -> dict[str, object]:
    return {"text": content} if isinstance(content, str) else {"tokens": [*map(int, content)]}

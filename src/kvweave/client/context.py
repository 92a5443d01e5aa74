"""A context that lives in a server: the verbs of `kvweave.weave.context.Context`, over HTTP.

Nothing is kept here but its name: what is asked for is asked of the server each time, since others
may edit it too.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic, TypeVar, cast

from kvweave.client import parse
from kvweave.client.block import OneEdit, if_match, require_closed
from kvweave.client.course import Course
from kvweave.client.edits import AnyPart, AsyncEditBlock, EditBlock, EditVerbs
from kvweave.client.faces import Awaited, Blocking, Streamed, Told, Verb
from kvweave.client.peer import part_of_path
from kvweave.client.settle import settle
from kvweave.client.turn import AsyncRemoteTurn, RemoteTurn, TurnVerbs
from kvweave.client.wires import Wire
from kvweave.errors import ChunkNotFound, ContextChanged, InvalidArgument
from kvweave.run.sampling import Sampling
from kvweave.verbs import checked
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.check import Check
from kvweave.weave.edits import find
from kvweave.weave.history import Diff, Edit, Why
from kvweave.weave.parts import Part, Snapshot
from kvweave.weave.plan import Plan

CONTEXTS = "/v1/contexts"
RACES = 10  # how often a verb begins anew because somebody else edited meanwhile
_TurnT = TypeVar("_TurnT", bound=TurnVerbs)
_ContextT = TypeVar("_ContextT")
T = TypeVar("T")
_Json = dict[str, Any]


@checked
class ContextVerbs(Generic[_TurnT, _ContextT]):
    """A context of a server; two of one name are the same context.

    A part is addressed by its name, its chunk's ``#id``, its index, or the `Part` itself.
    """

    _turn: type[_TurnT]

    def __init__(self, wire: Wire, name: str) -> None:
        self.name = name
        self._wire: Any = wire
        self._peer = wire.peer
        self._path = f"{CONTEXTS}/{part_of_path(name)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # ---- reading

    @Verb
    def describe(self) -> Course[_Json]:
        """Return all the server tells about it, parts and plan included."""
        return parse.told((yield from self._peer.get(self._path)), "name", "parts", "plan")

    @Told
    def namespace(self) -> Course[str]:
        """The namespace of its name and of all its chunks."""
        return str((yield from self._told())["namespace"])

    @Told
    def version(self) -> Course[int]:
        """How often it was edited; see `edit`."""
        return int((yield from self._told())["version"])

    @Told
    def parts(self) -> Course[tuple[Part, ...]]:
        """The parts in order."""
        return (yield from self._parts())

    @Told
    def n_tokens(self) -> Course[int]:
        """Tokens of all parts."""
        return int((yield from self._told())["n_tokens"])

    @Told
    def plan(self) -> Course[Plan]:
        """What the last weave did; what the next one would do when there was none."""
        return parse.plan((yield from self._told())["plan"])

    @Verb
    def preview(self) -> Course[Plan]:
        """Say what a weave would do now, without doing it."""
        return parse.plan((yield from self._do("preview")))

    @Verb
    def tokens(self) -> Course[list[int]]:
        """Return the token ids of the whole context, as one of its versions has them."""
        whole: dict[int, list[int]] = {}
        parts = yield from self._parts()
        while missing := [part.id for part in parts if part.id not in whole]:
            path = f"/v1/chunks/{part_of_path(f'#{missing[0]}')}"
            try:
                whole[missing[0]] = (yield from self._peer.get(path, text=True))["tokens"]
            except ChunkNotFound:  # somebody else dropped it, or it cannot be seen
                before, parts = parts, (yield from self._parts())
                if parts == before:
                    raise
        return [token for part in parts for token in whole[part.id][part.start : part.stop]]

    @Verb
    def index(self, ref: AnyPart) -> Course[int]:
        """Return the index of a part. Raises ChunkNotFound."""
        return find((yield from self._parts()), ref)

    @Verb
    def oldest(self) -> Course[Part]:
        """Return the first part that may go: the one after the base. Raises ChunkNotFound."""
        told = yield from self._told()
        first = 1 if told["base"] is not None else 0
        if len(told["parts"]) <= first:
            raise ChunkNotFound(f"a part of {self.name} that can be dropped")
        return parse.part(told["parts"][first])

    # ---- what happened

    @Verb
    def log(self, limit: int | None = None) -> Course[list[Edit]]:
        """Return its edits, the newest first: what each did to which parts."""
        return [parse.edit(each) for each in (yield from self._ask("log", limit=limit))["data"]]

    @Verb
    def diff(self, since: int, to: int | None = None) -> Course[Diff]:
        """Return the parts added, removed and moved between two versions, by default up to now."""
        return parse.diff((yield from self._ask("diff", **{"from": since, "to": to})))

    @Verb
    def why(self) -> Course[Why]:
        """Tell what the last weave reused, or the next would, and which edit was the cause."""
        return parse.why((yield from self._ask("why")))

    @Verb
    def ledger(self) -> Course[dict[str, Any]]:
        """Tell what each answer cost in nats, with the edits before it, the newest first."""
        return parse.told((yield from self._ask("ledger")), "data")

    @Verb
    def revert(self, version: int) -> Course[None]:
        """Bring back the parts of a version; that is a new version."""
        yield from self._do("revert", to=version)

    # ---- whole contexts

    @Verb
    def snapshot(self) -> Course[Snapshot]:
        """Return the parts as they are, to come back to, and the version that has them."""
        yield from settle(self._peer, self._path)
        told = yield from self._told()
        return Snapshot(_parts_of(told), version=int(told["version"]))

    @Verb
    def restore(self, snapshot: Snapshot, version: int | None = None) -> Course[None]:
        """Drop all that was added behind the parts of a snapshot, whoever added it.

        With ``version`` it is refused (ContextChanged) if the context is another by now: so nothing goes
        that others added. Raises InvalidArgument when parts of the snapshot are gone or moved.
        """
        yield from settle(self._peer, self._path)
        n = len(snapshot.parts)
        for left in range(RACES, -1, -1):
            told = yield from self._told()
            now, is_at = _parts_of(told), int(told["version"])
            if version is not None and version != is_at:
                raise ContextChanged(self.name, version, is_at)
            if [p.uid for p in now[:n]] != [p.uid for p in snapshot.parts]:
                raise InvalidArgument(
                    "snapshot",
                    "not all of its parts are in the context any more",
                    "take a snapshot now; what was dropped is put in again by its name",
                )
            try:
                if now[n:]:
                    gone = EditVerbs.drop.edit(self, *now[n:], mode="forget")
                    yield from self._send(gone, is_at)
                return
            except ContextChanged:  # somebody edited it just now
                if version is not None or not left:
                    raise

    @Verb
    def fork(self, name: str) -> Course[_ContextT]:
        """Return a new context with the same parts and rows."""
        yield from self._do("fork", to=name)
        return cast(_ContextT, type(self)(self._wire, name))

    @Verb
    def rename(self, name: str) -> Course[None]:
        """Give it another name, which this object has from then on. Raises NameTaken, InvalidName."""
        yield from self._do("rename", to=name)
        self.name, self._path = name, f"{CONTEXTS}/{part_of_path(name)}"

    @Verb
    def close(self) -> Course[None]:
        """Free the rows and let go of the chunks. Names stay; unnamed chunks go."""
        yield from settle(self._peer, self._path)
        parse.told((yield from self._peer.call("DELETE", self._path)), "name")

    # ---- weaving and answering

    @Verb
    def weave(
        self,
        repair: str | None = None,
        share: float | None = None,
        max_drift: float | None = None,
    ) -> Course[Plan]:
        """Bring all rows up to date and return the plan."""
        found = yield from self._do("weave", repair=repair, share=share, max_drift=max_drift)
        return parse.plan(found)

    @Verb
    def refine(self, n_rows: int | None = None) -> Course[int]:
        """Recompute rows that are not exact while nobody else asks for anything, at most ``n_rows``;
        return how many were."""
        found = yield from self._do("refine", n_rows=n_rows)
        return int(found["refined"])

    def begin(
        self,
        sampling: Sampling,
        max_drift: float | None = None,
        *,
        chat: bool = False,
        content: str | None = None,
    ) -> _TurnT:
        """Return an answer that begins when it is read; of a ``chat``, to a user message of this content."""
        return self._begin(sampling, max_drift, "ask" if chat else "generate", content)

    @Verb
    def generate(self, /, max_tokens: int = 256, **options: object) -> Course[Answer]:
        """Continue the context; the new text becomes its last part. Options: see Sampling, begin."""
        turn = self.begin(*request_from(max_tokens, options))
        return (yield from turn.course())

    @Streamed
    def stream(self, /, max_tokens: int = 256, **options: object) -> _TurnT:
        """Yield pieces of the continuation as they come; closing the iterator cancels."""
        return self.begin(*request_from(max_tokens, options))

    @Verb
    def ask(self, /, content: str, max_tokens: int = 256, **options: object) -> Course[Answer]:
        """Add a user message and return the model's answer; both become chunks."""
        sampling, max_drift = request_from(max_tokens, options)
        turn = self._begin(sampling, max_drift, "ask", content)
        return (yield from turn.course())

    @Verb
    def check(self) -> Course[Check]:
        """Weave, then measure the distance to a full prefill (costs that full prefill)."""
        return parse.check((yield from self._do("check")))

    # ---- inside

    def _told(self) -> Course[_Json]:
        return (yield from ContextVerbs.describe.course(self))

    def _parts(self) -> Course[tuple[Part, ...]]:
        return _parts_of((yield from self._told()))

    def _ask(self, verb: str, **params: object) -> Course[Any]:
        return (yield from self._peer.get(f"{self._path}:{verb}", **params))

    def _do(self, verb: str, **body: object) -> Course[Any]:
        return (yield from self._post(verb, body))

    def _post(self, verb: str, body: _Json, version: int | None = None) -> Course[Any]:
        require_closed(self._path)
        yield from settle(self._peer, self._path)
        path = f"{self._path}:{verb}"
        return (yield from self._peer.call("POST", path, body, headers=if_match(version)))

    def _send(self, edit: OneEdit[T], version: int | None = None) -> Course[T]:
        return edit.read((yield from self._post(edit.verb, edit.body, version)))

    def _begin(
        self, sampling: Sampling, max_drift: float | None, verb: str, content: str | None
    ) -> _TurnT:
        body = sent(sampling) | {"max_drift": max_drift, "content": content, "stream": True}
        return self._turn(self._wire, self._path, verb, body)


def _parts_of(told: _Json) -> tuple[Part, ...]:
    return tuple(parse.part(part) for part in told["parts"])


def sent(sampling: Sampling) -> dict[str, object]:
    """Return what differs from how a server chooses by itself. Raises InvalidArgument for a
    grammar, which is an object of this process."""
    if sampling.constraint is not None:
        hint = "a server takes response_format on /v1/chat/completions"
        raise InvalidArgument("constraint", "it cannot be sent to a server", hint)
    usual = Sampling()
    every = ((each.name, getattr(sampling, each.name)) for each in fields(Sampling))
    return {name: value for name, value in every if value != getattr(usual, name)}


@checked
class RemoteContext(ContextVerbs[RemoteTurn, "RemoteContext"], EditVerbs, Blocking):
    """A context of a server; its verbs return when they are done."""

    _turn = RemoteTurn

    def edit(self, version: int | None = None) -> EditBlock:
        """Collect edits in a ``with`` block and send them as one: all of them happen, or none.

        They are made through what the block gives: ``with context.edit() as edit: edit.append(...)``.
        With ``version`` they are refused (ContextChanged) if the context is another by now.
        """
        return EditBlock(self._wire, self._path, version)


@checked
class AsyncRemoteContext(ContextVerbs[AsyncRemoteTurn, "AsyncRemoteContext"], EditVerbs, Awaited):
    """A context of a server; its verbs are awaited, and so is what a `RemoteContext` has as a
    property: ``await context.parts``."""

    _turn = AsyncRemoteTurn

    def edit(self, version: int | None = None) -> AsyncEditBlock:
        """As `RemoteContext.edit`, in ``async with``; edits in the block are not awaited."""
        return AsyncEditBlock(self._wire, self._path, version)

"""The parts of one context and all their versions: every edit happens wholly or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Self

from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, ContextBusy, ContextTooLong, InvalidArgument
from kvweave.interrupts import HELD
from kvweave.verbs import checked
from kvweave.weave.costs import Costs
from kvweave.weave.edits import adopted, find, inserted
from kvweave.weave.history import ContextHistory, FreedChunk
from kvweave.weave.naming import Names
from kvweave.weave.parts import Part, Snapshot, end
from kvweave.weave.session import Session
from kvweave.weave.sources import tokens_of


@checked
class EditedParts:
    """What is true of a context's parts whatever the edit; `Context` has the edits."""

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.settings = session.settings
        self.session, self._key = session, session.key
        self._maker, self._table = session.maker, session.weaver.table
        self._parts: tuple[Part, ...] = ()
        self._base: ChunkId | None = None
        self._next_uid = 0
        self._owner = object()
        self.names = Names(name, lambda n: self._table.lookup(n, self.namespace) is None)
        self.history, self.costs = ContextHistory(session.loop.gate), Costs()
        self._depth = 0  # of edits in edits
        self._verbs: list[str] = []  # of the edits in the outermost
        self._met: list[ChunkId] = []  # by it: those that it leaves to nobody are let go of
        self.closed, self.gate = False, session.loop.gate
        self._table.if_undone(self._never)

    @property
    def namespace(self) -> str:
        """The namespace of its name and of all its chunks."""
        return self.settings.namespace

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in order."""
        return self._parts

    @property
    def n_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(p.n for p in self._parts)

    def tokens(self) -> list[int]:
        """Return the token ids of the whole context."""
        return [int(t) for p in self._parts for t in tokens_of(self._table, p)]

    def index(self, ref: str | int | Part) -> int:
        """Return the index of a part. Raises ChunkNotFound."""
        return find(self._parts, ref)

    def oldest(self) -> Part:
        """Return the first part that may go: the one after the base. Raises ChunkNotFound."""
        first = 1 if self._base is not None else 0
        if len(self._parts) <= first:
            raise ChunkNotFound(f"a part of {self.name} that can be dropped")
        return self._parts[first]

    # ---- versions

    @contextmanager
    def edit(self, verb: str = "edit") -> Iterator[Self]:
        """Batch edits: all of them happen, or none when an error leaves the block.

        They are one version of the context; ``verb`` is what its log calls it. Other threads wait.
        What else happens to this engine within the block is taken back with it: edits and answers of
        other contexts, chunks that were stored, contexts that were opened. What was closed stays so.
        """
        mine = HELD.depth == 0
        self.gate.first()
        lock, outside = self.gate.lock, HELD.outside() if mine else nullcontext()
        try:
            with lock, HELD, self._editing(verb), outside:
                yield self
        finally:
            self.gate.catch_up()

    @contextmanager
    def _editing(self, verb: str) -> Iterator[None]:
        self.gate.require("edit", self.closed)
        self._idle("edit")
        if not self._depth:
            self.session.pause()  # rows of other parts are no use
            self._verbs, self._met = [], []
        before, base, counts = self._parts, self._base, self.names.counts()
        n_verbs, n_met, version = len(self._verbs), len(self._met), self.history.version

        def put_back() -> None:
            # uids go on: a weave in the block may have kept KV by them
            self._parts, self._base = before, base
            self.names.reset(counts)
            del self._verbs[n_verbs:], self._met[n_met:]

        # with an edit of another context around it; before what is noted in this one, which is undone first
        self._table.if_undone(put_back)
        self._verbs += [verb] if self._depth == 1 else []
        self._depth += 1
        try:
            with self._table.transaction():
                yield
                if self._depth == 1:
                    self._settled(before)
        except BaseException:  # who catches that of an edit within an edit goes on from before it
            put_back()
            raise
        finally:
            self._depth -= 1
        if self._depth:
            return
        verbs = self._verbs if verb == "edit" else [verb]
        self.history.record(", ".join(dict.fromkeys(verbs)) or verb, self._parts, self._base)
        self._table.if_undone(partial(self._stands_again, before, base, version))

    def _stands_again(self, parts: tuple[Part, ...], base: ChunkId | None, version: int) -> None:
        self.history.record("put back", parts, base)
        self.history.back_to(version)

    def _never(self) -> None:
        """Close what was opened within an edit that failed: it holds nothing."""
        if not self.closed:
            self.session.close()
        self._parts, self._base, self.closed = (), None, True

    def _let_go(self) -> None:
        self._sync_holds(self._parts, ())
        self._parts, self._base = (), None

    def snapshot(self) -> Snapshot:
        """Return the parts as they are, to come back to."""
        digests = tuple(self._table.get(part.id).digest for part in self._parts)
        return Snapshot(self._parts, self._base, self.namespace, self._owner, digests)

    def restore(self, snapshot: Snapshot) -> None:
        """Bring back the parts of a snapshot; those of another context as if they were appended here.
        Raises ChunkNotFound if one was removed since, or is of another namespace or engine."""
        if len(snapshot.digests) != len(snapshot.parts):
            reason = "it does not say what its chunks are, as one of a server's context"
            raise InvalidArgument("snapshot", reason, "take one of a context here")
        with self.edit("restore"):
            for part, digest in zip(snapshot.parts, snapshot.digests, strict=True):
                same = self._table.get(part.id).digest == digest  # an id says nothing elsewhere
                if not same or snapshot.namespace != self.namespace:
                    raise ChunkNotFound(part.name)
            self._parts, self._base = snapshot.parts, snapshot.base
            if snapshot.owner is not self._owner:
                gaps, uid = self.settings.positions == "keep", self._next_uid
                self._parts = adopted(snapshot.parts, uid, gaps=gaps)
                self._next_uid += len(self._parts)

    @contextmanager
    def _retracting(self, stays: Callable[[], bool] = bool) -> Iterator[list[Part]]:
        """Yield a list for messages that the block adds: where it fails, unless they ``stay``, they
        were never there, nor were their names."""
        before, counts, version = self.snapshot(), self.names.counts(), self.history.version
        said: list[Part] = []
        try:
            yield said
        except BaseException:
            if stays():
                raise
            with self._table.transaction():
                if said:
                    self.restore(before)
                for part in said:
                    self._table.unbind(part.name, self.namespace)
            self.names.reset(counts)
            self.history.back_to(version)
            raise

    def revert(self, version: int) -> None:
        """Bring back the parts of a version (see ``history.log()``), as a new one.

        What was freed since is made again from its tokens, and computed again when it is woven.
        Raises InvalidArgument, ChunkNotFound for a chunk that was removed by its name.
        """
        past = self.history.at(version)
        with self.edit(f"revert to {version}"):
            made = {p.id: self._again(p.id, p.name) for p in past.parts}
            amended = [
                None if p.amends is None else made.get(p.amends, p.amends) for p in past.parts
            ]
            self._met += made.values()
            self._parts = tuple(
                p
                if (made[p.id], amends) == (p.id, p.amends)
                else replace(p, id=made[p.id], uid=self._new_uid(), frozen=False, amends=amends)
                for p, amends in zip(past.parts, amended, strict=True)
            )
            self._base = None if past.base is None else made[past.base]

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, parts and the index disagree."""
        self.session.state.rows.check_integrity()
        front = self._parts[0].id if self._parts else None
        assert self._base in (None, front), "the base is not in front"
        for part in self._parts:
            n = self._table.get(part.id).n_tokens
            assert 0 <= part.start < part.stop <= n, f"{part.name} has another length"
            assert self._key in self._table.contexts_of(part.id), f"{part.name} is not held"

    # ---- inside

    def _settled(self, before: Sequence[Part]) -> None:
        """Require of edits that end now that a model can read what they made of ``before``; hold it."""
        n, limit = end(self._parts), self._maker.backend.limit
        if n > limit:
            raise ContextTooLong(n, limit)
        for id in {*self._met} - {part.id for part in self._parts}:
            self._table.hold(id, self._key)
            self._table.release(id, self._key)
        self._sync_holds(before, self._parts)

    def _insert(self, index: int, new: Part) -> Part:
        if not 0 <= index <= len(self._parts):
            raise InvalidArgument("index", f"{index} is not in 0..{len(self._parts)}")
        if index == 0 and self._base is not None:
            reason = "the base stays in front"
            raise InvalidArgument("index", reason, "use replace, or insert behind it")
        if index < len(self._parts):
            self._no_gaps("insert")
        self._met.append(new.id)
        part = replace(new, uid=self._new_uid(), virtual=self._table.is_virtual(new.id))
        self._parts = inserted(self._parts, index, part)
        return part

    def _new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    def _again(self, id: ChunkId, name: str) -> ChunkId:
        """Return the chunk of a part of an earlier version; one that is gone is made again, and its base."""
        try:
            return self._table.get(id).id
        except ChunkNotFound:
            gone = self.history.gone(id)
            if gone is None:
                raise ChunkNotFound(name) from None
        tokens, base, space = [int(t) for t in gone.tokens], gone.base, self.namespace
        try:
            base = None if base is None else self._again(base, name)
        except ChunkNotFound:  # forgotten meanwhile
            base = self._base
        return self._maker.add(tokens, kind=gone.kind, base=base, namespace=space, name=name)

    def _idle(self, verb: str) -> None:
        if self.closed:
            raise InvalidArgument(verb, f"{self.name} is closed", "open another context")
        if self.session.busy:
            raise ContextBusy(self.name)

    def _no_gaps(self, verb: str) -> None:
        if self.settings.positions == "keep":
            raise InvalidArgument(verb, 'positions="keep" cannot make room', 'use "compact"')

    def _sync_holds(self, before: Sequence[Part], after: Sequence[Part]) -> None:
        old, new = Counter(p.id for p in before), Counter(p.id for p in after)
        for id in (new - old).elements():
            self._table.hold(id, self._key)
        for id in (old - new).elements():
            with suppress(ChunkNotFound):  # others removed it while this engine was taken for dead
                self._keep_past(id)
            self._table.release(id, self._key)

    def _keep_past(self, id: ChunkId) -> None:
        """Remember a chunk that may go with this context's hold, to come back to."""
        record = self._table.get(id)
        if not self.closed and not record.names and not self._table.is_virtual(id):
            self.history.keep(id, FreedChunk(record.kind, self._table.tokens(id), record.base))

"""A context: an ordered list of chunks with positions, edited in place, woven when it is read.

Here are the parts and their edits, without a tensor; their rows are a `Session`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.errors import ChunkNotFound, ContextBusy, ContextTooLong, InvalidArgument
from kvweave.run.sampling import Sampling
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.check import Check
from kvweave.weave.edits import adopted, dropped, find, inserted, part_of, renamed, reordered
from kvweave.weave.naming import Names, holder
from kvweave.weave.parts import Mode, Part, Snapshot, TextOrTokens, end
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Strategy
from kvweave.weave.session import Session, Turn
from kvweave.weave.sources import tokens_of


class Context:
    """Named parts in order; every edit happens wholly or not at all.

    A part is addressed by its name, its chunk's ``#id``, its index, or the `Part` itself.
    """

    def __init__(self, name: str, session: Session) -> None:
        self.name = name
        self.settings = session.settings
        self.session, self._key = session, session.key
        self._maker, self._table = session.maker, session.weaver.table
        self._parts: tuple[Part, ...] = ()
        self._base: ChunkId | None = None
        self._next_uid = 0
        self._owner = object()
        self._names = Names(name, lambda n: self._table.lookup(n, self.namespace) is None)
        self._editing = False
        self._closed = False

    # ---- reading

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

    @property
    def plan(self) -> Plan:
        """What the last weave did; what the next one would do when there was none."""
        return self.session.plan if self.session.plan is not None else self.preview()

    def preview(self) -> Plan:
        """Say what a weave would do now, without doing it."""
        return self.session.preview(self._parts)

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

    # ---- editing

    @contextmanager
    def edit(self) -> Iterator[Context]:
        """Batch edits: all of them happen, or none when an error leaves the block."""
        self._idle("edit")
        if self._editing:
            yield self
            return
        before, base, counts = self._parts, self._base, self._names.counts()
        self._editing = True
        try:
            with self._table.transaction():
                yield self
                n, limit = end(self._parts), self._maker.backend.limit
                if n > limit:
                    raise ContextTooLong(n, limit)
                self._sync_holds(before, self._parts)
        except BaseException:
            # uids go on: a weave in the block may have kept KV by them
            self._parts, self._base = before, base
            self._names.reset(counts)
            raise
        finally:
            self._editing = False

    def append(
        self,
        content: TextOrTokens,
        *,
        kind: Kind = "document",
        name: str | None = None,
        label: str | None = None,
    ) -> Part:
        """Add text or token ids at the end; ``name`` stores it by that name, ``label`` only shows."""
        return self.insert(len(self._parts), content, kind=kind, name=name, label=label)

    def append_chunk(self, ref: str) -> Part:
        """Add a stored chunk at the end. Raises ChunkNotFound."""
        return self.insert_chunk(len(self._parts), ref)

    def append_slice(self, ref: str, start: int, stop: int) -> Part:
        """Add tokens ``[start, stop)`` of a stored chunk at the end. Raises as `insert_slice`."""
        return self.insert_slice(len(self._parts), ref, start, stop)

    def insert(
        self,
        index: int,
        content: TextOrTokens,
        *,
        kind: Kind = "document",
        name: str | None = None,
        label: str | None = None,
    ) -> Part:
        """Add text or token ids before the part at ``index``."""
        with self.edit():
            shown = name or label or f"text-{self._next_uid}"
            tokens = self._maker.tokens(content)
            id = self._maker.add(
                tokens, kind=kind, base=self._base, namespace=self.namespace, name=shown
            )
            if name is not None:
                self._table.bind(name, id, namespace=self.namespace)
            return self._insert(index, Part(-1, id, len(tokens), shown, literal=True))

    def insert_chunk(self, index: int, ref: str) -> Part:
        """Add a stored chunk before the part at ``index``. Raises ChunkNotFound."""
        with self.edit():
            record = self._table.resolve(ref, self.namespace)
            return self._insert(index, part_of(record, ref))

    def insert_slice(self, index: int, ref: str, start: int, stop: int) -> Part:
        """Add tokens ``[start, stop)`` of a stored chunk before the part at ``index``.

        Its KV is the chunk's, which saw the chunk's tokens before ``start`` too: exact only behind
        these. Raises ChunkNotFound, or InvalidArgument for a range not inside the chunk.
        """
        with self.edit():
            record = self._table.resolve(ref, self.namespace)
            return self._insert(index, part_of(record, ref, start, stop))

    def message(self, role: Kind, content: str) -> Part:
        """Add one chat message, wrapped by the model's chat template and named
        ``CONTEXT/u-007`` by role and number."""
        with self.edit():
            tokens = self._maker.message(role, content)
            part = self.append(tokens, kind=role, name=self._names.next(role))
            if role == "system" and len(self._parts) == 1:
                self._base = part.id
            return part

    def answer_part(self, kind: Kind, tokens: Sequence[int]) -> Part:
        """Add tokens the model wrote as the next ``CONTEXT/a-007``."""
        with self.edit():
            return self.append(tokens, kind=kind, name=self._names.next(kind))

    def set_base(self, id: ChunkId, name: str) -> None:
        """Begin an empty context with the base other chunks were computed after."""
        with self.edit():
            if self._parts:
                raise InvalidArgument("base", "the context already has parts")
            record = self._table.get(id)
            if record.namespace not in ("", self.namespace):  # an engine's base carries all of them
                raise ChunkNotFound(f"#{id}")
            self._insert(0, part_of(record, name))
            self._base = id

    def drop(self, *refs: str | int | Part, mode: Mode | None = None) -> None:
        """Remove parts.

        ``forget``: what is left behaves as if they had never been there. ``evict``: only their
        memory is freed; what stands behind keeps what it saw, which needs a context made with
        ``prune="evict"``. Raises ChunkNotFound, InvalidArgument.
        """
        mode = mode or self.settings.prune
        if mode not in ("forget", "evict"):
            raise InvalidArgument("mode", f"{mode!r} is neither 'forget' nor 'evict'")
        if mode == "evict" and self.settings.prune != "evict":
            reason = "this context does not keep what its parts saw"
            raise InvalidArgument("mode", reason, 'use prune="evict"')
        with self.edit():
            gone = {self.index(r) for r in refs}
            if self._base is not None and 0 in gone and len(self._parts) > len(gone):
                raise InvalidArgument("drop", "the base carries all other parts", "use replace")
            gaps = self.settings.positions == "keep"
            self._maker.shelf.pruned(int(self._parts[i].id) for i in gone)
            self._parts = dropped(self._parts, gone, frozen=mode == "evict", gaps=gaps)
            self._base = self._base if self._parts else None

    def replace(
        self, ref: str | int | Part, content: TextOrTokens, *, kind: Kind = "document"
    ) -> Part:
        """Put new text in the place of a part; what stands behind is woven anew."""
        with self.edit():
            index = self.index(ref)
            old = self._parts[index]
            self._no_gaps("replace")
            is_base = self._base is not None and index == 0
            self._parts = self._parts[:index] + self._parts[index + 1 :]
            if is_base:
                self._base = None
            new = renamed(self.insert(index, content, kind=kind), old)
            self._parts = (*self._parts[:index], new, *self._parts[index + 1 :])
            if is_base:
                self._base = new.id
            return new

    def reorder(self, order: Sequence[str | int | Part]) -> None:
        """Put the parts in another order; ``order`` names each of them once."""
        with self.edit():
            self._no_gaps("reorder")
            indices = [self.index(r) for r in order]
            self._parts = reordered(self._parts, indices)
            if self._base is not None and indices[0] != 0:
                raise InvalidArgument("order", "the base stays in front")

    def snapshot(self) -> Snapshot:
        """Return the parts as they are, to come back to."""
        digests = tuple(self._table.get(part.id).digest for part in self._parts)
        return Snapshot(self._parts, self._base, self.namespace, self._owner, digests)

    def restore(self, snapshot: Snapshot) -> None:
        """Bring back the parts of a snapshot; those of another context as if they were appended here.
        Raises ChunkNotFound if one was removed since, or is of another namespace or engine."""
        with self.edit():
            for part, digest in zip(snapshot.parts, snapshot.digests, strict=True):
                same = self._table.get(part.id).digest == digest  # an id says nothing elsewhere
                if not same or snapshot.namespace != self.namespace:
                    raise ChunkNotFound(part.name)
            self._parts, self._base = snapshot.parts, snapshot.base
            if snapshot.owner is not self._owner:
                gaps, uid = self.settings.positions == "keep", self._next_uid
                self._parts = adopted(snapshot.parts, uid, gaps=gaps)
                self._next_uid += len(self._parts)

    def fork(self, name: str) -> Context:
        """Return a new context with the same parts and rows; the two do not affect each other.
        Raises OverBudget."""
        self._idle("fork")
        twin = Context(name, self.session.fork(holder(name, self.namespace)))
        twin._parts, twin._base, twin._next_uid = self._parts, self._base, self._next_uid
        twin._names.reset(self._names.counts())
        twin._sync_holds((), twin._parts)
        return twin

    def close(self) -> None:
        """Free the rows and let go of the chunks; an answer under way is abandoned. Names stay;
        unnamed chunks go."""
        if self._closed:
            return
        self.session.close()
        self._closed = True
        self._sync_holds(self._parts, ())
        self._parts = ()

    # ---- weaving and answering

    def weave(
        self,
        repair: str | Strategy | None = None,
        share: float | None = None,
        max_drift: float | None = None,
    ) -> Plan:
        """Bring all rows up to date and return the plan.

        With ``repair``, parts that are not exact are woven again by that strategy. ``max_drift``:
        see `begin`. What is refused leaves everything as it was.
        """
        self._readable()
        return self.session.weave(self._parts, repair, share, max_drift)

    def begin(
        self, sampling: Sampling, max_drift: float | None = None, *, chat: bool = False
    ) -> Turn:
        """Queue an answer; the loop computes it while any context is driven.

        Over ``max_drift`` (nats; default: the context's) `auto` repairs more. Raises
        InvalidArgument for a bound that cannot be kept.
        """
        self._readable()
        return self.session.begin(self, sampling, max_drift, chat)

    def generate(self, max_tokens: int = 256, **options: object) -> Answer:
        """Continue the context; the new text becomes its last part. Options: see Sampling, begin."""
        return self.begin(*request_from(max_tokens, options)).run()

    def stream(self, max_tokens: int = 256, **options: object) -> Generator[str]:
        """Yield pieces of the continuation as they come; closing the iterator cancels."""
        return self.begin(*request_from(max_tokens, options)).stream()

    def ask(self, content: str, max_tokens: int = 256, **options: object) -> Answer:
        """Add a user message and return the model's answer; both become chunks."""
        request = request_from(max_tokens, options)
        before, counts, asked, turn = self.snapshot(), self._names.counts(), None, None
        try:
            asked = self.message("user", content)
            turn = self.begin(*request, chat=True)
            return turn.run()
        except BaseException:
            if turn is not None and turn.complete:
                raise
            with self._table.transaction():
                if asked is not None:
                    self.restore(before)
                    self._table.unbind(asked.name, self.namespace)
            self._names.reset(counts)
            raise

    def check(self) -> Check:
        """Weave, then measure the distance to a full prefill (costs that full prefill).

        Compared are the predictions of the last answer's tokens over the rows that it saw, or, when
        the context was edited since, of the next token over the rows as they are woven now.
        """
        self._readable()
        return self.session.check(self._parts)

    def check_integrity(self) -> None:
        """Raise AssertionError when rows, parts and the index disagree."""
        self.session.state.rows.check_integrity()
        for part in self._parts:
            n = self._table.get(part.id).n_tokens
            assert 0 <= part.start < part.stop <= n, f"{part.name} has another length"
            assert self._key in self._table.contexts_of(part.id), f"{part.name} is not held"

    # ---- inside

    def _insert(self, index: int, new: Part) -> Part:
        if not 0 <= index <= len(self._parts):
            raise InvalidArgument("index", f"{index} is not in 0..{len(self._parts)}")
        if index < len(self._parts):
            self._no_gaps("insert")
        part = replace(new, uid=self._next_uid, virtual=self._table.is_virtual(new.id))
        self._next_uid += 1
        self._parts = inserted(self._parts, index, part)
        return part

    def _idle(self, verb: str) -> None:
        if self._closed:
            raise InvalidArgument(verb, f"{self.name} is closed", "open another context")
        if self.session.turn is not None:
            raise ContextBusy(self.name)

    def _readable(self) -> None:
        self._idle("weave")
        if not self._parts:
            raise InvalidArgument("context", "it is empty", "append something first")

    def _no_gaps(self, verb: str) -> None:
        if self.settings.positions == "keep":
            raise InvalidArgument(verb, 'positions="keep" cannot make room', 'use "compact"')

    def _sync_holds(self, before: Sequence[Part], after: Sequence[Part]) -> None:
        old, new = Counter(p.id for p in before), Counter(p.id for p in after)
        for id in (new - old).elements():
            self._table.hold(id, self._key)
        for id in (old - new).elements():
            self._table.release(id, self._key)

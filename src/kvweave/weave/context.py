"""A context: an ordered list of chunks with positions, edited in place, woven when it is read.

Here are the parts and their edits, without a tensor; their rows are a `Session`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from kvweave.chunk.identity import ChunkId, Kind, check_name
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.run.loop import Task
from kvweave.run.sampling import Sampling
from kvweave.verbs import checked
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.check import Check
from kvweave.weave.costs import AnswerCost
from kvweave.weave.edited import EditedParts
from kvweave.weave.edits import (
    dropped,
    erratum_name,
    left,
    part_of,
    renamed,
    reordered,
    with_errata,
)
from kvweave.weave.history import Why
from kvweave.weave.naming import holder
from kvweave.weave.parts import Mode, Part, TextOrTokens
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Strategy
from kvweave.weave.template import Ref, Text
from kvweave.weave.turn import Turn, begin


@checked
class Context(EditedParts):
    """Named parts in order; every edit happens wholly or not at all.

    A part is addressed by its name, its chunk's ``#id``, its index, or the `Part` itself.
    """

    # ---- reading

    @property
    def plan(self) -> Plan:
        """What the last weave did; what the next one would do when there was none."""
        return self.session.plan if self.session.plan is not None else self.preview()

    def preview(self) -> Plan:
        """Say what a weave would do now, without doing it."""
        return self.session.preview(self._parts)

    # ---- editing

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

    def append_pieces(self, pieces: Iterable[Text | Ref]) -> None:
        """Add what a template was filled with. Raises ChunkNotFound."""
        with self.edit():
            for piece in pieces:
                if isinstance(piece, Ref):
                    self.append_chunk(piece.name)
                else:
                    self.append(piece.text)

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
        with self.edit("append" if index == len(self._parts) else "insert"):
            shown = check_name(name) if name is not None else label or f"text-{self._next_uid}"
            tokens = self._maker.tokens(content)
            id = self._maker.add(
                tokens, kind=kind, base=self._base, namespace=self.namespace, name=shown
            )
            if name is not None:
                self._table.bind(name, id, namespace=self.namespace)
            return self._insert(index, Part(-1, id, len(tokens), shown, literal=True))

    def insert_chunk(self, index: int, ref: str) -> Part:
        """Add a stored chunk before the part at ``index``. Raises ChunkNotFound."""
        with self.edit("append" if index == len(self._parts) else "insert"):
            record = self._table.resolve(ref, self.namespace)
            self._maker.rethin(record.id)
            return self._insert(index, part_of(record, ref))

    def insert_slice(self, index: int, ref: str, start: int, stop: int) -> Part:
        """Add tokens ``[start, stop)`` of a stored chunk before the part at ``index``.

        Its KV is the chunk's, which saw the chunk's tokens before ``start`` too: exact only behind
        these. Raises ChunkNotFound, or InvalidArgument for a range not inside the chunk.
        """
        with self.edit("append" if index == len(self._parts) else "insert"):
            record = self._table.resolve(ref, self.namespace)
            self._maker.rethin(record.id)
            return self._insert(index, part_of(record, ref, start, stop))

    def message(self, role: Kind, content: str) -> Part:
        """Add one chat message, wrapped by the model's chat template and named
        ``CONTEXT/u-007`` by role and number."""
        with self.edit("message"):
            tokens = self._maker.message(role, content)
            part = self.append(tokens, kind=role, name=self.names.next(role))
            if role == "system" and len(self._parts) == 1:
                self._base = part.id
            return part

    def answer_part(self, kind: Kind, tokens: Sequence[int]) -> Part:
        """Add tokens the model wrote as the next ``CONTEXT/a-007``."""
        with self.edit("answer"):
            return self.append(tokens, kind=kind, name=self.names.next(kind))

    def set_base(self, id: ChunkId, name: str) -> None:
        """Begin an empty context with the base other chunks were computed after."""
        with self.edit("open"):
            if self._parts:
                raise InvalidArgument("base", "the context already has parts", "open another one")
            record = self._table.get(id)
            if record.namespace not in ("", self.namespace):  # an engine's base carries all of them
                raise ChunkNotFound(f"#{id}")
            self._insert(0, part_of(record, name))
            self._base = id

    def drop(self, *refs: str | int | Part, mode: Mode | None = None) -> None:
        """Remove parts, and with them their errata (see `amend`).

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
        with self.edit("drop" if mode == "forget" else mode):
            gone = with_errata(self._parts, {self.index(r) for r in refs})
            if self._base is not None and 0 in gone and len(self._parts) > len(gone):
                raise InvalidArgument("drop", "the base carries all other parts", "use replace")
            gaps = self.settings.positions == "keep"
            self._maker.shelf.pruned(int(self._parts[i].id) for i in gone)
            self._parts = dropped(self._parts, gone, frozen=mode == "evict", gaps=gaps)
            self._base = self._base if self._parts else None

    def leave(self, *ranges: tuple[int, int]) -> None:
        """Leave only these half-open, increasing ranges of the context's tokens, and close up.

        Raises InvalidArgument for ranges that are empty, overlap or end behind the last token.
        """
        ends = [n for each in ranges for n in each]
        widths = [last - first for first, last in ranges]
        if not ranges or sorted(ends) != ends or ends[0] < 0 or min(widths) < 1:
            raise InvalidArgument(
                "leave", f"{ranges} are no increasing ranges", "put them in order"
            )
        if ends[-1] > self.n_tokens:
            raise InvalidArgument("leave", f"there are {self.n_tokens} tokens")
        with self.edit("leave"):
            self._no_gaps("leave")
            self._parts = left(self._parts, ranges, self._new_uid)
            if self._base is not None and self._parts[0].id != self._base:
                self._base = None

    def replace(
        self, ref: str | int | Part, content: TextOrTokens, *, kind: Kind = "document"
    ) -> Part:
        """Put new text in the place of a part; what stands behind is woven anew. Its errata go."""
        with self.edit("replace"):
            index = self.index(ref)
            old, gone = self._parts[index], with_errata(self._parts, {index}) - {index}
            self._no_gaps("replace")
            is_base = self._base is not None and index == 0
            self._parts = self._parts[:index] + self._parts[index + 1 :]
            if is_base:
                self._base = None
            new = renamed(self.insert(index, content, kind=kind), old)
            self._parts = (*self._parts[:index], new, *self._parts[index + 1 :])
            self._parts = dropped(self._parts, gone, frozen=False, gaps=False)
            if is_base:
                self._base = new.id
            return new

    def amend(
        self,
        ref: str | int | Part,
        content: TextOrTokens,
        *,
        kind: Kind | None = None,
        role: Kind | None = None,
    ) -> Part:
        """Add an erratum of a part at the end and leave the part as it was, and all that read it: only
        the erratum is computed. It is named ``REF~1`` and goes when the part is dropped or replaced.

        What was wrong can still be read, so that a model has to heed the correction (arXiv
        2606.17107): `replace` is what forgets. ``kind`` is ``document`` by default; with ``role``
        the erratum is a chat message of that role. Raises ChunkNotFound, InvalidArgument.
        """
        with self.edit("amend"):
            amended = self._parts[self.index(ref)]
            if role is not None:
                if kind is not None or not isinstance(content, str):
                    reason = "a message is text, and its role is its kind"
                    raise InvalidArgument("role", reason, "leave kind away, or role")
                content = self._maker.message(role, content)
            label = erratum_name(self._parts, amended)
            made = self.append(content, kind=role or kind or "document", label=label)
            erratum = replace(made, amends=amended.id)
            self._parts = (*self._parts[:-1], erratum)
            return erratum

    def reorder(self, order: Sequence[str | int | Part]) -> None:
        """Put the parts in another order; ``order`` names each of them once."""
        with self.edit("reorder"):
            self._no_gaps("reorder")
            indices = [self.index(r) for r in order]
            self._parts = reordered(self._parts, indices)
            if self._base is not None and indices[0] != 0:
                raise InvalidArgument("order", "the base stays in front", "name it first")

    def fork(self, name: str, key: str = "") -> Context:
        """Return a new context with the same parts and rows, and apart from this. Raises OverBudget."""
        self._idle("fork")
        with self._table.transaction():
            twin = Context(name, self.session.fork(key or holder(name, self.namespace)))
            twin._sync_holds((), self._parts)
        twin._parts, twin._base, twin._next_uid = self._parts, self._base, self._next_uid
        twin.names.reset(self.names.counts())
        twin.history, twin.costs = self.history.copy(), self.costs.copy()
        return twin

    def close(self) -> None:
        """Free the rows and let go of the chunks; an answer under way is abandoned. Names stay;
        unnamed chunks go."""
        if self.closed:
            return
        if self._depth:
            raise InvalidArgument("close", "an edit of it is under way", "let that end first")
        self.session.close()
        self.closed = True
        self._table.afterwards(self._let_go)  # what a block that fails puts back is held again

    # ---- weaving and answering

    def weave(
        self,
        repair: str | Strategy | None = None,
        share: float | None = None,
        max_drift: float | None = None,
    ) -> Plan:
        """Bring all rows up to date and return the plan.

        With ``repair``, parts that are not exact are woven again by that strategy, as is what is woven
        later. ``max_drift``: see `begin`. What is refused leaves everything as it was.
        """
        return self.session.loop.finish(self.weaving(repair, share, max_drift))

    def weaving(
        self,
        repair: str | Strategy | None = None,
        share: float | None = None,
        max_drift: float | None = None,
    ) -> Task[Plan]:
        """As `weave`, as a task of the loop: others go on meanwhile."""
        self._readable()
        plan = yield from self.session.weaving(self._parts, repair, share, max_drift)
        self.wove(self._parts, plan)
        return plan

    def refine(self, n_rows: int | None = None) -> int:
        """Recompute rows that are not exact, front to back, at most ``n_rows`` of them or until all are
        those of a full prefill; return how many were. What has no rows yet is placed before.

        For the time in which nobody waits: other contexts' requests run first, what was done up to
        somewhere is gone on with, and verbs of other threads wait (``n_rows`` bounds for how long).
        Raises InvalidArgument where rows cannot become exact: kept by `evict` or a token policy, or
        in 8 bits.
        """
        return self.session.loop.finish(self.refining(n_rows))

    def refining(self, n_rows: int | None = None) -> Task[int]:
        """As `refine`, as a task of the loop; it ends early when somebody uses the context, which may
        be done at any time."""
        self._readable()
        if n_rows is not None and n_rows < 1:
            raise InvalidArgument("n_rows", f"{n_rows} is below 1")
        parts = self._parts
        wove = partial(self.wove, parts)
        return (yield from self.session.refining(parts, n_rows, wove))

    def wove(self, parts: tuple[Part, ...], plan: Plan) -> None:
        """Note what a weave of these parts did, for `why`."""
        self.history.wove(parts, plan)

    def answered(self, plan: Plan, n_tokens: int) -> AnswerCost:
        """Note an answer of so many tokens in the ledger."""
        edits = self.history.since(self.costs.last_version)
        cost = AnswerCost(self.history.version, edits, n_tokens, plan.drift, plan.drift_by)
        self.costs.add(cost)
        return cost

    def ledger(self) -> dict[str, Any]:
        """Tell what each answer cost in nats, with the edits before it, the newest first."""
        return self.costs.to_dict()

    def why(self) -> Why:
        """Tell what the last weave reused, and which edit was the cause of what it did not; where
        parts were edited since, what the next one would do."""
        return self.history.why(self._parts, self.preview())

    def begin(
        self,
        sampling: Sampling,
        max_drift: float | None = None,
        *,
        chat: bool = False,
        header: str | None = None,
    ) -> Turn:
        """Queue an answer; the loop computes it while any context is driven.

        With ``chat`` it is a message, behind the template's usual header or this one.
        Over ``max_drift`` (nats; default: the context's) `auto` repairs more. Raises
        InvalidArgument for a bound that cannot be kept.
        """
        self._readable()
        if chat and header is None:
            header = self.session.maker.chat.header()
        return begin(self.session, self, sampling, max_drift, header if chat else None)

    def generate(self, max_tokens: int = 256, **options: object) -> Answer:
        """Continue the context; the new text becomes its last part. Options: see Sampling, begin."""
        return self.begin(*request_from(max_tokens, options)).run()

    def stream(self, max_tokens: int = 256, **options: object) -> Generator[str]:
        """Yield pieces of the continuation as they come; closing the iterator cancels."""
        return self.begin(*request_from(max_tokens, options)).stream()

    def ask(self, content: str, max_tokens: int = 256, **options: object) -> Answer:
        """Add a user message and return the model's answer; both become chunks."""
        request = request_from(max_tokens, options)
        turn: Turn | None = None
        with self.telling(content, lambda: turn is not None and turn.complete):
            turn = self.begin(*request, chat=True)
            return turn.run()

    @contextmanager
    def telling(self, content: str, stays: Callable[[], bool] = bool) -> Iterator[None]:
        """Add a user message for what is begun in the block: where that fails it was never there, unless
        it ``stays``."""
        with self._retracting(stays) as said:
            said.append(self.message("user", content))
            yield

    def check(self) -> Check:
        """Weave, then measure the distance to a full prefill (costs that full prefill).

        Compared are the predictions of the last answer's tokens over the rows that it saw, or, when
        the context was edited since, of the next token over the rows as they are woven now.
        """
        return self.session.loop.finish(self.checking())

    def checking(self) -> Task[Check]:
        """As `check`, as a task of the loop: others go on meanwhile."""
        self._readable()
        return (yield from self.session.checking(self._parts))

    def _readable(self) -> None:
        self._idle("weave")
        if not self._parts:
            raise InvalidArgument("context", "it is empty", "append something first")

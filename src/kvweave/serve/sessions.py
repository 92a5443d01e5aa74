"""Idle contexts, kept for the next request of their conversation.

::

    idle     [base][u-000][a-000][u-001][a-001]
    wanted   [base][u-000][a-000][u-001][a-001][new]     all rows are kept
    wanted   [base][u-001][a-001][new]                   kept: the base; chunks are placed anew

A context is given to one request at a time. What is known is found by tokens, so it does not
matter how an earlier request was cut into parts.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from kvweave.chunk.identity import ChunkId, chunk_digest
from kvweave.engine import Engine
from kvweave.errors import ChunkNotFound, OverBudget
from kvweave.run.sample import Sampling
from kvweave.serve.assemble import Piece, Wanted
from kvweave.serve.library import Library, Tokens
from kvweave.serve.options import Reuse
from kvweave.weave.context import Context
from kvweave.weave.generate import Turn
from kvweave.weave.naming import Names
from kvweave.weave.parts import Part
from kvweave.weave.plan import Plan
from kvweave.weave.sources import tokens_of

T = TypeVar("T")

WORTH = 8  # a session is used for a prompt that has one in so many of its tokens in common
MAX_NAMES = 10_000  # names given here, of all namespaces; the oldest go first
_OURS = re.compile(r"auto/[0-9a-f]{8}/[a-z]+-\d{3,}")


@dataclass(frozen=True, slots=True)
class How:
    """How a request wants to be woven; None leaves it to the engine."""

    repair: str | None = None
    share: float | None = None
    max_drift: float | None = None

    def options(self) -> dict[str, object]:
        """Return what was asked for, as options of `Engine.context`."""
        given = {"repair": self.repair, "share": self.share, "max_drift": self.max_drift}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(eq=False, slots=True)
class Session:
    """A context of the pool, and what it may be used for again."""

    context: Context
    how: How
    reuse: Reuse
    names: Names
    n_base: int  # parts in front that stay: 1 where there is a base
    base: ChunkId | None
    n_computed: int = 0  # tokens of the base computed for the present request
    n_asked: int = 0  # parts in front of the present answer


@dataclass(frozen=True, slots=True)
class _Common:
    """What a context and a prompt have in common at the front, the base left out."""

    n_parts: int  # whole parts, the base with them
    n_tokens: int  # of these and of the beginning of the next
    cut: tuple[Part, int] | None  # the next part, and how many of its tokens


class Sessions:
    """The pool. Used in the driver's thread only."""

    def __init__(
        self,
        engine: Engine,
        library: Library,
        *,
        max_sessions: int = 32,
        later: Callable[[Iterable[ChunkId]], None] = lambda ids: None,
    ) -> None:
        """``later`` is told chunks that need canonical KV when there is time."""
        self.engine, self.library, self.table = engine, library, engine.table
        self.max_sessions, self.later = max_sessions, later
        self._idle: list[Session] = []  # least recently used first
        self._names: OrderedDict[tuple[str, str], None] = OrderedDict()
        for namespace in self.table.namespaces():
            for name in sorted(filter(_OURS.fullmatch, self.table.names(namespace))):
                self._names[namespace, name] = None
        with self._temporary() as probe:
            self.engine_base = probe.parts[0].id if probe.parts else None

    def __len__(self) -> int:
        return len(self._idle)

    # ---- taking

    def open(self, wanted: Wanted, how: How, reuse: Reuse = "all") -> Session:
        """Return a context that holds what is wanted, to be given back.

        Raises OverBudget when no idle context is left to be closed, ContextTooLong, InvalidArgument.
        """
        if reuse != "all":
            wanted = self._without_base(wanted)
        with self._held(wanted):
            best, common = self._best(wanted, how, reuse)
            if best is None:
                taken = self._afford(lambda: self._fresh(wanted, how, reuse))
                common = _Common(taken.n_base, 0, None)
            else:
                taken = best if 2 * common.n_tokens >= best.context.n_tokens else self._forked(best)
                taken.n_computed = 0
            if taken in self._idle:
                self._idle.remove(taken)
            try:
                self._edit(taken, common, wanted)
            except BaseException:
                self.close(taken)
                raise
        return taken

    def twin(self, session: Session) -> Session:
        """Return another session that holds the same. Raises OverBudget."""
        name = _new_name()
        context = self._afford(lambda: self.engine.fork(session.context, name))
        return replace(session, context=context, names=self._counter(context), n_computed=0)

    def weave(self, session: Session) -> Plan:
        """Compute all rows. Raises OverBudget."""
        return self._afford(session.context.weave)

    def begin(self, session: Session, sampling: Sampling, *, chat: bool) -> Turn:
        """Queue an answer. Raises OverBudget, ContextTooLong."""
        session.n_asked = len(session.context.parts)
        return self._afford(lambda: session.context.begin(sampling, chat=chat))

    # ---- giving back

    def give_back(self, sessions: Sequence[Session]) -> None:
        """Keep contexts for the next requests, and learn what is new in them."""
        for session in sessions:
            context = session.context
            if self.engine.contexts_of(context.namespace).get(context.name) is not context:
                continue  # its owner closed it over /v1/contexts
            if session.reuse == "all":
                self._learn(session)
            else:
                self._unname(context)
            if session.reuse == "off":
                self.close(session)
            else:
                self._idle.append(session)
        while len(self._idle) > self.max_sessions:
            self.close(self._idle.pop(0))
        self._forget_names()

    def close(self, session: Session) -> None:
        """Close a session's context for good."""
        context = session.context
        if self.engine.contexts_of(context.namespace).get(context.name) is context:
            self.engine.close_context(context.name, context.namespace)

    def close_oldest(self) -> bool:
        """Close the idle context that was used least recently; False when there is none."""
        if not self._idle:
            return False
        self.close(self._idle.pop(0))
        return True

    def close_all(self) -> None:
        """Close every idle context."""
        while self.close_oldest():
            pass

    # ---- choosing

    def _best(self, wanted: Wanted, how: How, reuse: Reuse) -> tuple[Session | None, _Common]:
        """Return the idle session with most in common, if any has more than the base."""
        best: Session | None = None
        most = _Common(0, 0, None)
        if reuse == "off":
            return best, most
        base = self._base_id(wanted) if reuse == "all" else None
        tokens = wanted.tokens()
        for session in reversed(self._idle):
            context = session.context
            same = (session.how, session.reuse, session.base) == (how, reuse, base)
            if not same or context.namespace != wanted.namespace:
                continue
            common = self._common(session, tokens)
            # a copy of many rows for the sake of a few is not worth its memory
            worth = reuse == "prefix" or WORTH * common.n_tokens >= context.n_tokens
            if common.n_tokens > most.n_tokens and worth:
                best, most = session, common
        return best, most

    def _base_id(self, wanted: Wanted) -> ChunkId | None:
        if wanted.base is None:
            return self.engine_base
        fingerprint, tokens = self.engine.runner.fingerprint, wanted.base.tokens.tolist()
        record = self.table.find_digest(chunk_digest(fingerprint, b"", tokens, wanted.namespace))
        return None if record is None else record.id

    def _common(self, session: Session, tokens: Tokens) -> _Common:
        at, index = 0, session.n_base
        for part in session.context.parts[session.n_base :]:
            mine = tokens_of(self.table, part)
            n = _n_equal(mine, tokens[at : at + part.n])
            if n < part.n:
                enough = n if session.reuse == "prefix" or n >= self.library.width else 0
                return _Common(index, at + enough, (part, n) if enough else None)
            at, index = at + n, index + 1
        return _Common(index, at, None)

    def _forked(self, session: Session) -> Session:
        """Return a copy of a session of which much would be lost; itself if there is no room."""
        try:
            context = self.engine.fork(session.context, _new_name())
        except OverBudget:
            return session
        return replace(session, context=context, names=self._counter(context))

    def _counter(self, context: Context) -> Names:
        namespace = context.namespace
        return Names(context.name, lambda name: self.table.lookup(name, namespace) is None)

    # ---- making

    def _fresh(self, wanted: Wanted, how: How, reuse: Reuse) -> Session:
        """Return a session that holds the base only."""
        # in a namespace of its own nothing can be found, not even by a request at the same time
        namespace = wanted.namespace if reuse != "off" else f"off-{secrets.token_hex(8)}"
        options: dict[str, Any] = how.options() | {"namespace": namespace, "denoise": False}
        context = self.engine.context(_new_name(), **options)
        names = self._counter(context)
        session = Session(context, how, reuse, names, len(context.parts), self.engine_base)
        try:
            if reuse != "all":
                self._drop_base(context)
                session.n_base, session.base = 0, None
            elif wanted.base is not None:
                self._set_base(session, wanted.base)
        except BaseException:
            self.close(session)
            raise
        return session

    def _drop_base(self, context: Context) -> None:
        if context.parts:
            context.drop(0)

    def _set_base(self, session: Session, base: Piece) -> None:
        engine, context = self.engine, session.context
        tokens = base.tokens.tolist()
        id = engine.maker.add(tokens, kind="system", namespace=context.namespace, name=base.label)
        self._drop_base(context)
        context.set_base(id, base.label)
        if engine.shelf.tier(id) == "none":
            engine.maker.canonicalise([id])
            session.n_computed = base.n
        session.n_base, session.base = 1, id

    def _edit(self, session: Session, common: _Common, wanted: Wanted) -> None:
        """Bring the context from what is common to what is wanted, in one edit."""
        context = session.context
        with context.edit():
            if common.n_parts < len(context.parts):
                context.drop(*range(common.n_parts, len(context.parts)), mode="forget")
            if common.cut is not None:
                part, n = common.cut
                context.append_slice(self._ref(part.id), part.start, part.start + n)
            at = 0
            for piece in wanted.pieces:
                left = piece.behind(min(piece.n, max(0, common.n_tokens - at)))
                at += piece.n
                if left.n:
                    self._append(session, left)

    def _append(self, session: Session, piece: Piece) -> None:
        context = session.context
        if piece.id is not None:
            whole = self.table.get(piece.id).n_tokens
            if piece.n == whole:
                context.append_chunk(self._ref(piece.id))
            else:
                context.append_slice(self._ref(piece.id), piece.start, piece.start + piece.n)
            return
        tokens, kind = piece.tokens.tolist(), piece.kind
        if session.reuse != "all":
            context.append(tokens, kind=kind, label=piece.label)
            return
        id = self.engine.maker.add(
            tokens, kind=kind, base=session.base, namespace=context.namespace, name=piece.label
        )
        if self.table.get(id).linked:
            context.append(tokens, kind=kind, label=self._ref(id))
            return
        name = session.names.next(kind)
        context.append(tokens, kind=kind, name=name)
        self._names[context.namespace, name] = None

    def _ref(self, id: ChunkId) -> str:
        names = self.table.names_of(id)
        return names[0] if names else f"#{id}"

    def _without_base(self, wanted: Wanted) -> Wanted:
        """Return the same prompt with its base as an ordinary piece, to be prefilled."""
        base = wanted.base
        if base is None and self.engine_base is not None:
            base = Piece("system", self.table.tokens(self.engine_base), "base")
        pieces = [*([] if base is None else [base]), *wanted.pieces]
        return replace(wanted, base=None, pieces=pieces)

    # ---- learning

    def _learn(self, session: Session) -> None:
        context, namespace = session.context, session.context.namespace
        fresh: list[ChunkId] = []
        for part in context.parts[session.n_base :]:
            record = self.table.get(part.id)
            if not record.linked:
                name = session.names.next(record.kind)
                self.table.bind(name, part.id, namespace=namespace)
            for name in record.names:
                if name.startswith(f"{context.name}/"):
                    self._names.setdefault((namespace, name))
            self.library.note(namespace, part.id)
            if self.engine.shelf.tier(part.id) == "none":
                fresh.append(part.id)
        self.later(fresh)

    def _unname(self, context: Context) -> None:
        """Take away the names answers got: nothing may be found by them."""
        for part in context.parts:
            for name in self.table.names_of(part.id):
                if name.startswith(f"{context.name}/"):
                    self.table.unbind(name, context.namespace)

    def _forget_names(self) -> None:
        while len(self._names) > MAX_NAMES:
            (namespace, name), _ = self._names.popitem(last=False)
            record = self.table.lookup(name, namespace)
            if record is not None and not record.pinned:
                self.table.unbind(name, namespace)

    # ---- room

    def _afford(self, make: Callable[[], T]) -> T:
        """Return what ``make`` does, closing idle contexts for as long as memory is short."""
        while True:
            try:
                return make()
            except OverBudget:
                if not self.close_oldest():
                    raise

    @contextmanager
    def _held(self, wanted: Wanted) -> Iterator[None]:
        """Keep the chunks of a prompt while idle contexts may be closed to make room."""
        holder = _new_name()
        ids = [piece.id for piece in wanted.pieces if piece.id is not None]
        for id in ids:
            self.table.hold(id, holder)
        try:
            yield
        finally:
            for id in ids:
                try:
                    self.table.release(id, holder)
                except ChunkNotFound:
                    continue

    @contextmanager
    def _temporary(self) -> Iterator[Context]:
        name = _new_name()
        yield self.engine.context(name)
        self.engine.close_context(name)


def _new_name() -> str:
    return f"auto/{secrets.token_hex(4)}"


def _n_equal(a: Tokens, b: Tokens) -> int:
    """Return how many tokens at the front are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n

"""Idle contexts, kept for the next request of their conversation.

::

    idle     [base][u-000][a-000][u-001][a-001]
    wanted   [base][u-000][a-000][u-001][a-001][new]     all rows are kept
    wanted   [base][u-001][a-001][new]                   kept: the base; chunks are placed anew

A context is given to one request at a time. What is known is found by tokens, so it does not
matter how an earlier request was cut into parts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from kvweave.chunk.identity import ChunkId, chunk_digest
from kvweave.chunk.rolling import Tokens
from kvweave.engine import Engine
from kvweave.errors import ChunkNotFound, KVWeaveError, OverBudget, OverQuota
from kvweave.run.loop import Task
from kvweave.run.sample import Sampling
from kvweave.serve.guard.quota import Quota
from kvweave.serve.options import ReuseMode
from kvweave.serve.reuse.beside import AheadEdits
from kvweave.serve.reuse.build import Composer
from kvweave.serve.reuse.find import NOT_STORED, Wanted
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.names import AutoNames, new_context_name
from kvweave.serve.reuse.pooled import Common, PooledContext, WeaveOptions
from kvweave.weave.context import Context
from kvweave.weave.plan import Plan
from kvweave.weave.sources import tokens_of
from kvweave.weave.turn import Turn

T = TypeVar("T")

WORTH = 8  # a session is used for a prompt that has one in so many of its tokens in common


class Sessions:
    """The pool. Used in the driver's thread only."""

    def __init__(
        self,
        engine: Engine,
        library: Library,
        *,
        max_sessions: int = 32,
        later: Callable[[Iterable[ChunkId]], None] = lambda ids: None,
        quota: Quota | None = None,
        is_busy: Callable[[Context], bool] = lambda context: False,
    ) -> None:
        """``later`` is told chunks that need canonical KV when there is time; ``is_busy`` tells
        whether an idle context is in use elsewhere."""
        self.engine, self.library, self.table = engine, library, engine.table
        self.max_sessions, self.later, self.quota = max_sessions, later, quota or Quota()
        self.is_busy = is_busy
        self.names = AutoNames(engine.table)
        self.composer = Composer(engine, self.names)
        self.engine_base = self.composer.engine_base
        self.ahead = AheadEdits(self)
        self.idle: list[PooledContext] = []  # least recently used first

    def __len__(self) -> int:
        return len(self.idle)

    # ---- taking

    def opening(
        self, wanted: Wanted, how: WeaveOptions, reuse: ReuseMode = "all", sizes: Sequence[int] = (),
        *, private: bool = False, again: Callable[[], Wanted] | None = None,
    ) -> Task[PooledContext]:  # fmt: skip
        """Return a context that holds what is wanted, to be given back.

        ``sizes`` are tokens of chunks that will come in it, for the quota. A ``private`` one uses
        what is known, and leaves nothing behind. ``again`` finds what is wanted anew behind a pause:
        chunks may have gone. Raises OverBudget when no idle context is left to be closed,
        OverQuota, ContextTooLong, InvalidArgument.
        """
        wanted = self._allowed(wanted, reuse, sizes)
        holder, n_base, base = new_context_name(), 0, None
        try:
            own = wanted.base if reuse == "all" else None
            if own is not None and self._best(wanted, how, reuse)[0] is None:
                base = self.composer.add_base(own, wanted.namespace)
                self.table.hold(base, holder)
                compute = partial(self.engine.maker.computing, base, wanted.namespace)
                n_base = yield from self._affording(wanted.namespace, compute)
                wanted = self._allowed(wanted if again is None else again(), reuse, sizes)
            taken = self._open(wanted, how, reuse, private)
        finally:
            if base is not None:
                self.table.release(base, holder)
        taken.n_computed = max(taken.n_computed, n_base)
        taken.context.session.held = True
        try:
            if reuse == "all":
                n_ahead = taken.n_completed
                yield from self.composer.completing(taken, wanted)
                taken.n_completed += n_ahead
        except BaseException:
            self.close(taken)
            raise
        finally:
            taken.context.session.held = False
        return taken

    def _allowed(self, wanted: Wanted, reuse: ReuseMode, sizes: Sequence[int]) -> Wanted:
        """Make room for what is wanted, and return it. Raises OverQuota, InvalidArgument."""
        self.quota.check_parts(len(wanted.pieces))
        if reuse != "all":
            wanted = self.composer.without_base(wanted)
        with self.held(wanted):
            new = [piece.n for piece in wanted.pieces if piece.id is None]
            self._make_room(wanted.namespace, [*new, *sizes])
        return wanted

    def _open(
        self, wanted: Wanted, how: WeaveOptions, reuse: ReuseMode, private: bool
    ) -> PooledContext:
        with self.held(wanted):
            best, common = self._best(wanted, how, reuse)
            taken = None
            if best is not None:
                much = 2 * common.n_tokens >= best.context.n_tokens
                taken = best if much and not private else self._forked(best, private)
            if taken is None:
                taken = self._afford(
                    wanted.namespace, lambda: self.composer.fresh(wanted, how, reuse)
                )
                common = Common(taken.n_base, 0, None)
            taken.n_computed = 0
            taken.private, taken.context.session.audited = private, not private
            if taken in self.idle:
                self.idle.remove(taken)
            taken.n_completed = self.ahead.taken(best, taken, common)
            try:
                self.composer.edit(taken, common, wanted)
            except BaseException:
                self.close(taken)
                raise
        return taken

    def twin(self, session: PooledContext) -> PooledContext:
        """Return another session that holds the same. Raises OverBudget."""
        name = new_context_name()
        return self._afford(session.context.namespace, lambda: self.fork(session, name))

    def weaving(self, session: PooledContext) -> Task[Plan]:
        """Compute all rows. Raises OverBudget."""
        return self._affording(session.context.namespace, session.context.weaving)

    def begin(self, session: PooledContext, sampling: Sampling, header: str | None = None) -> Turn:
        """Queue an answer, with a ``header`` a message. Raises OverBudget, ContextTooLong."""
        session.n_asked = len(session.context.parts)
        begin, chat = session.context.begin, header is not None
        return self._afford(
            session.context.namespace, lambda: begin(sampling, chat=chat, header=header)
        )

    # ---- giving back

    def give_back(self, sessions: Sequence[PooledContext]) -> None:
        """Keep contexts for the next requests, and learn what is new in them."""
        for session in sessions:
            context = session.context
            if self.engine.contexts_of(context.namespace).get(context.name) is not context:
                continue  # its owner closed it over /v1/contexts
            if session.reuse == "all" and not session.private:
                self.learn(session)
            else:
                self._unname(context)
            if session.reuse == "off" or session.private:
                self.close(session)
            else:
                session.given_back = time.time()
                self.idle.append(session)
        while len(self.idle) > self.max_sessions and self.close_oldest():
            pass
        self.names.trim()

    def close(self, session: PooledContext) -> None:
        """Close a session's context for good."""
        context = session.context
        if session.instead is not None:
            session.instead.instead = None
            session.instead = None
        if self.engine.contexts_of(context.namespace).get(context.name) is context:
            self.engine.close_context(context.name, context.namespace)

    def close_oldest(self, namespace: str | None = None) -> bool:
        """Close the idle context that was used least recently, of a namespace or of the one that
        has most of them; False when there is none."""
        idle = [session for session in self.idle if not self.is_busy(session.context)]
        counts = Counter(session.context.namespace for session in idle)
        if namespace is None and counts:
            namespace = counts.most_common(1)[0][0]
        session = next((s for s in idle if s.context.namespace == namespace), None)
        if session is None:
            return False
        self.idle.remove(session)
        self.close(session)
        return True

    def close_all(self) -> None:
        """Close every idle context."""
        while self.close_oldest():
            pass

    def expire(self, before: float) -> int:
        """Forget what only the server kept and nobody used since ``before``; return how many names."""
        for session in [s for s in self.idle if s.given_back < before]:
            if not self.is_busy(session.context):
                self.idle.remove(session)
                self.close(session)
        self.library.expire(before)
        return self.names.expire(before)

    # ---- choosing

    def _best(
        self, wanted: Wanted, how: WeaveOptions, reuse: ReuseMode
    ) -> tuple[PooledContext | None, Common]:
        """Return the idle session with most in common, if any has more than the base."""
        best: PooledContext | None = None
        most = Common(0, 0, None)
        if reuse == "off":
            return best, most
        base = self.base_id(wanted) if reuse == "all" else None
        tokens = wanted.tokens()
        for session in reversed(self.idle):
            context = session.context
            same = (session.how, session.reuse, session.base) == (how, reuse, base)
            if not same or context.namespace != wanted.namespace or not self.is_usable(session):
                continue
            common = self.common_of(session, tokens)
            # a copy of many rows for the sake of a few is not worth its memory
            worth = reuse == "prefix" or WORTH * common.n_tokens >= context.n_tokens
            if common.n_tokens > most.n_tokens and worth:
                best, most = session, common
        return best, most

    def is_usable(self, session: PooledContext) -> bool:
        """Tell whether nobody uses a context over /v1/contexts, or took away its base there."""
        parts = session.context.parts
        if self.is_busy(session.context) or not parts:
            return False
        if session.n_base == 0:
            return True
        # a token policy that closes up leaves a slice of it
        return parts[0].id == session.base and parts[0].n == self.table.get(parts[0].id).n_tokens

    def base_id(self, wanted: Wanted) -> ChunkId | None:
        """Return the chunk that is a prompt's base; `NOT_STORED` for a new one, None for none."""
        if wanted.base is None:
            return self.engine_base
        fingerprint, tokens = self.engine.runner.fingerprint, wanted.base.tokens.tolist()
        record = self.table.find_digest(chunk_digest(fingerprint, b"", tokens, wanted.namespace))
        return NOT_STORED if record is None else record.id

    def common_of(self, session: PooledContext, tokens: Tokens) -> Common:
        """Return what a session has in common with a prompt of these tokens [n], the base left out."""
        at, index = 0, session.n_base
        for part in session.context.parts[session.n_base :]:
            mine = tokens_of(self.table, part)
            n = _n_equal(mine, tokens[at : at + part.n])
            if n < part.n:
                enough = n if session.reuse == "prefix" or n >= self.library.width else 0
                return Common(index, at + enough, (part, n) if enough else None)
            at, index = at + n, index + 1
        return Common(index, at, None)

    def _forked(self, session: PooledContext, private: bool) -> PooledContext | None:
        """Return a copy of a session of which much would be lost; if there is no room itself, or
        None for a request that may not leave anything in it."""
        try:
            return self.fork(session, new_context_name())
        except (OverBudget, OverQuota):
            return None if private else session

    def fork(self, session: PooledContext, name: str) -> PooledContext:
        """Return a copy of a session under another name. Raises OverBudget, OverQuota."""
        context = self.engine.fork(session.context, name)
        names = self.names.counter(name, context.namespace)
        made = replace(session, context=context, names=names, n_computed=0)
        made.ahead = made.instead = None
        made.rule = ""
        return made

    # ---- learning

    def learn(self, session: PooledContext) -> None:
        """Name what is new in a context, and have it found in prompts from now on."""
        context, namespace = session.context, session.context.namespace
        fresh: list[ChunkId] = []
        bases = self.engine.weaver.sources.bases
        foreign = bases.foreign(context.parts)  # computed after this base instead
        for part in context.parts[session.n_base :]:
            record = self.table.get(part.id)
            if not record.linked:
                self.names.bind(session.names, part.id, record.kind, namespace)
            for name in record.names:
                if name.startswith(f"{context.name}/"):
                    self.names.note(name, namespace)
            self.library.note(namespace, part.id)
            if self.engine.shelf.tier(part.id) == "none" and part.id not in foreign:
                fresh.append(part.id)
        self.later([*fresh, *bases.rebased(context.parts)])

    def _unname(self, context: Context) -> None:
        """Take away the names answers got: nothing may be found by them."""
        for part in context.parts:
            for name in self.table.names_of(part.id):
                if name.startswith(f"{context.name}/"):
                    self.table.unbind(name, context.namespace)

    # ---- room

    def _make_room(self, namespace: str, sizes: list[int]) -> None:
        """Let go of what only the server keeps until a namespace is within its quota."""
        while True:
            try:
                self.quota.check(self.engine, namespace, sizes)
                return
            except OverQuota:
                n_names = self.names.forget_some(namespace)
                if not self.close_oldest(namespace) and not n_names:
                    raise

    def _afford(self, namespace: str, make: Callable[[], T]) -> T:
        """Return what ``make`` does, closing idle contexts for as long as memory is short, or its
        namespace's own while they are over its quota."""
        while True:
            try:
                return make()
            except (OverBudget, OverQuota) as error:
                if not self._made_room(namespace, error):
                    raise

    def _affording(self, namespace: str, make: Callable[[], Task[T]]) -> Task[T]:
        """As `_afford`, of a task."""
        while True:
            try:
                return (yield from make())
            except (OverBudget, OverQuota) as error:
                if not self._made_room(namespace, error):
                    raise

    def _made_room(self, namespace: str, error: KVWeaveError) -> bool:
        return self.close_oldest(namespace if isinstance(error, OverQuota) else None)

    @contextmanager
    def held(self, wanted: Wanted) -> Iterator[None]:
        """Keep the chunks of a prompt while idle contexts may be closed to make room."""
        holder = new_context_name()
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


def _n_equal(a: Tokens, b: Tokens) -> int:
    """Return how many tokens at the front are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n

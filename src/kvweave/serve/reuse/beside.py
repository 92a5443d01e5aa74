"""Contexts that are edited before the request comes that edits them.

::

    idle     [base][u-000][a-000][t-000][a-001]           as the last answer left it
    beside   [base][u-000][a-000][cleared][a-001]         as the next request will begin
    taken    whichever of the two has more in common with the request; the other one goes

The one as it is waits as the first to be closed where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.rolling import Tokens
from kvweave.engine import Engine
from kvweave.serve.guard.quota import Quota
from kvweave.serve.reuse.build import Composer
from kvweave.serve.reuse.find import Wanted
from kvweave.serve.reuse.names import AutoNames, new_context_name
from kvweave.serve.reuse.pooled import Common, PooledContext
from kvweave.weave.parts import Part

BESIDE = 4  # a quarter of memory, and of a quota, at most, for contexts beside those edited ahead


class _Pool(Protocol):
    """What is asked of the pool; see `kvweave.serve.reuse.pool.Sessions`."""

    engine: Engine
    quota: Quota
    names: AutoNames
    composer: Composer
    idle: list[PooledContext]
    max_sessions: int
    is_busy: Callable[..., bool]

    def is_usable(self, session: PooledContext) -> bool: ...
    def base_id(self, wanted: Wanted) -> ChunkId | None: ...
    def common_of(self, session: PooledContext, tokens: Tokens) -> Common: ...
    def fork(self, session: PooledContext, name: str) -> PooledContext: ...
    def held(self, wanted: Wanted) -> AbstractContextManager[None]: ...
    def learn(self, session: PooledContext) -> None: ...
    def close(self, session: PooledContext) -> None: ...


class AheadEdits:
    """Edits idle contexts of a pool. Used in the driver's thread only."""

    def __init__(self, sessions: _Pool) -> None:
        self._sessions = sessions
        self.n_made = 0
        """Contexts that were edited before a request came."""
        self.n_used = 0
        """Of these, those that a request went on from."""

    def is_there(self, session: PooledContext, version: int) -> bool:
        """Tell whether nobody has gone on from a session since it was given back in this version."""
        pool = self._sessions
        there = session in pool.idle and session.context.history.version == version
        return there and pool.is_usable(session)

    def changes(self, session: PooledContext, wanted: Wanted) -> bool:
        """Tell whether a context that begins as wanted is another one than what a session holds."""
        pool, context = self._sessions, session.context
        state = context.session.state
        if session.reuse != "all" or pool.base_id(wanted) != session.base:
            return False
        if state.keeps or state.keeper is not None or state.rows.lossy:
            return False  # its rows cannot become exact
        common = pool.common_of(session, wanted.tokens())
        return common.cut is not None or common.n_parts < len(context.parts)

    def has_room(self, session: PooledContext) -> bool:
        """Tell whether a copy of a session may stand beside it; only a context of the same namespace
        makes room for it, see `_oldest`."""
        pool = self._sessions
        space, most = session.context.namespace, pool.quota.n_bytes
        kept = [s for s in pool.idle if s.instead is not None and s.ahead is None]
        kept.append(session)
        mine = [s for s in kept if s.context.namespace == space]
        full = len(pool.idle) >= pool.max_sessions
        if (full and self._oldest(session) is None) or (most and BESIDE * _n_bytes(mine) > most):
            return False
        return BESIDE * _n_bytes(kept) <= pool.engine.shelf.budget

    def _oldest(self, session: PooledContext) -> PooledContext | None:
        """Return who goes where there are too many idle contexts: the one that the namespace used
        longest ago, if a quarter of all are its own; None for nobody."""
        pool, space = self._sessions, session.context.namespace
        mine = [s for s in pool.idle if s.context.namespace == space]
        if BESIDE * len(mine) < pool.max_sessions:
            return None
        others = (s for s in mine if s is not session and s.instead is None)
        return next((s for s in others if not pool.is_busy(s.context)), None)

    def edit(self, session: PooledContext, wanted: Wanted, *, beside: bool, rule: str = "") -> None:
        """Have a context hold what the next request begins with: a copy ``beside`` the session, or
        the session itself, by a ``rule``. Raises OverBudget, OverQuota, InvalidArgument; then all is as it was."""
        pool, engine = self._sessions, self._sessions.engine
        pool.quota.check_parts(len(wanted.pieces))
        new = [piece.n for piece in wanted.pieces if piece.id is None]
        pool.quota.check(engine, wanted.namespace, new)
        common = pool.common_of(session, wanted.tokens())
        made = pool.fork(session, new_context_name()) if beside else session
        before = made.context.parts
        try:
            with pool.held(wanted):
                pool.composer.edit(made, common, wanted)
        except BaseException:
            if beside:
                pool.close(made)
            raise
        known = {piece.id for piece in wanted.pieces} | {part.id for part in before}
        ahead = {part.uid: part.n for part in made.context.parts if part.id not in known}
        # an answer leaves its last rows to the request behind it
        left = {uid: part.n - n for uid, (part, n) in _ready(made).items() if n < part.n}
        made.ahead, made.rule = ahead | left, rule
        pool.learn(made)
        pool.names.trim()
        if beside and len(pool.idle) >= pool.max_sessions:
            oldest = self._oldest(session)
            assert oldest is not None
            pool.idle.remove(oldest)
            pool.close(oldest)
        pool.idle.remove(session)
        if beside:
            made.instead, session.instead = session, made
            pool.idle.insert(0, session)
        pool.idle.append(made)
        self.n_made += 1

    def taken(self, best: PooledContext | None, session: PooledContext, common: Common) -> int:
        """Let go of what stands beside a session that is used now; return how many of the tokens that
        it, or the ``best`` that it is a copy of, has in common were computed ahead."""
        if best is None:
            return 0
        there, ahead = _ready(session), best.ahead or {}
        mine = [part.uid for part in session.context.parts[: common.n_parts]]
        # of those that have rows by now: others are computed by who takes it
        n = sum(
            max(0, there[uid][1] - (there[uid][0].n - ahead[uid]))
            for uid in mine
            if uid in ahead and uid in there
        )
        if best is session:
            used = best.ahead is not None and common.n_parts == len(session.context.parts)
            self.n_used += used
            self._settle(session)
            session.rule = session.rule if used else ""
        return n

    def _settle(self, session: PooledContext) -> None:
        pool, other = self._sessions, session.instead
        session.ahead = session.instead = None
        if other is None:
            return
        other.instead = None
        if other in pool.idle and not pool.is_busy(other.context):
            pool.idle.remove(other)
            pool.close(other)


def _n_bytes(sessions: Sequence[PooledContext]) -> int:
    return sum(session.context.session.state.n_bytes for session in sessions)


def _ready(session: PooledContext) -> dict[int, tuple[Part, int]]:
    """Return the parts that have rows by uid, each with how many."""
    woven = session.context.session.state.woven
    return {placed.part.uid: (placed.part, placed.ready) for placed in woven}

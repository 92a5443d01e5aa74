"""The rows of one context: weave them, answer over them, measure them.

A session knows the rows, not the edits: parts come with each call, and a running answer (`Turn`)
puts its text into whatever gives it the verbs of `Editor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from kvweave.errors import CannotMove, InvalidArgument
from kvweave.keep.tokens.base import may_let_go
from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import Steps, gapless
from kvweave.run.handing import GAPLESS
from kvweave.run.loop import Loop, Request, Task, new_key
from kvweave.weave.approximate import cell_of
from kvweave.weave.audit import Way
from kvweave.weave.check import COMPARED, Check
from kvweave.weave.keeping import Keeper
from kvweave.weave.maker import Maker
from kvweave.weave.oracle import comparing
from kvweave.weave.parts import (
    Part,
    exact_prefix,
    require_speech,
)
from kvweave.weave.plan import Plan
from kvweave.weave.refining import Refining
from kvweave.weave.repair import NoRepair, Strategy, Wish, strategy
from kvweave.weave.settings import Settings, check_share
from kvweave.weave.sources import runs, tokens_of
from kvweave.weave.state import State
from kvweave.weave.weaver import Weaver
from kvweave.weave.weaving import Weaving


class UnderWay(Protocol):
    """An answer under way, as far as its session knows it."""

    def abandon(self) -> None:
        """Give it up."""


# parts that were there and the first and last of the rows that spoke, when a context answered last
NO_ANSWER: tuple[tuple[Part, ...], int, int] = ((), 0, 0)


class Session:
    """Rows of one context, by ``key`` among those of all namespaces."""

    def __init__(
        self, key: str, weaver: Weaver, maker: Maker, loop: Loop, settings: Settings
    ) -> None:
        self.key, self.settings = key, settings
        self.weaver, self.maker, self.loop = weaver, maker, loop
        self.state = self._new_state()
        self.strategy = strategy(settings.repair)
        self.plan: Plan | None = None  # of the last weave
        self.turn: UnderWay | None = None  # between its beginning and its end
        self.answered = NO_ANSWER
        self.waits_for: int | None = None  # the request of a task that is under way
        self.held = False  # somebody prepares an answer
        self.audited = True  # its answers may be put aside for an audit
        self.ended: Callable[[], object] = bool  # whoever lists its context hears of the end
        self._refining = Refining(weaver, loop)

    def _new_state(self) -> State:
        """Return a state without rows. Raises InvalidArgument for a policy that rows of 8 bits
        cannot follow, CannotMove for settings in which what is left closes up and keeps its rows."""
        keep, codec, backend = self.settings.keep, self.weaver.codec, self.weaver.backend
        closes = self.settings.prune == "evict" and self.settings.positions == "compact"
        if closes and not backend.can_move:
            raise CannotMove(backend.can_move.reason, 'use positions="keep", or prune="forget"')
        if self.settings.positions == "keep" and gapless(backend.layers):
            raise CannotMove(GAPLESS, 'use positions="compact"')
        if keep is not None and codec != "raw":
            reason = f"rows kept as {codec} cannot be freed one by one"
            raise InvalidArgument("keep", reason, 'use rows="raw"')
        chosen = None if keep is None else Keep.parse(keep)
        if chosen is not None and chosen.is_all and not may_let_go(backend.layers):
            chosen = None  # the same as none
        keeper = None if chosen is None else Keeper(chosen, backend)
        rows = backend.new_rows(codec, moves=keeper is not None and keeper.moves)
        tenant, keeps = self.settings.namespace, self.settings.prune == "evict"
        bases = self.settings.bases
        return State(self.key, rows, keeps, tenant, keeper=keeper, bases=bases)

    @property
    def busy(self) -> bool:
        """Whether something that reads or writes the rows is under way."""
        return self.held or self.turn is not None or self.waits_for is not None

    def refinable(self, parts: Sequence[Part]) -> bool:
        """Tell whether rows can be computed ahead of who asks next."""
        return not self.busy and self._refining.may(self.state, parts, self.strategy)

    def refining(
        self, parts: Sequence[Part], n_rows: int | None, wove: Callable[[Plan], None]
    ) -> Task[int]:
        """Recompute rows that are not exact, at most ``n_rows``; return how many. ``wove`` is told of a
        weave before that."""

        def changed(plan: Plan | None) -> None:
            self.answered = NO_ANSWER
            if plan is not None:
                self.plan = plan
                wove(plan)

        return (yield from self._refining.running(self.state, parts, n_rows, changed))

    def pause(self) -> None:
        """Have what refines the rows stop: somebody is about to touch them."""
        self._refining.pause()

    def preview(self, parts: Sequence[Part]) -> Plan:
        """Say what a weave would do now, without doing it."""
        return self.weaver.plan(self.state, parts, self.strategy, self.settings.share)

    def repairing(self, parts: Sequence[Part], wish: Wish) -> tuple[Strategy, Wish, Way]:
        """Return how an answer is woven: as it was asked for, but where audits found that what is
        promised of such answers is not kept. Then all that is not exact is placed anew."""
        shadow, state = self.weaver.shadow, self.state
        way: Way = "asked"
        # an alarm ends by audits; against a bound by another calibration
        ends = shadow.share or wish.max_drift is not None
        if ends and shadow.auditor.alarmed:
            plan = self.weaver.plan(state, parts, self.strategy, 0.0)
            if plan.drift != 0:
                cell = cell_of(plan, self.strategy, wish, state)
                way = "asked" if cell is None else shadow.auditor.way(cell)
        if way != "full":
            return self.strategy, wish, way
        state.woven = state.woven[: exact_prefix(state.woven)]
        return strategy("full"), Wish(1.0), way

    def weave(
        self,
        parts: Sequence[Part],
        repair: str | Strategy | None,
        share: float | None,
        max_drift: float | None,
    ) -> Plan:
        """Bring all rows up to date; with ``repair``, what is not exact anew by that strategy."""
        return self.loop.finish(self.weaving(parts, repair, share, max_drift))

    def weaving(
        self,
        parts: Sequence[Part],
        repair: str | Strategy | None,
        share: float | None,
        max_drift: float | None,
    ) -> Task[Plan]:
        """As `weave`, as a task of the loop."""
        self.pause()
        share = self.settings.share if share is None else share
        check_share(share)
        chosen = self.strategy if repair is None else strategy(repair)
        wish = self.wish(chosen, share, max_drift)
        woven = self.state.woven
        left = self.state.woven = woven[: None if repair is None else exact_prefix(woven)]
        try:
            weaving = self.weaver.prepare(self.state, parts, chosen, wish)
        except BaseException:
            if self.state.woven is left:  # no row has changed
                self.state.woven = woven
            raise
        plan = yield from self._running(weaving)
        self.strategy, self.plan = chosen, plan
        return plan

    def checking(self, parts: tuple[Part, ...]) -> Task[Check]:
        """Measure the distance to a full prefill over the rows as the last answer saw them, or, when
        parts were edited since, as they are woven now."""
        self.pause()
        require_speech(parts)
        answered, start, stop = self.answered
        plan = self.preview(parts)
        if answered != parts or _changes(plan, stop):
            start, stop = plan.n_tokens - 1, plan.n_tokens
            if plan.prefilled or plan.repaired or any(s.placed for s in plan.spans):
                yield from self.weaving(parts, None, None, None)
        elif plan.prefilled:  # the answer's last rows, behind those that it saw
            yield from self._running(self.weaver.prepare(self.state, parts, NoRepair(), Wish(0.0)))
        table, state = self.weaver.table, self.state
        tokens = np.concatenate([tokens_of(table, p).astype(np.int64) for p in parts])
        virtual = [p for p in state.woven if p.part.virtual]
        loaded = {p.part.uid: self.weaver.sources.rows_of(p.part) for p in virtual}
        whole = 0 if state.keeper is None else state.keeper.whole_from(state.rows)
        if whole >= stop:  # of the rows that are there, the last one can be computed again
            start = whole = len(tokens) - 1  # over what is left, as the next one will be
            stop = len(tokens)
        span = slice(max(start, stop - COMPARED, whole), stop)
        found: list[Check] = []

        def steps() -> Steps[None]:
            given = runs(virtual, {}, loaded)
            found.append(
                (yield from comparing(self.weaver.backend, state.rows, tokens, span, given))
            )

        yield from self._waiting(Request(new_key(), state.rows, steps(), None, state.tenant))
        return found[0]

    def fork(self, key: str) -> Session:
        """Return a session with copies of the rows. Raises OverBudget."""
        self.pause()
        twin = Session(key, self.weaver, self.maker, self.loop, self.settings)
        self.weaver.shelf.charge(key, self.state.n_bytes)
        try:
            twin.state = self.state.copy(key)
        except BaseException:
            self.weaver.shelf.charge(key, 0)
            raise
        twin.strategy, twin.plan, twin.audited = self.strategy, self.plan, self.audited
        return twin

    def close(self) -> None:
        """End what runs and let go of the rows."""
        if self.turn is not None:
            self.turn.abandon()
        if self.waits_for is not None:
            self.loop.cancel(self.waits_for)
        self.pause()
        old, self.state = self.state, self._new_state()
        old.release()
        self.weaver.shelf.charge(self.key, 0)
        self.ended()

    def wish(self, chosen: Strategy, share: float, max_drift: float | None) -> Wish:
        """Return what a weave is asked for. Raises InvalidArgument for a bound that cannot be kept."""
        bound = self.settings.max_drift if max_drift is None else max_drift
        return self.weaver.wish(self.state, chosen, share, bound)

    def _waiting(self, request: Request) -> Task[None]:
        """Wait for a request; until then nobody else may touch the rows."""
        self.waits_for = request.key
        try:
            yield request
        finally:
            self.waits_for = None
            self.loop.cancel(request.key)  # where the task was given up

    def _running(self, weaving: Weaving) -> Task[Plan]:
        """Compute the rows of a weave, and record it."""
        try:
            yield from self._waiting(weaving.request)
            self.weaver.commit(self.state, weaving)
        except BaseException:
            self.weaver.settle_account(self.state)
            raise
        finally:
            weaving.let_go()
        assert weaving.plan is not None
        if weaving.plan.repaired or _changes(weaving.plan, self.answered[2]):
            self.answered = NO_ANSWER  # its rows are not these
        return self.state.told(weaving.plan)


def _changes(plan: Plan, stop: int) -> bool:
    """Tell whether a weave writes rows before slot ``stop`` anew, or has none there."""
    ends = accumulate(span.n_tokens for span in plan.spans)
    computed = (
        end - s.n_prefilled for end, s in zip(ends, plan.spans, strict=True) if s.n_prefilled
    )
    return any(s.placed for s in plan.spans) or min(computed, default=plan.n_tokens) < stop

"""Rows that are not exact, recomputed while nobody waits: front to back, so what is done stays done.

::

    rows      [exact][stale............][stale][of an answer over them]
    pieces           |64 |64 |...
    paused    [exact][right....|stale..][stale][...]     it goes on here; a repair leaves the right ones
    at last   [exact...........................................]   nothing is approximate any more

Each piece is a request in the background: whoever asks for something runs first, and who touches the
rows of this context (`Refining.pause`) has it stop between two pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.run.base import Backend, Ints, Steps, Work
from kvweave.run.loop import Loop, Request, Task, new_key
from kvweave.weave.parts import Part, Placement, Truth, exact_prefix
from kvweave.weave.passes import SLICE, replays
from kvweave.weave.plan import Plan
from kvweave.weave.repair import NoRepair, Strategy, Wish
from kvweave.weave.state import State
from kvweave.weave.weaver import Weaver


class Refining:
    """Refines the rows of one context, which the calls bring along. That makes it not busy: an edit, or
    who asks, ends it."""

    def __init__(self, weaver: Weaver, loop: Loop) -> None:
        self._weaver, self._loop = weaver, loop
        self._request: Request | None = None  # the piece under way
        self._back: tuple[State, list[Placement]] | None = None  # what stays if it is given up

    def pause(self) -> None:
        """Stop, before somebody touches the rows; what is done stays."""
        request, self._request = self._request, None
        if request is not None:
            self._loop.cancel(request.key)
        self._give_up()

    def may(self, state: State, parts: Sequence[Part], strategy: Strategy) -> bool:
        """Tell whether there are rows to compute ahead of who asks next. Parts that have none yet are
        placed for strategies only whose repair takes rows that were there before."""
        if self._request is not None or _reason(state) or not parts:
            return False
        if not _is_up(state, parts):
            return strategy.looks or strategy.name == "none"
        return _stale(state) is not None

    def running(
        self, state: State, parts: Sequence[Part], n_most: int | None,
        changed: Callable[[Plan | None], None],
    ) -> Task[int]:  # fmt: skip
        """Recompute rows, at most ``n_most``, as a task of the loop; return how many. Rows have
        ``changed`` when that is called, with the plan of what was placed.

        It ends when somebody touches them. Raises InvalidArgument where rows cannot become exact.
        """
        if reason := _reason(state):
            hint = "open a context without prune, keep and rows"
            raise InvalidArgument("refine", reason, hint)
        self.pause()
        done = 0
        if not _is_up(state, parts) and not (yield from self._place(state, parts, changed)):
            return done
        tokens = self._weaver.tokens(state.woven)
        while n_most is None or done < n_most:
            slots = _next(state, self._weaver.backend, None if n_most is None else n_most - done)
            if slots is None or not (yield from self._waiting(_piece(state, tokens, slots))):
                break
            _note(state, slots)
            changed(None)
            done += len(slots)
        return done

    def _place(
        self, state: State, parts: Sequence[Part], changed: Callable[[Plan | None], None]
    ) -> Task[bool]:
        """Place what has no rows yet, and compute what is placed nowhere; False where it was stopped."""
        weaving = self._weaver.prepare(state, parts, NoRepair(), Wish(0.0))
        try:
            weaving.request.background, weaving.due = "refine", True
            self._back = state, [p for p in weaving.placed if p.source == "kept"]
            if not (yield from self._waiting(weaving.request)):
                return False
            self._weaver.commit(state, weaving)
            self._back = None
            changed(weaving.plan)
            return True
        finally:
            self._give_up()
            weaving.let_go()

    def _give_up(self) -> None:
        """Have what was kept of the rows count again."""
        back, self._back = self._back, None
        if back is not None:
            back[0].woven = back[1]
            self._weaver.settle_account(back[0])

    def _waiting(self, request: Request) -> Task[bool]:
        """Wait for a request; tell whether it ran to its end and nobody touched the rows since."""
        self._request = request
        try:
            yield request
            return self._request is request
        finally:
            if self._request is request:
                self._request = None
            self._loop.cancel(request.key)


def _reason(state: State) -> str:
    """Return why rows cannot become those of a full prefill in place; "" if they can."""
    if state.keeps:
        return "evict keeps what pruned chunks left"
    if state.keeper is not None or state.thinned:
        return "rows of this context were freed, or will be"
    return "rows that rest in 8 bits are never those of a full prefill" if state.rows.lossy else ""


def _is_up(state: State, parts: Sequence[Part]) -> bool:
    """Tell whether the rows are those of ``parts``, but for the last ones, which an answer left."""
    return [p.part for p in state.woven] == list(parts)


def _stale(state: State) -> Placement | None:
    """Return the first part that is not exact; None where it cannot become so, or there is none."""
    n = exact_prefix(state.woven)
    found = state.woven[n] if n < len(state.woven) else None
    return None if found is None or found.part.virtual or not found.ready else found


def _next(state: State, backend: Backend, n_most: int | None) -> Ints | None:
    """Return the next slots to recompute; None where there are none."""
    if (found := _stale(state)) is None:
        return None
    start, stop = max(found.slot, state.n_right), found.slot + found.ready
    if not replays(backend):  # there a piece goes over all that stands before it
        stop = min(stop, start + SLICE)
    return np.arange(start, stop if n_most is None else min(stop, start + n_most))  # may be none


def _piece(state: State, tokens: Ints, slots: Ints) -> Request:
    """Return what recomputes these slots."""

    def steps() -> Steps[None]:
        yield Work(state.rows, tokens[slots], slots, state.rows.positions[slots])

    return Request(new_key(), state.rows, steps(), None, state.tenant, background="refine")


def _note(state: State, slots: Ints) -> None:
    """Record that these rows are right."""
    found = _stale(state)
    assert found is not None, "nothing was to be refined"
    state.n_right = max(state.n_right, found.slot) + len(slots)
    end = state.woven[-1].slots[1]
    state.repaired = state.repaired_until(end, end)
    state.repaired[slots] = True
    if state.n_right >= found.slot + found.ready:
        state.kept.lossy.pop(found.part.uid, None)
        state.woven[state.woven.index(found)] = replace(found, truth=Truth.EXACT)

"""When requests come: as a trace says, as sessions that begin at random, or from users who wait.

::

    trace     open loop: at the trace's times, sped up; nobody waits for an answer
    poisson   sessions begin as a Poisson process; within one the next turn comes a think time after the
              answer (a partly open system: Schroeder et al., NSDI'06)
    bursty    the same with gamma gaps of deviation / mean 3
    closed    so many users, each with one session after the other

Think times are the trace's gaps, less what decoding the answer takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

from kvweave.simulate.times import draw_gap
from kvweave.simulate.trace import Request, Trace

Coming = Literal["trace", "poisson", "bursty", "closed"]
COMING: tuple[str, ...] = get_args(Coming)
CV = {"poisson": 1.0, "bursty": 3.0}


@dataclass(frozen=True)
class Arrivals:
    """How requests come; ``load`` is requests a second, for ``closed`` the number of users."""

    kind: Coming
    load: float
    seed: int = 0


@dataclass
class Visit:
    """A session: its requests, and how long after the end of the one before each comes."""

    turns: deque[tuple[float, Request]] = field(default_factory=deque)


class Visitors:
    """Hands out requests as time goes."""

    def __init__(self, trace: Trace, arrivals: Arrivals, decode: float) -> None:
        self.arrivals, self._trace = arrivals, trace
        self._visits = deque(visits(trace, decode))
        self._open: dict[int, Visit] = {}  # by the request that is under way
        self.until = 0.0  # when the last session began, as far as is known

    def begin(self) -> list[tuple[float, Request]]:
        """Return what comes whatever happens, with times in seconds."""
        kind, load = self.arrivals.kind, self.arrivals.load
        rng = Random(self.arrivals.seed)
        if kind == "trace":
            asked = [r for r in self._trace.requests if r.blocks]
            first, span = asked[0].time, asked[-1].time - asked[0].time
            slower = len(asked) / load / span if span else 0.0
            self.until = span * slower
            return [(max(0.0, r.time - first) * slower, r) for r in self._trace.requests]
        if kind == "closed":
            thinking = [gap for visit in self._visits for gap, _ in list(visit.turns)[1:]]
            mean = sum(thinking) / len(thinking) if thinking else 1.0
            starts = [rng.uniform(0, mean) for _ in range(int(load))]
            return [self._next_visit(at) for at in starts if self._visits]
        n_requests = sum(bool(r.blocks) for r in self._trace.requests)
        gap = n_requests / len(self._visits) / load
        found, now = [], 0.0
        while self._visits:
            now += draw_gap(rng, gap, CV[kind])
            found.append(self._next_visit(now))
        return found

    def answered(self, request: Request, now: float) -> list[tuple[float, Request]]:
        """Return what comes because a request was answered (or declared) at ``now``."""
        visit = self._open.pop(id(request), None)
        if visit is None:
            return []
        if visit.turns:
            return [self._turn(visit, now)]
        return [self._next_visit(now)] if self.arrivals.kind == "closed" and self._visits else []

    def _next_visit(self, now: float) -> tuple[float, Request]:
        self.until = max(self.until, now)
        return self._turn(self._visits.popleft(), now)

    def _turn(self, visit: Visit, now: float) -> tuple[float, Request]:
        gap, request = visit.turns.popleft()
        self._open[id(request)] = visit
        return now + gap, request


def visits(trace: Trace, decode: float) -> list[Visit]:
    """Return the sessions of a trace in the order in which they begin; a nameless request is one."""
    found: list[Visit] = []
    named: dict[str, Visit] = {}
    ends: dict[str, float] = {}
    for request in trace.requests:
        visit = named.get(request.session) if request.session else None
        if visit is None:
            visit = Visit()
            found.append(visit)
            if request.session:
                named[request.session] = visit
        gap = request.time - ends.get(request.session, request.time) if visit.turns else 0.0
        visit.turns.append((max(0.0, gap), request))
        ends[request.session] = request.time + request.n_output * decode
    return found

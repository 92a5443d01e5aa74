"""One worker: its address, whether it is there, and what runs on it.

::

    up --fails n times, or refuses a connection--> down --a probe succeeds--> up
    any --drain--> draining (what runs goes on, nothing new comes) --undrain--> as probed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from kvweave.simulate.cost import Cost

# vllm: a vLLM with kvweave in it, which has chunks and no contexts; prefix: reuses prefixes only
WorkerKind = Literal["unknown", "kvweave", "vllm", "prefix"]


STEADY = 0.9  # how much of a slowness stays when an answer shows another


@dataclass(eq=False)
class WorkerJob:
    """A request that a worker has. ``seconds`` it is to compute until the first token, as costs have them,
    and ``queued`` before that for others."""

    seconds: float
    queued: float = 0.0
    begun: bool = False  # the first byte of its answer came
    since: float = field(default_factory=lambda: time.monotonic())


@dataclass(eq=False)
class Worker:
    """A worker as the router sees it. Times in seconds."""

    url: str
    failures_allowed: int = 2
    healthy: bool = True  # until a probe says otherwise: the first request need not wait for one
    draining: bool = False
    kind: WorkerKind = "unknown"
    jobs: list[WorkerJob] = field(default_factory=list)
    failures: int = 0  # probes in a row
    elsewhere: int = 0  # requests that it has from others
    slowness: float = 1.0  # times that it takes as long as costs say
    why: str = ""  # it is down
    answered: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # probes say it is down
    _others: int = 0  # as the last probe said

    @property
    def name(self) -> str:
        """``host:port``."""
        return self.url.split("://", 1)[1]

    @property
    def number(self) -> int:
        """What hashing knows it by; the same in every router."""
        return int.from_bytes(blake2b(self.url.encode(), digest_size=6).digest())

    @property
    def takes(self) -> bool:
        """Whether new work may go there."""
        return self.healthy and not self.draining

    @property
    def state(self) -> str:
        """``up``, ``draining`` or ``down``."""
        return "down" if not self.healthy else "draining" if self.draining else "up"

    @property
    def load(self) -> int:
        """Requests that wait or run there."""
        return len(self.jobs) + self.elsewhere

    @property
    def backlog(self) -> float:
        """Seconds, as costs have them, that it still computes for those who wait for a first token."""
        now = time.monotonic()
        waiting = [job for job in self.jobs if not job.begun]
        mean = sum(job.seconds for job in waiting) / len(waiting) if waiting else 0.0
        left = (job.seconds - (now - job.since) / self.slowness for job in waiting)
        return sum(max(0.0, seconds) for seconds in left) + self.elsewhere * mean

    def busy(self, n: int) -> None:
        """A probe said that it has ``n`` requests. More than ours are others', if the next one says so too:
        while a probe is under way, ours come and go."""
        others = max(0, n - len(self.jobs))
        self.elsewhere, self._others = min(others, self._others), others

    def first(self, job: WorkerJob) -> None:
        """The first byte of an answer came: learn how long that takes here."""
        job.begun = True
        if job.seconds > 0:
            took = (time.monotonic() - job.since) / (job.queued + job.seconds)
            self.slowness = STEADY * self.slowness + (1 - STEADY) * min(max(took, 0.1), 100.0)

    @contextmanager
    def job(self, seconds: float = 0.0) -> Iterator[WorkerJob]:
        """Count a request while it is there."""
        made = WorkerJob(seconds, self.backlog)
        self.jobs.append(made)
        try:
            yield made
        finally:
            self.jobs.remove(made)

    def succeeded(self) -> bool:
        """A probe succeeded; tell whether it was down."""
        was_down, self.failures, self.healthy, self.why = not self.healthy, 0, True, ""
        self.lost.clear()
        return was_down

    def failed(self, why: str, *, at_once: bool = False) -> bool:
        """A probe or a connection failed; tell whether it is down since now."""
        self.failures += 1
        self.why = why
        if not at_once and self.failures >= self.failures_allowed:
            self.lost.set()
        if self.healthy and (at_once or self.failures >= self.failures_allowed):
            self.healthy = False
            return True
        return False


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker as `kvweave.simulate.route` asks about it, for one request."""

    worker: Worker
    cost: Cost
    tiers: dict[int, str]  # of the request's prints that are there
    crowd: float = 0.0  # requests that a worker has, on average

    @property
    def number(self) -> int:
        """As the worker's."""
        return self.worker.number

    @property
    def load(self) -> int:
        """As the worker's."""
        return self.worker.load

    def backlog(self, now: float) -> float:
        """Return the seconds that a request would wait, as they weigh against seconds of computing.

        Waiting is the request's own; what is computed twice keeps everybody there waiting. Without that
        weight conversations move to whoever is free for a moment, and all of them are computed again.
        """
        return self.worker.backlog / (1 + self.crowd)

    def where(self, id: int) -> str:
        """Return the tier of a print, ``none`` for none."""
        return self.tiers.get(id, "none")

"""One node: a queue, a device that prefills one request at a time, and slots that decode.

::

    arrives -> waits -> slot and device free: loads, repairs, prefills -> first token -> decodes
                                                                              -> canonical KV, later

A slot is taken from the start of the prefill to the end of the answer. Decoding takes the same time
however many decode, and does not slow down prefill. Canonical KV is computed when no request waits,
in pieces that the next request has to wait for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvweave.simulate.cost import Cost
from kvweave.simulate.play import Played, Player
from kvweave.simulate.trace import Request, Trace

PIECE = 512  # tokens of one pass, as in the engine's maker
AHEAD = 16  # waiting requests that policies are told of


@dataclass
class Queued:
    """A request on its way. Times in seconds."""

    request: Request
    arrived: float
    started: float = 0.0
    first: float = 0.0
    played: Played | None = None


class Node:
    """One engine; who is served when is told by the cluster's clock."""

    def __init__(self, number: int, player: Player, trace: Trace, slots: int) -> None:
        self.number, self.player, self.trace, self.slots = number, player, trace, slots
        self.waiting: deque[Queued] = deque()
        self.decoding = 0
        self.free_at = 0.0
        self.later = 0.0  # seconds of canonical KV still to compute
        self.served = 0
        self.busy = 0.0  # seconds of the device with requests
        self.filled = 0.0  # and with canonical KV

    @property
    def cost(self) -> Cost:
        return self.player.cost

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + self.decoding

    def backlog(self, now: float) -> float:
        """Return about how many seconds a request would wait for the device."""
        mean = self.busy / self.served if self.served else 0.0
        return max(0.0, self.free_at - now) + len(self.waiting) * mean

    def where(self, id: int) -> str:
        """Return the tier that has a chunk, ``none`` for none."""
        return self.player.store.where(id)

    def start(self, now: float) -> Queued | None:
        """Begin the next request if the device is free and so is a slot; `free_at` says when it ends."""
        if self.free_at > now or not self.waiting or self.decoding >= self.slots:
            return None
        store = self.player.store
        ahead = [self.waiting[i] for i in range(min(AHEAD, len(self.waiting)))]
        store.shelf.upcoming(id for job in ahead for id in job.request.blocks)
        job = self.waiting.popleft()
        self.decoding += 1
        store.at(now)
        job.started = now
        job.played = played = self.player.prompt(job.request, self.trace, _nothing)
        seconds = self.cost.together(played.prefill + played.repair, sum(played.loads.values()))
        self.free_at = job.first = now + seconds
        self.busy += seconds
        self.served += 1
        return job

    def fill(self, now: float) -> bool:
        """Compute a piece of what is left for later, if nobody can begin; tell whether it was."""
        if self.free_at > now or self.later <= 0:
            return False
        seconds = min(self.later, self.cost.prefill(0, PIECE))
        self.later = self.later - seconds if self.later > seconds else 0.0
        self.free_at = now + seconds
        self.filled += seconds
        return True

    def end(self, job: Queued) -> None:
        """Store the answer; its canonical KV, and that of what was prefilled, is for later."""
        assert job.played is not None
        self.decoding -= 1
        canonical = job.played.canonical + self.player.answer(job.request, self.trace, _nothing)
        job.played.canonical = canonical
        self.later += canonical


def _nothing() -> None:
    pass

"""Nodes behind a router, with queues: times to the first token under a load, and the load an SLO allows.

A simulation of events. Each node has tiers of its own; nothing is shared between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

from kvweave.errors import InvalidArgument, nearest
from kvweave.keep import POLICIES
from kvweave.simulate.arrive import Arrivals, Visitors, visits
from kvweave.simulate.bill import Prices, bill, wear
from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.simulate.node import Node, Queued
from kvweave.simulate.play import Hits, Player
from kvweave.simulate.replaying import Result, counted, percentile, replay, require_policy
from kvweave.simulate.route import ROUTERS, Router
from kvweave.simulate.trace import Request, Trace, prefix_chained

_Event = tuple[float, int, Literal["comes", "first", "ends", "free"], Request | Queued | None, int]
STEPS, RANGE = (
    7,
    64.0,
)  # of the search for the largest load: to 3 %, this far below what is possible


@dataclass(frozen=True)
class Setup:
    """What is served with."""

    policy: str
    tiers: Sequence[Tier]  # of every node
    cost: Cost = DEFAULT
    hits: Hits = "chunks"
    nodes: int = 1
    slots: int = 64  # requests that decode together on a node
    router: str = "rendezvous"
    warmup: float = 0.3  # of the time in which sessions begin, that does not count
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        require_policy(self.policy)
        if self.policy == "belady":
            raise InvalidArgument("policy", "the oracle knows no queue", "use it without a load")
        if self.router not in ROUTERS:
            near = nearest(self.router, list(ROUTERS), 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(ROUTERS)}"
            raise InvalidArgument("router", f"no router {self.router!r}", hint)


@dataclass
class Served:
    """What serving a trace came to. Times in seconds.

    Times and rates are of the requests that came in a window: after the warm-up, and before the last
    session began, since from then on the load goes down. All else is of the whole run.
    """

    setup: Setup
    arrivals: Arrivals
    result: Result  # of all nodes; its times to the first token have the queue in them
    waited: list[float] = field(default_factory=list, repr=False)
    per_node: list[int] = field(default_factory=list)  # requests
    busy: float = 0.0  # seconds of the devices, with canonical KV
    rate: float = 0.0  # requests a second that came in the window

    @property
    def utilisation(self) -> float:
        """The part of its time that a device is busy at this rate; over 1 it falls behind."""
        return self.busy / self.result.requests * self.rate / self.setup.nodes

    def keeps(self, slo: float, share: float = 0.99) -> bool:
        """Tell whether ``share`` of the requests had their first token in ``slo`` seconds, and the
        devices kept up, with what is computed behind answers too."""
        return self.utilisation < 1 and percentile(self.result.ttft, share) <= slo

    def to_dict(self, slo: float | None = None) -> dict[str, object]:
        """Return figures, JSON-ready."""
        found = self.result.to_dict()
        for name in ("requests_per_s", "tiers_per_month", "tiers_per_million_requests"):
            del found[name]
        found |= {
            "nodes": self.setup.nodes,
            "router": self.setup.router,
            "arrivals": self.arrivals.kind,
            "load": round(self.arrivals.load, 4),
            "requests_per_s": round(self.rate, 4),
            "wait_s": {
                "p50": round(percentile(self.waited, 0.5), 6),
                "p99": round(percentile(self.waited, 0.99), 6),
            },
            "utilisation": round(self.utilisation, 4),
            "per_node": self.per_node,
            "dollars": bill(self.result, self.rate, self.setup.nodes, self.setup.prices),
            "wear": wear(self.result, self.rate, self.setup.nodes),
        }
        if slo is not None:
            within = sum(t <= slo for t in self.result.ttft) / len(self.result.ttft)
            found |= {"slo_s": slo, "within_slo": round(within, 6), "keeps_slo": self.keeps(slo)}
        return found


class Fleet:
    """Nodes, the router before them, and the clock."""

    def __init__(
        self, trace: Trace, setup: Setup, arrivals: Arrivals, router: Router | None = None
    ) -> None:
        trace = prefix_chained(trace) if setup.hits == "prefix" else trace
        self.trace, self.setup, self.arrivals = trace, setup, arrivals
        self.router = ROUTERS[setup.router](setup.tiers) if router is None else router
        self.nodes = [
            Node(i, Player(setup.tiers, POLICIES[setup.policy], setup.cost, setup.hits), trace, setup.slots)
            for i in range(setup.nodes)
        ]  # fmt: skip
        self.visitors = Visitors(trace, arrivals, setup.cost.decode)
        self.served = Served(setup, arrivals, Result(setup.policy, list(setup.tiers)))
        self._events: list[_Event] = []
        self._serial = 0
        self._jobs: list[Queued] = []
        self._now = 0.0

    def run(self) -> Served:
        """Serve everything that comes."""
        try:
            for at, request in self.visitors.begin():
                self._at(at, "comes", request)
            while self._events:
                self._now, _, what, about, number = heappop(self._events)
                if isinstance(about, Request):
                    self._comes(about)
                elif isinstance(about, Queued):
                    self._first(about, number) if what == "first" else self._ends(about, number)
                else:
                    self._go_on(self.nodes[number])
        finally:
            for node in self.nodes:
                node.player.store.close()
        return self._summed()

    def _at(
        self,
        time: float,
        what: Literal["comes", "first", "ends", "free"],
        about: Request | Queued | None = None,
        number: int = 0,
    ) -> None:
        self._serial += 1
        heappush(self._events, (time, self._serial, what, about, number))

    def _comes(self, request: Request) -> None:
        if not request.blocks:  # declarations only
            self._declare(request)
            return
        number = self.router.choose(request, self.nodes, self._now) if len(self.nodes) > 1 else 0
        self.nodes[number].waiting.append(Queued(request, self._now))
        self._go_on(self.nodes[number])

    def _go_on(self, node: Node) -> None:
        """Give a free device something to do."""
        job = node.start(self._now)
        if job is not None:
            self._at(job.first, "first", job, node.number)
        elif node.fill(self._now):
            self._at(node.free_at, "free", None, node.number)

    def _first(self, job: Queued, number: int) -> None:
        self._jobs.append(job)
        self._at(self._now + job.request.n_output * self.setup.cost.decode, "ends", job, number)
        self._go_on(self.nodes[number])

    def _ends(self, job: Queued, number: int) -> None:
        self.nodes[number].end(job)
        self._declare(job.request)
        self._go_on(self.nodes[number])

    def _declare(self, request: Request) -> None:
        for node in self.nodes:
            node.player.declare(request)
        for at, following in self.visitors.answered(request, self._now):
            self._at(at, "comes", following)

    def _summed(self) -> Served:
        served, result, cost = self.served, self.served.result, self.setup.cost
        for job in self._jobs:
            assert job.played is not None
            result.add(job.played, cost)
        begin, end = self.setup.warmup * self.visitors.until, self.visitors.until
        counts = [job for job in self._jobs if begin <= job.arrived <= end] or self._jobs
        result.ttft = [job.first - job.arrived for job in counts]
        served.waited = [job.started - job.arrived for job in counts]
        served.rate = len(counts) / max(end - begin, 1e-9)
        served.per_node = [node.served for node in self.nodes]
        served.busy = sum(node.busy + node.filled for node in self.nodes)
        counted(result, [node.player for node in self.nodes])
        return served


def serve(trace: Trace, setup: Setup, arrivals: Arrivals, router: Router | None = None) -> Served:
    """Serve a trace as it comes, by ``setup.router`` or one of your own."""
    return Fleet(trace, setup, arrivals, router).run()


def largest_load(trace: Trace, setup: Setup, arrivals: Arrivals, slo: float) -> Served | None:
    """Return what serving came to at the largest load that keeps an SLO; None if none that was tried
    does.

    ``slo`` are seconds to the first token for 99 % of the requests. Searched by bisection between what
    the busiest resource could serve without queues and a small part of it.
    """
    most = replay(trace, setup.policy, setup.tiers, setup.cost, setup.hits).throughput
    high, low, best = most * setup.nodes, most * setup.nodes / RANGE, None
    if arrivals.kind == "closed":
        high, low = float(len(visits(trace, 0.0))), 1.0
    for _ in range(STEPS):
        load = (low * high) ** 0.5
        load = float(round(load)) if arrivals.kind == "closed" else load
        served = serve(trace, setup, replace(arrivals, load=load))
        if served.keeps(slo):
            low, best = load, served
        else:
            high = load
    return best

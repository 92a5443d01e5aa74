"""Nodes behind a router, with queues: times to the first token under a load, and the load an SLO allows.

A simulation of events. Each node has tiers of its own; nothing is shared between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

from kvweave.errors import InvalidArgument, nearest
from kvweave.keep import POLICIES
from kvweave.simulate.arrive import Arrivals, Source, visits
from kvweave.simulate.bill import Prices, bill, wear
from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.simulate.node import Job, Node
from kvweave.simulate.play import Hits, Player
from kvweave.simulate.replay import Result, counted, percentile, replay, require_policy
from kvweave.simulate.route import ROUTERS, Router
from kvweave.simulate.trace import Request, Trace

Event = tuple[float, int, Literal["comes", "first", "ends", "free"], Request | Job | None, int]
STEPS, RANGE = 7, 64.0  # of the search for the largest load: to 3 %, this far below what is possible
BEHIND = 0.05  # of the time: more canonical KV than this left to compute is too much


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
    warmup: float = 0.1  # of the requests, whose times do not count
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
    """What serving a trace came to. Times in seconds."""

    setup: Setup
    arrivals: Arrivals
    result: Result  # of all nodes; its times to the first token have the queue in them
    waited: list[float] = field(default_factory=list, repr=False)
    per_node: list[int] = field(default_factory=list)  # requests
    busy: float = 0.0  # of the devices, with canonical KV
    later: float = 0.0  # canonical KV that was not computed by the end
    span: float = 0.0  # from the first request to the last first token

    @property
    def rate(self) -> float:
        """Requests a second that were served."""
        return self.result.requests / self.span

    def keeps(self, slo: float, share: float = 0.99) -> bool:
        """Tell whether ``share`` of the requests had their first token in ``slo`` seconds, and the
        devices kept up with what is computed behind answers."""
        kept_up = self.later <= BEHIND * self.span * self.setup.nodes
        return kept_up and percentile(self.result.ttft, share) <= slo

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
            "span_s": round(self.span, 1),
            "wait_s": {
                "p50": round(percentile(self.waited, 0.5), 6),
                "p99": round(percentile(self.waited, 0.99), 6),
            },
            "busy": round(self.busy / self.span / self.setup.nodes, 4),
            "later_s": round(self.later, 2),
            "per_node": self.per_node,
            "dollars": bill(self.result, self.span, self.setup.nodes, self.setup.prices),
            "wear": wear(self.result, self.span, self.setup.nodes),
        }
        if slo is not None:
            within = sum(t <= slo for t in self.result.ttft) / len(self.result.ttft)
            found |= {"slo_s": slo, "within_slo": round(within, 6), "keeps_slo": self.keeps(slo)}
        return found


class Cluster:
    """Nodes, the router before them, and the clock."""

    def __init__(
        self, trace: Trace, setup: Setup, arrivals: Arrivals, router: Router | None = None
    ) -> None:
        self.trace, self.setup, self.arrivals = trace, setup, arrivals
        self.router = ROUTERS[setup.router](setup.tiers) if router is None else router
        self.nodes = [
            Node(i, Player(setup.tiers, POLICIES[setup.policy], setup.cost, setup.hits), trace, setup.slots)
            for i in range(setup.nodes)
        ]  # fmt: skip
        self.source = Source(trace, arrivals, setup.cost.decode)
        self.served = Served(setup, arrivals, Result(setup.policy, list(setup.tiers)))
        self._events: list[Event] = []
        self._serial = 0
        self._jobs: list[Job] = []
        self._now = 0.0

    def run(self) -> Served:
        """Serve everything that comes."""
        try:
            for at, request in self.source.begin():
                self._at(at, "comes", request)
            while self._events:
                self._now, _, what, about, number = heappop(self._events)
                if isinstance(about, Request):
                    self._comes(about)
                elif isinstance(about, Job):
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
        about: Request | Job | None = None,
        number: int = 0,
    ) -> None:
        self._serial += 1
        heappush(self._events, (time, self._serial, what, about, number))

    def _comes(self, request: Request) -> None:
        if not request.blocks:  # declarations only
            self._declare(request)
            return
        number = self.router.choose(request, self.nodes, self._now) if len(self.nodes) > 1 else 0
        self.nodes[number].waiting.append(Job(request, self._now))
        self._go_on(self.nodes[number])

    def _go_on(self, node: Node) -> None:
        """Give a free device something to do."""
        job = node.start(self._now)
        if job is not None:
            self._at(job.first, "first", job, node.number)
        elif node.fill(self._now):
            self._at(node.free_at, "free", None, node.number)

    def _first(self, job: Job, number: int) -> None:
        self._jobs.append(job)
        self._at(self._now + job.request.n_output * self.setup.cost.decode, "ends", job, number)
        self._go_on(self.nodes[number])

    def _ends(self, job: Job, number: int) -> None:
        self.nodes[number].end(job)
        self._declare(job.request)
        self._go_on(self.nodes[number])

    def _declare(self, request: Request) -> None:
        for node in self.nodes:
            node.player.declare(request)
        for at, following in self.source.answered(request, self._now):
            self._at(at, "comes", following)

    def _summed(self) -> Served:
        served, result, cost = self.served, self.served.result, self.setup.cost
        for job in self._jobs:
            assert job.played is not None
            result.add(job.played, cost)
        late = sorted(self._jobs, key=lambda job: job.arrived)
        late = late[int(self.setup.warmup * len(late)) :]
        result.ttft = [job.first - job.arrived for job in late]
        served.waited = [job.started - job.arrived for job in late]
        served.per_node = [node.served for node in self.nodes]
        served.busy = sum(node.busy + node.filled for node in self.nodes)
        served.later = sum(node.later for node in self.nodes)
        served.span = max(job.first for job in self._jobs) - min(j.arrived for j in self._jobs)
        served.span = max(served.span, 1e-9)
        counted(result, [node.player for node in self.nodes])
        return served


def serve(
    trace: Trace, setup: Setup, arrivals: Arrivals, router: Router | None = None
) -> Served:
    """Serve a trace as it comes, by ``setup.router`` or one of your own."""
    return Cluster(trace, setup, arrivals, router).run()


def largest_load(
    trace: Trace,
    setup: Setup,
    arrivals: Arrivals,
    slo: float,
    keeps: Callable[[Served, float], bool] = Served.keeps,
) -> Served | None:
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
        if keeps(served, slo):
            low, best = load, served
        else:
            high = load
    return best

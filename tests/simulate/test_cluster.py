"""Queues against queueing theory, routers and bills by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvweave.cli.simulate_arguments import COMING as COMING_ARGUMENTS
from kvweave.cli.simulate_arguments import ROUTERS as ROUTER_ARGUMENTS
from kvweave.errors import InvalidArgument
from kvweave.simulate import (
    Arrivals,
    Cost,
    Request,
    Setup,
    Tier,
    Trace,
    generate,
    largest_load,
    serve,
)
from kvweave.simulate.arrive import COMING, visits
from kvweave.simulate.bill import Prices, bill, wear
from kvweave.simulate.generate import Shape
from kvweave.simulate.replaying import Result, percentile
from kvweave.simulate.route import ROUTERS, NodeView
from kvweave.simulate.store import Moved
from kvweave.simulate.trace import Made

RAM = Tier("ram", 10**6, 1e9, 1.0)
SECOND = Cost(seconds=1.0, doubles_at=10**12, token_bytes=1, repair=0.0, decode=0.0)


def strangers(n: int, n_output: int = 0) -> Trace:
    """Requests of one token that nobody asked for before."""
    made = [Request(float(i), n_output, (i,), (1,), ("",)) for i in range(n)]
    return Trace(made, 0)


def served_with(cost: Cost = SECOND, **more: Any) -> Setup:
    return Setup("lru", [RAM], cost, "prefix", **more)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_wait_is_pollaczek_and_khinchines(load: float) -> None:
    # Poisson arrivals, one second of service: the mean wait is load / (2 (1 - load))
    waits = [
        sum(s.waited) / len(s.waited)
        for s in (
            serve(strangers(4000), served_with(), Arrivals("poisson", load, i)) for i in range(3)
        )
    ]
    assert sum(waits) / 3 == pytest.approx(load / (2 * (1 - load)), rel=0.1)


def test_bursts_wait_longer_and_a_slot_is_held_to_the_end_of_the_answer() -> None:
    calm = serve(strangers(3000), served_with(), Arrivals("poisson", 0.3))
    bursts = serve(strangers(3000), served_with(), Arrivals("bursty", 0.3))
    assert sum(bursts.waited) > 3 * sum(calm.waited)
    assert calm.rate == pytest.approx(0.3, rel=0.1) and calm.utilisation == pytest.approx(calm.rate)
    # one slot, and an answer of one more second: service is two seconds
    slow = replace(SECOND, decode=1.0)
    one = serve(strangers(4000, 1), served_with(slow, slots=1), Arrivals("poisson", 0.3))
    assert sum(one.waited) / len(one.waited) == pytest.approx(0.6 / (2 * 0.4) * 2, rel=0.2)
    many = serve(strangers(3000, 1), served_with(slow), Arrivals("poisson", 0.3))
    assert many.waited == calm.waited


def test_users_in_a_closed_loop_wait_for_answers_and_think() -> None:
    session = [Request(i * 12.0, 2, (0,), (1,), ("",), "s") for i in range(50)]
    # 2 tokens of answer at 1 s: think times are 10 s; one second of prefill, once
    cost = replace(SECOND, decode=1.0)
    assert [gap for gap, _ in visits(Trace(session, 0), 1.0)[0].turns] == [0.0] + [10.0] * 49
    alone = serve(Trace(session, 0), served_with(cost), Arrivals("closed", 1.0))
    assert alone.waited == [0.0] * len(alone.waited) and alone.result.requests == 50
    assert alone.result.hit_blocks == 49
    last = serve(Trace(session, 0), served_with(cost), Arrivals("trace", 1.0))
    assert last.result.requests == 50 and last.rate == pytest.approx(1.0, rel=0.05)


def test_canonical_kv_is_computed_when_nobody_waits() -> None:
    asked = [Request(float(10 * i), 1, (i,), (2,), ("",), "", made=(Made(100 + i, 3, ""),)) for i in range(4)]  # fmt: skip
    setup = Setup("lru", [RAM], SECOND, "chunks")
    served = serve(Trace(asked, 0), setup, Arrivals("trace", 0.1))
    assert served.result.canonical == pytest.approx(4 * (2 + 3))
    assert served.result.prefill == pytest.approx(4 * 2)
    assert served.busy == pytest.approx(4 * (2 + 2 + 3)) and set(served.waited) == {0.0}
    assert served.utilisation == pytest.approx(7 * served.rate)
    # at once: each waits for prefills, and for a piece of canonical KV at most once
    rush = serve(Trace(asked, 0), setup, Arrivals("trace", 10.0))
    assert 3 * 2 - 1 < max(rush.waited) <= 3 * 2 + 5


@pytest.mark.slow
def test_the_largest_load_is_the_largest() -> None:
    trace = strangers(1500)
    best = largest_load(trace, served_with(), Arrivals("poisson", 1.0), slo=4.0)
    assert best is not None and percentile(best.result.ttft, 0.99) <= 4.0
    more = serve(trace, served_with(), replace(best.arrivals, load=best.arrivals.load * 1.15))
    assert not more.keeps(4.0)
    assert largest_load(trace, served_with(), Arrivals("poisson", 1.0), slo=0.5) is None
    users = largest_load(generate(Shape(sessions=4), 1), Setup("lru", [RAM]), Arrivals("closed", 1.0), 60.0)  # fmt: skip
    assert users is not None and 1 <= users.arrivals.load <= 4


@dataclass
class Seen:
    """A node as a router sees it."""

    load: int = 0
    has: set[int] = field(default_factory=set)
    cost: Cost = SECOND
    number: int = 0

    def backlog(self, now: float) -> float:
        return float(self.load)

    def where(self, id: int) -> str:
        return "ram" if id in self.has else "none"


def ask(*ids: int) -> Request:
    return Request(0, 0, ids, tuple(10 if id < 100 else 1 for id in ids), ("",) * len(ids))


def chosen(name: str, nodes: Sequence[NodeView], *requests: Request) -> list[int]:
    router = ROUTERS[name]([RAM])
    return [router.choose(request, nodes, 0.0) for request in requests]


def test_routers_by_hand() -> None:
    three = [Seen(n, number=i) for i, n in enumerate((2, 0, 1))]
    assert chosen("round_robin", three, *[ask(1)] * 4) == [0, 1, 2, 0]
    assert chosen("least_loaded", three, ask(1)) == [1]
    # a prefix goes where it went; another prompt to the least loaded, whatever it shares further back
    assert chosen("prefix", three, ask(1, 2), ask(3, 1, 2), ask(1, 2, 3)) == [1, 1, 1]
    router = ROUTERS["prefix"]([RAM])
    nodes = [Seen(0, number=0), Seen(9, number=1)]
    assert router.choose(ask(1, 2), nodes, 0.0) == 0
    assert router.choose(ask(1, 2), [nodes[1]], 0.0) == 0, "where it went is not there now"
    assert router.choose(ask(1, 2), nodes, 0.0) == 1, "and has gone elsewhere since"
    nodes.reverse()
    assert router.choose(ask(1, 2), nodes, 0.0) == 0, "a node is its number, not its place"
    nodes = [Seen(0, number=0), Seen(9, number=1)]
    router = ROUTERS["prefix"]([RAM])
    assert router.choose(ask(1, 2), nodes, 0.0) == 0
    nodes[0].load = 60
    assert router.choose(ask(1, 2, 3), nodes, 0.0) == 0
    assert router.choose(ask(3, 1, 2), nodes, 0.0) == 1
    nodes[0].load = 90
    assert router.choose(ask(1, 2, 3), nodes, 0.0) == 1, "loads are uneven"
    # chunks anywhere: 20 tokens of prefill are worth a queue of 15 seconds, not of 25
    there = [Seen(15, {2, 3}), Seen(0)]
    assert chosen("chunk_sets", there, ask(1, 2, 3)) == [0]
    there[0].load = 25
    assert chosen("chunk_sets", there, ask(1, 2, 3)) == [1]


def test_rendezvous_stays_with_the_heaviest_set_within_its_bound() -> None:
    idle: list[NodeView] = [Seen(number=i) for i in range(4)]
    owners = chosen("rendezvous", idle, *(ask(id) for id in range(40)))
    assert {owners.count(node) for node in range(4)} <= set(range(3, 20)), "about even"
    a, b = (next(i for i in range(40) if owners[i] == node) for node in (1, 2))
    light = next(i for i in range(100, 200) if chosen("rendezvous", idle, ask(i)) == [2])
    assert chosen("rendezvous", idle, ask(a, light), ask(light, a)) == [1, 1]
    assert chosen("rendezvous", idle, ask(b, light)) == [2]
    for gone in (3, 0):  # one node less, wherever it stood, moves only what it had
        left = [node for node in idle if node.number != gone]
        fewer = chosen("rendezvous", left, *(ask(id) for id in range(40)))
        stayed = [
            left[now].number == was for now, was in zip(fewer, owners, strict=True) if was != gone
        ]
        assert all(stayed)
    busy: list[NodeView] = [Seen(n, number=i) for i, n in enumerate((1, 3, 1, 1))]
    assert chosen("rendezvous", busy, ask(a)) != [1], "over 1.25 of the mean"


@pytest.mark.slow
def test_nodes_share_the_load_and_declarations_reach_all() -> None:
    trace = generate(Shape(sessions=5), 2)
    total = trace.unique_tokens() * Cost().token_bytes
    tiers = [
        Tier("ram", total // 20, 20e9, 3.0),
        Tier("disk", total // 5, 3e9, 0.1, drive_writes=1),
    ]
    for router in ROUTERS:
        served = serve(
            trace, Setup("declared", tiers, nodes=3, router=router), Arrivals("poisson", 2.0)
        )
        assert sum(served.per_node) == served.result.requests == sum(bool(r.blocks) for r in trace.requests)  # fmt: skip
        found = served.to_dict(slo=1.0)
        assert found["router"] == router and 0 <= found["within_slo"] <= 1  # type: ignore[operator]
    assert (*ROUTERS,) == ROUTER_ARGUMENTS and COMING == COMING_ARGUMENTS


class Last:
    """A router of one's own."""

    name = "last"

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        return len(nodes) - 1


def test_a_router_can_be_brought_along() -> None:
    served = serve(strangers(20), served_with(nodes=3), Arrivals("poisson", 1.0), Last())
    assert served.per_node == [0, 0, 20]


def test_bills_and_wear_by_hand() -> None:
    far = Tier("remote", 10**12, 1e9, 0.073, egress=0.5, reads=0.4, writes=5.0)
    disk = Tier("disk", 10**9, 1e9, 7.3, drive_writes=2.0)
    result = Result("lru", [RAM, disk, far], requests=1000)
    result.moved = {"disk": Moved(0, 0, 10**10, 9), "remote": Moved(4 * 10**9, 10**6, 0, 2 * 10**6)}
    found = bill(result, 2.0, 2, Prices(node=3.0))  # 7.2 thousand requests an hour
    assert found["nodes"] == 6.0 and found["egress"] == pytest.approx(7.2 * 2)
    assert found["tiers"] == pytest.approx(2 * (0.073 * 1000 + 7.3) / 730, rel=1e-3)
    assert found["requests"] == pytest.approx(7.2 * (0.4 + 10))
    total = sum(found[name] for name in ("nodes", "tiers", "egress", "requests"))
    assert found["per_hour"] == pytest.approx(total)
    assert found["per_thousand_requests"] == pytest.approx(total / 7.2)
    # 10 MB a request, 1 request a second and node: 864 drives a day, rated 2 a day for five years
    assert wear(result, 2.0, 2) == {
        "disk": {"drive_writes_a_day": 864.0, "rated": 2.0, "years": round(10 / 864, 3)}
    }


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="oracle"):
        Setup("belady", [RAM])
    with pytest.raises(InvalidArgument, match="rendezvos"):
        Setup("lru", [RAM], router="rendezvos")
    with pytest.raises(InvalidArgument, match="no policy"):
        Setup("lur", [RAM])

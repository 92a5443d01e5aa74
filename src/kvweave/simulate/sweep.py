"""Many sizes of tiers: which are worth their price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvweave.simulate.arrive import Arrivals
from kvweave.simulate.cluster import Served, Setup, serve
from kvweave.simulate.cost import HOURS, Tier
from kvweave.simulate.replaying import Result
from kvweave.simulate.trace import Trace

Aims = tuple[float, float, float]  # less is better in each


@dataclass(frozen=True)
class Point:
    """One choice of tiers and policy, and what it comes to."""

    result: Result
    price: float  # $ an hour, for tiers and, under a load, nodes
    ttft: float  # seconds: the mean, and under a load the 99th percentile
    throughput: float  # requests a second that are possible, and under a load that came
    served: Served | None = None

    @classmethod
    def of(cls, found: Result | Served) -> Point:
        """Return the point of a replay, or of a trace that was served."""
        if isinstance(found, Result):
            return cls(found, found.monthly / HOURS, found.mean_ttft, found.throughput)
        nodes, result = found.setup.nodes, found.result
        price = nodes * (result.monthly / HOURS + found.setup.prices.node)
        return cls(result, price, result.percentile(0.99), found.rate, found)


def sizes_of(tiers: Sequence[Tier], sizes: Sequence[int]) -> list[list[Tier]]:
    """Return the tiers with each at each size (bytes), in all combinations."""
    return [
        [replace(tier, budget=n) for tier, n in zip(tiers, chosen, strict=True)]
        for chosen in product(sizes, repeat=len(tiers))
    ]


def sweep(
    policies: Sequence[str],
    choices: Sequence[Sequence[Tier]],
    run: Callable[[str, Sequence[Tier]], Result | Served | None],
) -> list[Point]:
    """Run every policy with every choice of tiers; a run that comes to nothing has no point."""
    found = [run(policy, tiers) for policy in policies for tiers in choices]
    return [Point.of(each) for each in found if each is not None]


def under_load(
    trace: Trace, setup: Setup, arrivals: Arrivals
) -> Callable[[str, Sequence[Tier]], Served]:
    """Return what `sweep` may run: the trace served by ``setup`` with other tiers and policies."""
    return lambda policy, tiers: serve(trace, replace(setup, policy=policy, tiers=tiers), arrivals)


def front(points: Sequence[Point]) -> list[Point]:
    """Return those that no other one beats, cheapest first.

    One beats another if it is no worse in price, time to the first token and throughput, and better in
    one of them, as in Kareto (arXiv 2603.08739). Under a load throughput is what came, and does not
    count. Of equal ones the first stays. The oracle takes no part beside others: nobody can have it.
    """
    real = [point for point in points if point.result.policy != "belady"] or list(points)
    aims = [(p.price, p.ttft, 0.0 if p.served else -p.throughput) for p in real]
    best = [
        at
        for at, mine in enumerate(aims)
        if mine not in aims[:at] and not any(_beats(other, mine) for other in aims)
    ]
    return [real[at] for at in sorted(best, key=aims.__getitem__)]


def _beats(one: Aims, other: Aims) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))

"""One trace against tiers under one policy, one request after the other: what is hit and moved.

Nobody waits for anybody; `kvweave.simulate.cluster` has queues. With a look-ahead of n, policies are
told what the request that begins and the next n of the trace will use, as if so many always waited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf

from kvweave.errors import InvalidArgument, nearest
from kvweave.keep import POLICIES, Belady, Future, Policy
from kvweave.simulate.cost import DEFAULT, HOURS, Cost, Tier
from kvweave.simulate.play import Hits, Played, Player, order
from kvweave.simulate.store import Moved
from kvweave.simulate.trace import Trace, prefix_chained

NAMES = (*POLICIES, "belady")


@dataclass
class Result:
    """What a replay found. Times in seconds; ``ttft`` to the first token, nobody waiting."""

    policy: str
    tiers: list[Tier]
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)  # bytes read for hits, by tier
    moved: dict[str, Moved] = field(default_factory=dict)  # traffic of the tiers below the first
    refused: int = 0  # uses of chunks for which the first tier had no room beside those in use
    prefill: float = 0.0
    repair: float = 0.0
    canonical: float = 0.0
    ttft: list[float] = field(default_factory=list, repr=False)

    @property
    def block_rate(self) -> float:
        return self.hit_blocks / self.blocks

    @property
    def token_rate(self) -> float:
        return self.hit_tokens / self.tokens

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.ttft)

    @property
    def monthly(self) -> float:
        """$ a month for the tiers."""
        return sum(tier.monthly for tier in self.tiers)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds that the device, and reads and writes of each tier, take altogether."""
        took = {"device": self.prefill + self.repair + self.canonical}
        for tier in self.tiers:
            moved = self.moved.get(tier.name)
            n_bytes = self.loaded[tier.name] if moved is None else moved.read + moved.written
            took[tier.name] = n_bytes / tier.bandwidth
        return took

    @property
    def throughput(self) -> float:
        """Requests a second when all but the busiest of `busy` waits for nothing."""
        return self.requests / (max(self.busy.values()) or inf)

    def percentile(self, share: float) -> float:
        """Return the time to the first token that ``share`` of the requests stay within."""
        return percentile(self.ttft, share)

    def add(self, played: Played, cost: Cost) -> None:
        """Count a request."""
        self.requests += 1
        self.prefill += played.prefill
        self.repair += played.repair
        self.canonical += played.canonical
        computing = played.prefill + played.repair
        self.ttft.append(cost.together(computing, sum(played.loads.values())))

    def to_dict(self) -> dict[str, object]:
        """Return figures, JSON-ready."""
        return {
            "policy": self.policy,
            "tiers": [described(tier) for tier in self.tiers],
            "requests": self.requests,
            "blocks": self.blocks,
            "tokens": self.tokens,
            "hit_rate": {"blocks": round(self.block_rate, 6), "tokens": round(self.token_rate, 6)},
            "bytes": {
                "loaded": self.loaded,
                "moved": {name: moved._asdict() for name, moved in self.moved.items()},
            },
            "refused": self.refused,
            "device_s": {
                "prefill": round(self.prefill, 3),
                "repair": round(self.repair, 3),
                "canonical": round(self.canonical, 3),
            },
            "ttft_s": {
                "mean": round(self.mean_ttft, 6),
                "p50": round(self.percentile(0.5), 6),
                "p99": round(self.percentile(0.99), 6),
            },
            "requests_per_s": round(self.throughput, 6),
            "tiers_per_month": round(self.monthly, 4),
            "tiers_per_million_requests": round(
                self.monthly / HOURS / 3600 / self.throughput * 1e6, 4
            ),
        }


def described(tier: Tier) -> dict[str, object]:
    """Return a tier, JSON-ready; what has no bound is null."""
    return {name: None if value == inf else value for name, value in asdict(tier).items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of them do not pass."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def require_policy(name: str) -> None:
    """Raise InvalidArgument for an unknown policy."""
    if name not in NAMES:
        near = nearest(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(NAMES)}"
        raise InvalidArgument("policy", f"no policy {name!r}", hint)


def replay(
    trace: Trace,
    policy: str,
    tiers: Sequence[Tier],
    cost: Cost = DEFAULT,
    hits: Hits = "chunks",
    look_ahead: int = 0,
) -> Result:
    """Play a whole trace; ``look_ahead`` requests wait in the queue that policies are told of.

    Raises InvalidArgument for an unknown policy.
    """
    require_policy(policy)
    trace = prefix_chained(trace) if hits == "prefix" else trace
    step: Callable[[], None] = _nothing
    make: Callable[[int], Policy]
    if policy == "belady":
        future = Future(uses(trace, hits))
        make, step = lambda budget: Belady(future), future.step
    else:
        make = POLICIES[policy]
    player = Player(tiers, make, cost, hits)
    result = Result(policy, list(tiers))
    asking = [request for request in trace.requests if request.blocks]
    asked = 0
    try:
        for request in trace.requests:
            player.store.at(request.time)
            if look_ahead and request.blocks:
                waiting = asking[asked : asked + 1 + look_ahead]
                player.store.shelf.upcoming(id for each in waiting for id in each.blocks)
                asked += 1
            if request.blocks:
                played = player.prompt(request, trace, step)
                played.canonical += player.answer(request, trace, step)
                result.add(played, cost)
            player.declare(request)
    finally:
        player.store.close()
    counted(result, [player])
    return result


def uses(trace: Trace, hits: Hits) -> list[int]:
    """Return the blocks of a trace in the order in which a replay uses them."""
    return [
        id
        for r in trace.requests
        for id in (*(r.blocks[at] for at in order(r, hits)), *(made.id for made in r.made))
    ]


def counted(result: Result, players: Sequence[Player]) -> None:
    """Add up what happened to the tiers of nodes."""
    names = [tier.name for tier in result.tiers]
    result.loaded = {name: sum(p.loaded[name] for p in players) for name in names}
    every = [p.store.moved() for p in players]
    result.moved = {
        name: Moved(*(sum(column) for column in zip(*(by[name] for by in every), strict=True)))
        for name in names[1:]
    }
    for name in ("blocks", "tokens", "hit_blocks", "hit_tokens"):
        setattr(result, name, sum(getattr(player, name) for player in players))
    result.refused = sum(player.store.refused for player in players)


def _nothing() -> None:
    pass

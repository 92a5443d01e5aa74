"""One trace against tiers under one policy: what is hit, moved, and waited for.

What is used comes to the first tier; what has to go from a tier goes one down, from the last one
away. A block is on one tier only. Two ways to hit:

::

    chunks   every block that is anywhere: KV that can be placed at any position
    prefix   blocks up to the first that is nowhere: prefix caching. Blocks are used from the last
             to the first, so that the front of a prompt is what stays longest.

With a look-ahead of n, policies are told what the request that begins and the next n of the trace
will use, as if so many always waited in a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Literal

from kvweave.errors import InvalidArgument, nearest
from kvweave.keep import POLICIES, Belady, Facts, Future, Policy
from kvweave.simulate.cost import DEFAULT, Cost, Tier
from kvweave.simulate.trace import Request, Trace

Hits = Literal["chunks", "prefix"]
NAMES = (*POLICIES, "belady")


@dataclass
class Result:
    """What a replay found. Times in seconds, to the first token."""

    policy: str
    tiers: list[Tier]
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)  # bytes read for hits, by tier
    moved: dict[str, int] = field(default_factory=dict)  # bytes let go of to a tier
    lost: int = 0  # bytes let go of altogether
    prefill: float = 0.0  # seconds of prefill
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
    def cost(self) -> float:
        """Price of the tiers, relative to a GiB of host memory."""
        return sum(tier.cost for tier in self.tiers)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds that prefill, and reads and writes of each tier, take altogether."""
        took = {"prefill": self.prefill}
        for tier in self.tiers:
            n_bytes = self.loaded[tier.name] + self.moved.get(tier.name, 0)
            took[tier.name] = n_bytes / tier.bandwidth
        return took

    @property
    def throughput(self) -> float:
        """Requests a second when all but the busiest of `busy` waits for nothing."""
        return self.requests / max(self.busy.values())

    def percentile(self, share: float) -> float:
        """Return the time to the first token that ``share`` of the requests stay within."""
        return sorted(self.ttft)[max(0, ceil(share * len(self.ttft)) - 1)]

    def to_dict(self) -> dict[str, object]:
        """Return figures, JSON-ready."""
        return {
            "policy": self.policy,
            "tiers": [asdict(tier) for tier in self.tiers],
            "requests": self.requests,
            "blocks": self.blocks,
            "tokens": self.tokens,
            "hit_rate": {"blocks": round(self.block_rate, 6), "tokens": round(self.token_rate, 6)},
            "bytes": {"loaded": self.loaded, "moved": self.moved, "lost": self.lost},
            "ttft_s": {
                "mean": round(self.mean_ttft, 6),
                "p50": round(self.percentile(0.5), 6),
                "p95": round(self.percentile(0.95), 6),
            },
            "requests_per_s": round(self.throughput, 6),
            "cost": round(self.cost, 6),
        }


class Cache:
    """The keys on one tier, and the policy that says which go."""

    def __init__(self, budget: int, policy: Policy) -> None:
        self.budget, self.policy = budget, policy
        self.held: dict[int, tuple[int, Facts]] = {}
        self.n_bytes = 0

    def put(self, key: int, n_bytes: int, facts: Facts) -> list[tuple[int, int, Facts]]:
        """Take a new key and return what went for it, which is the key itself if it is too big."""
        if n_bytes > self.budget:
            return [(key, n_bytes, facts)]
        self.policy.missed(key, n_bytes)
        went = []
        while self.n_bytes + n_bytes > self.budget:
            victim = next(self.policy.victims())
            self.policy.evicted(victim)
            went.append((victim, *self.take(victim)))
        self.held[key] = (n_bytes, facts)
        self.n_bytes += n_bytes
        self.policy.used(key, n_bytes, facts)
        return went

    def take(self, key: int) -> tuple[int, Facts]:
        """Take a key out and return its bytes and facts; the policy is told by the caller."""
        n_bytes, facts = self.held.pop(key)
        self.n_bytes -= n_bytes
        return n_bytes, facts

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting, content and policy differ."""
        self.policy.check_integrity()
        assert self.n_bytes == sum(n for n, _ in self.held.values()) <= self.budget
        assert sorted(self.policy.victims()) == sorted(self.held)


class Simulator:
    """Tiers in use, and what happened so far."""

    def __init__(
        self, tiers: Sequence[Tier], make: Callable[[int], Policy], cost: Cost, hits: Hits
    ) -> None:
        self.cost, self.hits = cost, hits
        self.caches = [Cache(tier.budget, make(tier.budget)) for tier in tiers]
        names = [tier.name for tier in tiers]
        self.result = Result(
            self.caches[0].policy.name, list(tiers), loaded=dict.fromkeys(names, 0),
            moved=dict.fromkeys(names[1:], 0),
        )  # fmt: skip

    def request(self, request: Request, trace: Trace, step: Callable[[], None]) -> None:
        """Play one request; ``step`` is called before each use of a block."""
        result, cost = self.result, self.cost
        usable = self._usable(request)
        befores, before = [], 0
        for n_tokens in request.sizes:
            befores.append(before)
            before += n_tokens
        seconds = 0.0
        for at in order(request, self.hits):
            step()
            key, n_tokens = request.blocks[at], request.sizes[at]
            prefill = cost.prefill(befores[at], n_tokens)
            n_bytes = trace.held_tokens(n_tokens) * cost.token_bytes
            where = self._use(key, n_bytes, Facts(prefill, request.kinds[at], request.session))
            if where is None or at >= usable:
                seconds += prefill
                result.prefill += prefill
                continue
            tier = result.tiers[where]
            result.loaded[tier.name] += n_bytes
            seconds += n_bytes / tier.bandwidth
            result.hit_blocks += 1
            result.hit_tokens += n_tokens
        if request.blocks:
            result.requests += 1
            result.blocks += len(request.blocks)
            result.tokens += before
            result.ttft.append(seconds)
        self._declare(request)

    def announce(self, requests: Sequence[Request]) -> None:
        """Tell every policy what is used next."""
        keys = [key for request in requests for key in request.blocks]
        for cache in self.caches:
            cache.policy.upcoming(keys)

    def _usable(self, request: Request) -> int:
        """Return before which block a hit counts."""
        if self.hits == "prefix":
            for at, key in enumerate(request.blocks):
                if not any(key in cache.held for cache in self.caches):
                    return at
        return len(request.blocks)

    def _use(self, key: int, n_bytes: int, facts: Facts) -> int | None:
        """Bring a block to the first tier and return where it was."""
        first = self.caches[0]
        if key in first.held:
            first.held[key] = (first.held[key][0], facts)
            first.policy.used(key, first.held[key][0], facts)
            return 0
        where = next((i for i, cache in enumerate(self.caches) if key in cache.held), None)
        if where is not None:
            self.caches[where].policy.dropped(key)
            self.caches[where].take(key)
        coming = [(key, n_bytes, facts)]
        for at, cache in enumerate(self.caches):
            if at:
                self.result.moved[self.result.tiers[at].name] += sum(n for _, n, _ in coming)
            coming = [gone for each in coming for gone in cache.put(*each)]
        self.result.lost += sum(n for _, n, _ in coming)
        return where

    def _declare(self, request: Request) -> None:
        for cache in self.caches:
            for key in request.pruned:
                cache.policy.pruned(key)
            if request.ended:
                cache.policy.ended(request.session)

    def check_integrity(self) -> None:
        """Raise AssertionError when a tier's accounting is off or a block is on two."""
        for cache in self.caches:
            cache.check_integrity()
        held = [key for cache in self.caches for key in cache.held]
        assert len(held) == len(set(held)), "a block on two tiers"


def order(request: Request, hits: Hits) -> range:
    """Return in which order the blocks of a request are used."""
    n = len(request.blocks)
    return range(n) if hits == "chunks" else range(n - 1, -1, -1)


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
    if policy not in NAMES:
        near = nearest(policy, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(NAMES)}"
        raise InvalidArgument("policy", f"no policy {policy!r}", hint)
    if policy == "belady":
        keys = [r.blocks[at] for r in trace.requests for at in order(r, hits)]
        future = Future(keys)
        simulator = Simulator(tiers, lambda budget: Belady(future), cost, hits)
        step: Callable[[], None] = future.step
    else:
        simulator = Simulator(tiers, POLICIES[policy], cost, hits)
        step = _nothing
    asking = [request for request in trace.requests if request.blocks]
    asked = 0
    for request in trace.requests:
        if look_ahead and request.blocks:
            simulator.announce(asking[asked : asked + 1 + look_ahead])
            asked += 1
        simulator.request(request, trace, step)
    return simulator.result


def _nothing() -> None:
    pass

"""Which node gets a request: one class each, found by name in `ROUTERS`.

A router sees the request's chunks and the nodes' queues. What a node holds it may ask too, as if events
told it at once; only `chunk_sets` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from typing import Protocol

from kvweave.simulate.cost import Cost, Tier
from kvweave.simulate.trace import Request

BOUND = 1.25  # times the mean load that a node may have (Mirrokni et al., SODA'18: 1 + epsilon)
MATCHED = 0.3  # of a prompt's tokens that a prefix has to match
UNEVEN = (64, 1.5)  # requests, and times, that one node may have over another
REMEMBERED = 100_000  # prefixes
KNOWN = 100_000  # owners that are not computed again


class NodeView(Protocol):
    """What a router sees of a node."""

    @property
    def number(self) -> int:
        """What the node is known by; it stays when others come or go."""
        ...

    @property
    def load(self) -> int:
        """Requests that wait or run there."""
        ...

    @property
    def cost(self) -> Cost:
        """What computing costs there."""
        ...

    def backlog(self, now: float) -> float:
        """Return about how many seconds a request would wait."""
        ...

    def where(self, id: int) -> str:
        """Return the tier that has a chunk, ``none`` for none."""
        ...


class Router(Protocol):
    """Chooses a node."""

    name: str

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the index of the node that serves a request."""
        ...


class RoundRobin:
    """One after the other."""

    name = "round_robin"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._next = -1

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the next."""
        self._next = (self._next + 1) % len(nodes)
        return self._next


class LeastLoaded:
    """The node with the fewest requests."""

    name = "least_loaded"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        pass

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the one with the fewest requests; of equal ones that which is free first."""
        return min(range(len(nodes)), key=lambda i: (nodes[i].load, nodes[i].backlog(now), i))


class Rendezvous:
    """The node that owns the heaviest set of the request's chunks, unless it is over its bound.

    Every chunk is owned by the node with its highest hash (rendezvous hashing, Thaler and Ravishankar
    1998), which needs no state at all. Of the nodes, by the tokens they own of this request, the first
    one is taken whose load stays within `BOUND` times the mean (consistent hashing with bounded loads,
    arXiv 1608.01350).
    """

    name = "rendezvous"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        pass

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the heaviest owner with room."""
        owned, numbers = [0] * len(nodes), tuple(node.number for node in nodes)
        for id, n_tokens in zip(request.blocks, request.sizes, strict=True):
            owned[_owner(id, numbers)] += n_tokens
        most = ceil(BOUND * (sum(node.load for node in nodes) + 1) / len(nodes))
        ranked = sorted(range(len(nodes)), key=lambda i: (-owned[i], i))
        return next(i for i in ranked if nodes[i].load < most)


@lru_cache(KNOWN)
def _owner(id: int, numbers: tuple[int, ...]) -> int:
    """Return the index of the node that owns a chunk."""
    return max(range(len(numbers)), key=lambda i: weight(id, numbers[i]))


def weight(id: int, number: int) -> bytes:
    """Return how much node ``number`` wants what is called ``id``; the highest owns it."""
    return blake2b(f"{id} {number}".encode(), digest_size=8).digest()


class PrefixAffinity:
    """The node that was sent the longest prefix of this prompt, as vllm-router and SGLang do.

    Where less than `MATCHED` of the tokens matches, or loads are `UNEVEN`, the least loaded.
    """

    name = "prefix"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._sent: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> node's number
        self._least = LeastLoaded(tiers)

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the node of the longest known prefix, and remember where this one went."""
        hashes, last = [], 0
        for id in request.blocks:
            last = hash((last, id))
            hashes.append(last)
        matched, chosen, here = 0, -1, {node.number: i for i, node in enumerate(nodes)}
        for key, n_tokens in zip(hashes, request.sizes, strict=True):
            if self._sent.get(key) not in here:
                break
            matched, chosen = matched + n_tokens, here[self._sent[key]]
        loads = [node.load for node in nodes]
        most, least = max(loads), min(loads)
        uneven = most - least > UNEVEN[0] and most > UNEVEN[1] * least
        if uneven or matched <= MATCHED * sum(request.sizes):
            chosen = self._least.choose(request, nodes, now)
        for key in hashes:
            self._sent[key] = nodes[chosen].number
            self._sent.move_to_end(key)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        return chosen


class ChunkSets:
    """The node where the first token is expected first: queue, loads, repair, and prefill of the rest."""

    name = "chunk_sets"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._bandwidth = {tier.name: tier.bandwidth for tier in tiers}

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the node with the least seconds to the first token."""
        waits = [node.backlog(now) + self.seconds(request, node) for node in nodes]
        return min(range(len(nodes)), key=lambda i: (waits[i], i))

    def seconds(self, request: Request, node: NodeView) -> float:
        """Return seconds to the first token once it is the request's turn."""
        seconds, before, cost = 0.0, 0, node.cost
        for id, n_tokens in zip(request.blocks, request.sizes, strict=True):
            prefill, where = cost.prefill(before, n_tokens), node.where(id)
            if where == "none":
                seconds += prefill
            else:
                seconds += n_tokens * cost.token_bytes / self._bandwidth[where]
                seconds += cost.repair * prefill
            before += n_tokens
        return seconds


ROUTERS: dict[str, Callable[[Sequence[Tier]], Router]] = {
    made.name: made for made in (RoundRobin, LeastLoaded, Rendezvous, PrefixAffinity, ChunkSets)
}

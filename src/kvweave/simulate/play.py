"""What one request does to the tiers of a node, and how long that takes.

Two ways to hit:

::

    chunks   every block that is anywhere: KV that can be placed at any position. All but the first
             block of a request, its base, are repaired. What was computed gets canonical KV of its
             own behind the answer, which nobody waits for but the device.
    prefix   blocks up to the first that is nowhere behind what stands before it: prefix caching,
             exact (`kvweave.simulate.trace.prefix_chained`). Blocks are used from the last to the
             first, so that the front of a prompt is what stays longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvweave.keep import Facts, Policy
from kvweave.simulate.cost import Cost, Tier
from kvweave.simulate.store import SizedStore
from kvweave.simulate.trace import Request, Trace

Hits = Literal["chunks", "prefix"]


@dataclass
class Played:
    """What a request took, in seconds of the device and of loads."""

    prefill: float = 0.0
    repair: float = 0.0
    canonical: float = 0.0  # behind the answer
    loads: dict[str, float] = field(default_factory=dict)  # by tier


class Player:
    """One node's tiers and their traffic."""

    def __init__(
        self, tiers: Sequence[Tier], make: Callable[[int], Policy], cost: Cost, hits: Hits
    ) -> None:
        self.tiers, self.cost, self.hits = {tier.name: tier for tier in tiers}, cost, hits
        self.store = SizedStore(tiers, make)
        self.loaded = Counter({tier.name: 0 for tier in tiers})  # bytes of hits
        self.blocks = self.tokens = self.hit_blocks = self.hit_tokens = 0

    def prompt(self, request: Request, trace: Trace, step: Callable[[], None]) -> Played:
        """Use the blocks of a prompt; ``step`` is called before each."""
        played = Played()
        self.store.begin(request.blocks, request.session)
        usable = self._usable(request)
        befores, before = [], 0
        for n_tokens in request.sizes:
            befores.append(before)
            before += n_tokens
        for at in order(request, self.hits):
            step()
            id, n_tokens = request.blocks[at], request.sizes[at]
            n_bytes = trace.held_tokens(n_tokens) * self.cost.token_bytes
            seconds = self.cost.prefill(befores[at], n_tokens)
            where = self.store.use(id, n_bytes, Facts(seconds, request.kinds[at], request.session))
            if where == "none" or at >= usable:
                played.prefill += seconds
                played.canonical += self._canonical(n_tokens) if where == "none" else 0.0
                continue
            tier = self.tiers[where]
            self.loaded[where] += n_bytes
            played.loads[where] = played.loads.get(where, 0.0) + n_bytes / tier.bandwidth
            played.repair += self.cost.repair * seconds if self.hits == "chunks" and at else 0.0
            self.hit_blocks += 1
            self.hit_tokens += n_tokens
        self.blocks += len(request.blocks)
        self.tokens += before
        return played

    def answer(self, request: Request, trace: Trace, step: Callable[[], None]) -> float:
        """Store what the answer became; return the seconds of its canonical KV.

        Decoding made its KV, so a prefix cache has it for nothing.
        """
        seconds = 0.0
        for made in request.made:
            step()
            cost = self.cost.prefill(sum(request.sizes), made.size)
            n_bytes = trace.held_tokens(made.size) * self.cost.token_bytes
            self.store.use(made.id, n_bytes, Facts(cost, made.kind, request.session))
            seconds += self._canonical(made.size)
        return seconds

    def declare(self, request: Request) -> None:
        """Tell the policies what was declared with a request."""
        self.store.shelf.pruned(request.pruned)
        if request.ended:
            self.store.shelf.ended(request.session)

    def _canonical(self, n_tokens: int) -> float:
        return self.cost.prefill(0, n_tokens) if self.hits == "chunks" else 0.0

    def _usable(self, request: Request) -> int:
        """Return before which block a hit counts."""
        if self.hits == "prefix":
            for at, id in enumerate(request.blocks):
                if self.store.where(id) == "none":
                    return at
        return len(request.blocks)


def order(request: Request, hits: Hits) -> range:
    """Return in which order the blocks of a request are used."""
    n = len(request.blocks)
    return range(n) if hits == "chunks" else range(n - 1, -1, -1)

"""Which worker gets a request: the routers of `kvweave.simulate.route`, on what is known of real ones.

``chunks`` takes the least seconds to the first token (queue + loads + repair + prefill of what is not
there), among the workers within their bound of the mean load. ``prefix``, ``hash`` (rendezvous with
bounded loads) and ``random`` are what it is measured against.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil
from operator import xor

from kvweave.route.options import RouteOptions
from kvweave.route.tenant import RouteTenant
from kvweave.route.wanted import PromptText
from kvweave.route.worker import SeenWorker, Worker
from kvweave.simulate.cost import TYPICAL, Tier
from kvweave.simulate.route import ChunkSets, NodeView, PrefixAffinity, Rendezvous, Router, weight
from kvweave.simulate.trace import Request

TIERS = [Tier(name, 0, typical.bandwidth, typical.price) for name, typical in TYPICAL.items()]
MISSED = 0.25  # of what was thought to be there; with less missing nothing is forgotten
FEW = 64  # tokens; the same
_CHAIN = 0x100000001B3


class AtRandom:
    """Any of them."""

    name = "random"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._rng = random.Random()

    def choose(self, request: Request, nodes: Sequence[NodeView], now: float) -> int:
        """Return the index of one."""
        return self._rng.randrange(len(nodes))


POLICIES: dict[str, Callable[[Sequence[Tier]], Router]] = {
    "chunks": ChunkSets,
    "prefix": PrefixAffinity,
    "hash": Rendezvous,
    "random": AtRandom,
}


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Where a request goes, and why. ``ids`` and ``sizes`` (tokens) are of its prints, in order."""

    worker: Worker
    ids: tuple[int, ...]
    sizes: tuple[int, ...]
    n_chars: int
    there: dict[int, str]  # of the ids, those thought to be there -> tier
    seconds: float  # of computing until the first token, without the queue
    saved: float  # seconds less than if nothing was there

    @property
    def n_there(self) -> int:
        """Tokens thought to be there."""
        return sum(n for id, n in zip(self.ids, self.sizes, strict=True) if id in self.there)


class Chooser:
    """Chooses workers by one policy, and takes in what their answers teach."""

    def __init__(self, options: RouteOptions) -> None:
        self.options = options
        self._make = POLICIES[options.policy]
        self._stateless = self._make(TIERS)

    def choose(
        self, tenant: RouteTenant, prompt: PromptText, workers: Sequence[Worker]
    ) -> RouteChoice:
        """Return where a prompt goes, of ``workers`` (one at least)."""
        ids, sizes = self._blocks(tenant, prompt)
        request = Request(0.0, 0, ids, sizes, ("",) * len(ids))
        mixed = reduce(xor, ids, 0)
        # equals go by rendezvous, so that every router of many does the same with the same prompt
        ranked = sorted(workers, key=lambda w: weight(mixed, w.number), reverse=True)
        crowd = sum(worker.load for worker in workers) / len(workers)
        seen = [self._seen(tenant, prompt, ids, worker) for worker in self._bounded(ranked)]
        nodes = [replace(node, crowd=crowd) for node in seen]
        router = self._router(tenant)
        node = nodes[router.choose(request, nodes, 0.0) if len(nodes) > 1 else 0]
        seconds, whole = _seconds(node, request), _seconds(replace(node, tiers={}), request)
        return RouteChoice(
            node.worker, ids, sizes, prompt.prints.n_chars, node.tiers, seconds, whole - seconds
        )

    def _router(self, tenant: RouteTenant) -> Router:
        if self.options.policy != "prefix":
            return self._stateless
        if tenant.router is None:  # what it remembers is the tenant's
            tenant.router = self._make(TIERS)
        return tenant.router

    def _blocks(
        self, tenant: RouteTenant, prompt: PromptText
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        named = [(name_id(tenant, name), tenant.sizes.get(name, 1)) for name in prompt.names]
        ids = [id for id, _ in named] + tenant.ids(prompt.prints.hashes)
        sizes = [n for _, n in named] + [tenant.tokens(n) for n in prompt.prints.sizes.tolist()]
        return tuple(ids), tuple(sizes)

    def _bounded(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return those that stay within ``bound`` times the mean load, or ``slots``, with one request more."""
        if self.options.policy != "chunks":
            return workers
        total = sum(worker.load for worker in workers) + 1
        most = max(ceil(self.options.bound * total / len(workers)), self.options.slots)
        return [worker for worker in workers if worker.load < most]

    def _seen(
        self, tenant: RouteTenant, prompt: PromptText, ids: tuple[int, ...], worker: Worker
    ) -> SeenWorker:
        holding, cost = tenant.holding(worker.name), self.options.cost
        if worker.kind == "prefix":
            tiers = {}
            for id, link in zip(ids, chained(ids), strict=True):
                if not holding.tiers((link,)):
                    break
                tiers[id] = "gpu"
            return SeenWorker(worker, replace(cost, repair=0.0), tiers)
        tiers = holding.tiers(ids)
        for name in prompt.names:
            if worker.name in tenant.directory.get(name, {}):
                tiers[name_id(tenant, name)] = "ram"
        return SeenWorker(worker, cost, tiers)

    # ---- what answers teach

    def sent(
        self, tenant: RouteTenant, choice: RouteChoice, answer: PromptText | None = None
    ) -> None:
        """Note that a worker has a prompt now, and the answer to it."""
        ids = choice.ids if answer is None else (*choice.ids, *tenant.ids(answer.prints.hashes))
        known = chained(ids) if choice.worker.kind == "prefix" else ids
        tenant.holding(choice.worker.name).sent(known)

    def found(self, tenant: RouteTenant, choice: RouteChoice, n_prompt: int, n_cached: int) -> None:
        """Take in how many tokens a prompt had, and how many of them the worker had."""
        named = len(choice.ids) > 0 and choice.n_chars > 0
        if named:
            tenant.learn_letters(choice.n_chars, n_prompt)
        missing = choice.n_there - n_cached
        if missing > FEW and missing > MISSED * choice.n_there:
            pairs = zip(choice.ids, choice.sizes, strict=True)
            sizes = {id: float(n) for id, n in pairs if id in choice.there}
            if choice.worker.kind == "prefix":
                links = zip(chained(choice.ids), choice.ids, strict=True)
                sizes = {link: sizes[id] for link, id in links if id in sizes}
            tenant.holding(choice.worker.name).missed(sizes, missing)


def chained(ids: Sequence[int]) -> tuple[int, ...]:
    """Return ids of prefixes: each of what stands there and of all before it."""
    found, last = [], 0
    for id in ids:
        last = ((last ^ id) * _CHAIN + 1) & (1 << 64) - 1
        found.append(last)
    return tuple(found)


def name_id(tenant: RouteTenant, name: str) -> int:
    """Return what stands for a named chunk among the prints of a prompt."""
    return int.from_bytes(weight(int.from_bytes(name.encode()), int.from_bytes(tenant.digest[:6])))


def _seconds(node: SeenWorker, request: Request) -> float:
    """Return the score of `ChunkSets` without the queue."""
    return ChunkSets(TIERS).seconds(request, node)

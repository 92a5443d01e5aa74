"""The same choice inside Ray Serve: a request router for deployments of vLLM or kvweave replicas.

Needs ray (``pip install 'ray[serve]'``), whose interface for this is alpha. ::

    RequestRouterConfig(
        request_router_class="kvweave.route.ray.ChunkSetRequestRouter",
        request_router_kwargs={"kind": "prefix"},
    )

A replica's queue is what Ray knows of it; what replicas hold is learned from what is sent to them. Ray
does not say who asks, so there is one tenant.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter  # type: ignore[import-not-found]

from kvweave.route.choose import Chooser, RouteChoice
from kvweave.route.options import PolicyName, RouteOptions
from kvweave.route.tenant import Tenants
from kvweave.route.wanted import PromptText, prompt_of
from kvweave.route.worker import Worker, WorkerKind
from kvweave.simulate.cost import Cost

REMEMBERED = 2_000_000  # prints of text


class ChunkSetRequestRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by the seconds to the first token: queue, loads, repair, prefill of the rest."""

    def initialize_state(
        self,
        kind: WorkerKind = "prefix",
        policy: PolicyName = "chunks",
        bound: float = 1.25,
        slots: int = 8,
        **costs: float,
    ) -> None:
        """Take ``request_router_kwargs``: ``kind`` is ``prefix`` for vLLM, ``kvweave`` for what reuses
        text at any position; ``costs`` are fields of `kvweave.simulate.cost.Cost`."""
        cost = Cost(**costs)  # type: ignore[arg-type]
        options = RouteOptions(["ray:1"], policy=policy, bound=bound, slots=slots, cost=cost)
        self._kind, self._chooser, self._tenants = kind, Chooser(options), Tenants(REMEMBERED)
        self._tenant = self._tenants.keep(self._tenants.of(None))
        self._workers: dict[str, Worker] = {}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return replicas in ranks: the best one, then all others by their queues."""
        prompt = asked(pending_request)
        if prompt is None or len(candidate_replicas) < 2:
            return [list(candidate_replicas)]
        workers = {self._seen(replica).name: replica for replica in candidate_replicas}
        best = self._choice(prompt, list(workers)).worker.name
        rest = [name for name in workers if name != best]
        rest.sort(key=lambda name: (self._workers[name].load, name))
        return [[workers[best]], [workers[name] for name in rest]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Note what a replica was sent."""
        prompt, worker = asked(pending_request), self._workers.get(str(replica_id))
        if prompt is not None and worker is not None:
            self._chooser.sent(self._tenant, self._choice(prompt, [worker.name]))
            self._tenants.bound()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forget what a replica had."""
        super().on_replica_actor_died(replica_id)
        self._workers.pop(str(replica_id), None)
        self._tenant.holdings.pop(str(replica_id), None)

    def _choice(self, prompt: PromptText, names: list[str]) -> RouteChoice:
        return self._chooser.choose(self._tenant, prompt, [self._workers[name] for name in names])

    def _seen(self, replica: Any) -> Worker:
        """Return a replica as a worker, with the queue that Ray last saw."""
        name = str(replica.replica_id)
        worker = self._workers.setdefault(name, Worker(f"ray://{name}", kind=self._kind))
        cache = getattr(self, "replica_queue_len_cache", None)
        length = None if cache is None else cache.get(replica.replica_id)
        worker.elsewhere = length or 0
        return worker


def asked(pending_request: Any) -> PromptText | None:
    """Return the prompt among a request's arguments: an object or dict with messages or a prompt."""
    arguments = [] if pending_request is None else [*pending_request.args]
    arguments += [] if pending_request is None else [*pending_request.kwargs.values()]
    for each in arguments:
        body = {name: _plain(_field(each, name)) for name in ("messages", "prompt", "tools")}
        if body["messages"] or body["prompt"]:
            return prompt_of(body)
    return None


def _field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


def _plain(value: Any) -> Any:
    """Return JSON's kinds of what may be pydantic's models."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    dump = getattr(value, "model_dump", None)
    return _plain(dump(exclude_none=True)) if callable(dump) else value

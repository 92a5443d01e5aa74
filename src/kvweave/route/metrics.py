"""What is counted of a router: a Prometheus registry. Nothing in it names a tenant or text."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvweave.route.worker import Worker

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)


class RouteMetrics:
    """Counters of one router; ``worker`` is ``host:port``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvweave_route_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kvweave_route_{name}", text, ["worker"], registry=self.registry)

        self.answers = counter("answers", "Answers of workers", "worker", "status")
        self.retries = counter("retries", "Requests sent to another worker", "why")
        self.cut = counter("cut", "Answers that broke off", "worker")
        self.lent = counter("lent", "Named chunks copied to a worker", "worker")
        self.thought = counter("thought_tokens", "Tokens thought to be there", "worker")
        self.cached = counter("cached_tokens", "Tokens that were there", "worker")
        self.prompt = counter("prompt_tokens", "Tokens of prompts", "worker")
        self.saved = counter("saved_seconds", "Prefill expected to be saved", "worker")
        self.snapshots = counter("snapshots", "Placements that were told anew", "worker")
        self.up = gauge("up", "Whether new work goes there")
        self.load = gauge("load", "Requests there")
        self.chunks = gauge("chunks", "Chunks that its placements tell of")
        self.choosing = Histogram(
            "kvweave_route_choose_seconds", "To choose a worker", buckets=SECONDS, registry=self.registry
        )  # fmt: skip

    def text(self, workers: Iterable[tuple[Worker, int]]) -> bytes:
        """Return all of it in Prometheus' format; workers with the chunks they are known to have."""
        for worker, n_chunks in workers:
            self.up.labels(worker.name).set(worker.takes)
            self.load.labels(worker.name).set(worker.load)
            self.chunks.labels(worker.name).set(n_chunks)
        return generate_latest(self.registry)

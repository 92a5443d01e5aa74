"""What is counted: a Prometheus registry of one app, and the last answers of each namespace.

Labels are route templates, statuses and kinds; nothing that a client chose.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.serve.guard.access_log import METHODS
from kvweave.serve.reuse.ahead import Anticipating
from kvweave.weave.answer import Answer
from kvweave.weave.audit import CellReport
from kvweave.weave.naming import holds_vectors
from kvweave.weave.plan import Plan

RECENT = 200  # answers kept for the page, per namespace
PLANS = 40  # of these, the last whose plans are kept too
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
KINDS = ("exact", "reused", "repaired", "prefilled")


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine holds; taken in its thread."""

    bytes: dict[str, int]  # by tier
    budget: int  # bytes of memory
    n_chunks: int
    n_contexts: int
    audits: tuple[CellReport, ...] = ()
    n_audits_failed: int = 0
    learned: tuple[
        tuple[str, str, int], ...
    ] = ()  # share, options of `auto`, answers woven in all ways
    seconds: float = 0.0  # in model passes
    audit_seconds: float = 0.0  # of these
    refine_seconds: float = 0.0  # of these, too
    vectors: int = 0  # bytes of memory: vectors, and rows that they are made of

    @classmethod
    def of(cls, engine: Engine) -> EngineSnapshot:
        """Measure an engine, all namespaces together."""
        shelf = engine.shelf
        held: Counts[str] = Counts()
        for tier, used, _ in shelf.levels():
            held[tier] += used
        spaces = {"", *engine.table.namespaces()}
        n_contexts = sum(len(engine.contexts_of(space)) for space in spaces)
        auditor, seconds = engine.shadow.auditor, engine.loop.seconds
        return cls(
            held, shelf.budget, len(engine.table), n_contexts,
            tuple(auditor.report()), auditor.n_failed, auditor.learner.totals(), sum(seconds.values()), seconds["audit"], seconds["refine"],
            sum(n for holder, n in shelf.charged() if holds_vectors(holder)),
        )  # fmt: skip


class AuditGauges:
    """What audits have found, by strategy, codec, rows and policy; cells that differ in options or
    share count together, the worst of their bounds."""

    def __init__(self, gauge: Callable[..., Gauge]) -> None:
        by = ("strategy", "codec", "rows", "policy")
        self.n = gauge("audits", "Answers held against a full prefill", *by)
        self.promised = gauge("audits_promised", "Of these, that had a bound before", *by)
        self.missed = gauge("audits_missed", "Of these, whose drift was over it", *by)
        self.bound = gauge("audit_bound_nats", "Bound of the next answer's drift", *by)
        self.alarms = gauge("audit_alarms", "Times that bounds were not kept", *by)
        self.alarm = gauge("audit_alarm", "Cells that have no new bound since", *by)
        self.failed = gauge("audits_failed", "Audits that came to nothing")
        self.tried = gauge(
            "audits_tried", "Answers woven in all ways, by the one chosen", "share", "options"
        )
        self.seconds = gauge("pass_seconds", "Spent in model passes since the start")
        self.own = gauge("audit_seconds", "Of these, on audits")
        self.refined = gauge("refine_seconds", "Of these, on rows made exact while nobody asked")

    def set(self, held: EngineSnapshot) -> None:
        """Show what there is now."""
        groups: dict[tuple[str, ...], list[CellReport]] = {}
        for report in held.audits:
            cell = report.cell
            labels = (cell.strategy, cell.codec, cell.rows, cell.policy)
            groups.setdefault(labels, []).append(report)
        for each in (self.n, self.promised, self.missed, self.bound, self.alarms, self.alarm):
            each.clear()  # clients name policies; a cell that is forgotten has no alarm any more
        for key, found in groups.items():
            self.n.labels(*key).set(sum(r.n_audits for r in found))
            self.promised.labels(*key).set(sum(r.n_promised for r in found))
            self.missed.labels(*key).set(sum(r.n_missed for r in found))
            self.alarms.labels(*key).set(sum(r.n_alarms for r in found))
            self.alarm.labels(*key).set(sum(r.alarm for r in found))
            bounds = [r.bound for r in found if r.bound is not None]
            self.bound.labels(*key).set(max(bounds, default=float("nan")))
        self.failed.set(held.n_audits_failed)
        self.tried.clear()
        for share, options, n in held.learned:
            self.tried.labels(share, options).set(n)
        self.seconds.set(held.seconds)
        self.own.set(held.audit_seconds)
        self.refined.set(held.refine_seconds)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # what is resident, beside what is charged

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvweave_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvweave_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            name = f"kvweave_{name}_seconds"
            return Histogram(name, text, buckets=SECONDS, registry=self.registry)

        self.requests = counter("requests", "HTTP requests", "route", "method", "status")
        self.tokens = counter("tokens", "Tokens of answered contexts, by how they came", "kind")
        self.answers = counter("answers", "Answers that ended", "finish")
        self.cancelled = gauge("cancelled", "Answers whose client went away, since the start")
        self.steps = gauge("steps", "Model passes since the start")
        self.waited = seconds("wait", "An answer's time in the queue")
        self.ttft = seconds("ttft", "From an answer's weave to its first token")
        self.total = seconds("answer", "From an answer's weave to its end")
        self.waiting = gauge("waiting", "Answers in the queue")
        self.active = gauge("active", "Answers under way")
        self.later = gauge("later", "Chunks that get canonical KV when there is time")
        self.kv_bytes = gauge("kv_bytes", "KV held, with the rows of contexts", "tier")
        self.budget = gauge("kv_budget_bytes", "KV that memory may hold")
        self.vectors = gauge("vector_bytes", "Of memory's, vectors and what they are made of")
        self.chunks = gauge("chunks", "Chunks in the index")
        self.contexts = gauge("contexts", "Open contexts")
        self.nats = counter("drift_nats", "Nats of the answers whose drift was known", "by")
        self.audited = AuditGauges(gauge)
        self.made_ahead = gauge("ahead_edits", "Contexts edited before the request came that edits")
        self.used_ahead = gauge("ahead_edits_used", "Of these, those that a request went on from")
        self.failed_ahead = gauge("ahead_edits_failed", "Such edits that came to nothing")
        self.ahead_seconds = gauge("ahead_seconds", "Spent on what to edit ahead, passes left out")

    def answered(self, answer: Answer, waited: float) -> None:
        """Count an answer that ended, ``waited`` seconds after it was asked for."""
        counts = answer.plan.counts()
        for kind in KINDS:
            self.tokens.labels(kind).inc(counts[kind] or 0)
        self.tokens.labels("generated").inc(len(answer.tokens))
        self.answers.labels(answer.finish).inc()
        if answer.plan.drift is not None:
            self.nats.labels(answer.plan.drift_by or "exact").inc(
                answer.plan.drift * len(answer.tokens)
            )
        self.waited.observe(waited)
        for histogram, key in ((self.ttft, "ttft"), (self.total, "total")):
            value = answer.usage.get(key)
            if isinstance(value, float):
                histogram.observe(value)

    def looked_ahead(self, ahead: Anticipating) -> None:
        """Show what was edited before the requests came."""
        edits = ahead.sessions.ahead
        self.made_ahead.set(edits.n_made)
        self.used_ahead.set(edits.n_used)
        self.failed_ahead.set(ahead.n_failed)
        self.ahead_seconds.set(ahead.seconds)

    def text(self, stats: dict[str, float], held: EngineSnapshot | None) -> bytes:
        """Return the exposition; without ``held`` the last known bytes and counts stay."""
        self.waiting.set(stats["waiting"])
        self.active.set(stats["active"])
        self.later.set(stats["later"])
        self.steps.set(stats["steps"])
        self.cancelled.set(stats["cancelled"])
        if held is not None:
            for tier, n_bytes in held.bytes.items():
                self.kv_bytes.labels(tier).set(n_bytes)
            self.budget.set(held.budget)
            self.vectors.set(held.vectors)
            self.chunks.set(held.n_chunks)
            self.contexts.set(held.n_contexts)
            self.audited.set(held)
        return generate_latest(self.registry)


class History:
    """The last answers of each namespace, for the page. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, deque[dict[str, Any]]] = {}
        self._plans: dict[str, deque[tuple[int, Plan]]] = {}
        self._counts: Counts[str] = Counts()

    def add(self, tenant: str, answer: Answer, waited: float, context: str = "") -> None:
        """Note an answer that ended, of the context of that name."""
        counts, n = answer.plan.counts(), answer.plan.n_tokens
        entry = {
            "context": context,
            "time": time.time(),
            "ttft": answer.usage["ttft"],
            "total": answer.usage["total"],
            "waited": waited,
            "finish": answer.finish,
            "prompt_tokens": answer.usage["prompt_tokens"],
            "completion_tokens": answer.usage["completion_tokens"],
            "kv": counts,
            "hit_rate": ((counts["exact"] or 0) + (counts["reused"] or 0)) / n if n else 0.0,
        }
        with self._lock:
            self._counts[tenant] += 1
            number = self._counts[tenant]
            self._answers.setdefault(tenant, deque(maxlen=RECENT)).append({"n": number} | entry)
            plans = self._plans.setdefault(tenant, deque(maxlen=PLANS))
            plans.append((number, answer.plan))

    def answers(self, tenant: str) -> list[dict[str, Any]]:
        """Return a namespace's answers, oldest first."""
        with self._lock:
            return list(self._answers.get(tenant, ()))

    def plan(self, tenant: str) -> Plan | None:
        """Return the plan of a namespace's last answer."""
        with self._lock:
            plans = self._plans.get(tenant)
            return plans[-1][1] if plans else None

    def answer(self, tenant: str, n: int) -> tuple[dict[str, Any], Plan]:
        """Return a namespace's ``n``-th answer and its plan. Raises InvalidArgument."""
        with self._lock:
            plans = dict(self._plans.get(tenant, ()))
            if n not in plans:
                kept = f"{min(plans)} to {max(plans)} are kept" if plans else "there is none yet"
                raise InvalidArgument("n", f"the plan of answer {n} is not kept", kept)
            entry = next(each for each in self._answers[tenant] if each["n"] == n)
            return entry, plans[n]


class Requests:
    """ASGI middleware that counts requests by route template, method and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499  # the client went away before there was one

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, count)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(route, method, str(status)).inc()

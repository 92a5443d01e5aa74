"""One running router: what its routes and its background work share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import httpx
from starlette.responses import Response

from kvweave.route.choose import Chooser
from kvweave.route.forward import Call, Forwarder, WorkerFailed, headers_of, whole
from kvweave.route.metrics import RouteMetrics
from kvweave.route.options import RouteOptions, worker_url
from kvweave.route.tenant import MOST_KEYS, RouteTenant, Tenants, note
from kvweave.route.turns import ChunkTurns
from kvweave.route.worker import Worker
from kvweave.serve.guard.idempotent import HEADER
from kvweave.serve.guard.problems import OF_MESSAGES, VERSION, Problem, make
from kvweave.simulate.route import weight

log = logging.getLogger("kvweave.route")
WholeAnswer = tuple[Worker, httpx.Response, bytes]  # a worker's whole answer


IDEMPOTENCY = HEADER.lower().encode()


class NotAccepted(Exception):
    """A worker refused a caller that none has accepted yet. ``told``: its answer."""

    def __init__(self, told: WholeAnswer) -> None:
        super().__init__(told[1].status_code)
        self.told = told


class Nonsense(Exception):
    """A worker's answer is not what such a request is answered with."""


class RouterState:
    """Workers, tenants, the policy, the connections."""

    def __init__(self, options: RouteOptions) -> None:
        self.options = options
        urls = [worker_url(url) for url in options.workers]
        self.workers = [Worker(url, options.failures) for url in urls]
        self.tenants = Tenants(options.remembered)
        self.chooser = Chooser(options)
        self.forwarder = Forwarder(options)
        self.metrics = RouteMetrics()
        self.look = asyncio.Event()  # set: a worker failed, so probe them now
        self.stopping = False
        self._claims: WeakValueDictionary[tuple[bytes, str], asyncio.Lock] = WeakValueDictionary()
        self._turns: WeakValueDictionary[bytes, ChunkTurns] = WeakValueDictionary()

    def stop(self) -> None:
        """Say that it stops, to whoever asks for its health."""
        self.stopping = True

    def tenant_of(self, call: Call) -> RouteTenant:
        """Return whose call it is."""
        return self.tenants.of(call.caller)

    async def admit(self, workers: Sequence[Worker], call: Call) -> None:
        """Have one worker say that it knows the caller, if none has said so yet, before many are asked.

        Raises NotAccepted with the answer of one that does not.
        """
        tenant, told = self.tenant_of(call), None
        if self.tenants.has(tenant):
            return
        ask = call.asking("GET", "/v1/models")
        if OF_MESSAGES.get():  # to be refused in the words of that API
            ask.headers.append((VERSION, b"2023-06-01"))
        for worker in workers:
            try:
                told = await self.ask(worker, ask)
            except WorkerFailed:
                continue
            status = told[1].status_code
            if status in (401, 403):
                break
            if status < 500 and status != 429:
                if told[1].is_success:
                    self.tenants.keep(tenant)
                return
        if told is not None:
            raise NotAccepted(told)

    def noted(self, tenant: RouteTenant, call: Call) -> Worker | None:
        """Return the worker that had a request with this ``Idempotency-Key`` before."""
        key = call.header(IDEMPOTENCY)
        return None if key is None else self.named(tenant.keys.get(tenant.place(key), ""))

    def note(self, call: Call, worker: Worker | None) -> None:
        """Note which worker has a request with an ``Idempotency-Key``; None: nobody has."""
        key, tenant = call.header(IDEMPOTENCY), self.tenant_of(call)
        if key is not None and worker is not None:
            note(tenant.keys, tenant.place(key), worker.name, MOST_KEYS)
        elif key is not None:
            tenant.keys.pop(tenant.place(key), None)

    def claim(self, tenant: RouteTenant, name: str) -> asyncio.Lock:
        """Return what is to be held while something of that name is made."""
        return self._claims.setdefault((tenant.digest, name), asyncio.Lock())

    def turns(self, tenant: RouteTenant) -> ChunkTurns:
        """Return who may change the chunks of a tenant."""
        return self._turns.setdefault(tenant.digest, ChunkTurns())

    def storing(self) -> list[Worker]:
        """Return the workers that may have chunks, whether they are there or not."""
        return [worker for worker in self.workers if worker.kind != "prefix"]

    def down(self, silent: Sequence[Worker] = ()) -> list[Worker]:
        """Return those that do not say what they have; ``silent`` just did not."""
        return [worker for worker in self.storing() if not worker.healthy or worker in silent]

    def taking(self) -> list[Worker]:
        """Return the workers that new work may go to."""
        return [worker for worker in self.workers if worker.takes]

    def there(self) -> list[Worker]:
        """Return the workers that answer, draining ones too."""
        return [worker for worker in self.workers if worker.healthy]

    def native(self, *, taking: bool = False, contexts: bool = False) -> list[Worker]:
        """Return those of them that have chunks, or ``contexts`` too: a vLLM with kvweave in it has none,
        and another vLLM neither."""
        lacking = ("prefix", "vllm") if contexts else ("prefix",)
        return [w for w in (self.taking() if taking else self.there()) if w.kind not in lacking]

    def named(self, name: str) -> Worker | None:
        """Return a worker by ``host:port``."""
        return next((worker for worker in self.workers if worker.name == name), None)

    def owners(self, tenant: RouteTenant, name: str, workers: Sequence[Worker]) -> list[Worker]:
        """Return workers in the order in which rendezvous hashing gives them a name of a tenant."""
        id = int.from_bytes(tenant.digest[:8] + name.encode("utf-8", "surrogatepass"))
        return sorted(workers, key=lambda worker: weight(id, worker.number), reverse=True)

    def failed(self, worker: Worker, failure: WorkerFailed) -> None:
        """Take in that a worker did not answer a request; one that is only slow is left to probes."""
        if not failure.slow and worker.failed(failure.why, at_once=True):
            log.warning("worker %s is down: %s", worker.name, failure.why)
        self.look.set()

    async def ask(self, worker: Worker, call: Call, *, quick: bool = True) -> WholeAnswer:
        """Return a worker's whole answer, counted. Raises WorkerFailed, which is noted."""
        try:
            with worker.job() as job:
                response = await self.forwarder.send(worker, call, quick=quick)
                worker.first(job)
                body = await whole(response)
        except WorkerFailed as failure:
            self.failed(worker, failure)
            raise
        self.count(worker, response)
        return worker, response, body

    async def ask_all(
        self, workers: Sequence[Worker], call: Call, *, quick: bool = True
    ) -> tuple[list[WholeAnswer], list[Worker]]:
        """Return the answers of all that gave one, and the workers that did not. Raises NotAccepted."""
        await self.admit(workers, call)
        asked = [self.ask(worker, call, quick=quick) for worker in workers]
        found = await asyncio.gather(*asked, return_exceptions=True)
        told, silent = [], []
        for worker, each in zip(workers, found, strict=True):
            if isinstance(each, WorkerFailed):
                silent.append(worker)
            elif isinstance(each, BaseException):
                raise each
            else:
                told.append(each)
        return told, silent

    def count(self, worker: Worker, response: httpx.Response) -> None:
        """Count an answer."""
        worker.answered += 1
        self.metrics.answers.labels(worker.name, str(response.status_code)).inc()

    def nobody(self, *, native: bool = False) -> Problem:
        """Return what is answered where no worker takes work; ``native``: such work."""
        if native and self.taking():
            hint = "contexts and chunks take a kvweave server among the workers"
            return make(501, "no worker has such a thing", code="not_routed", hint=hint)
        seconds = max(1, round(self.options.probe))
        what = "every worker is down or draining"
        hint = "GET /v1/workers of the router says why; try again"
        return make(503, what, code="no_worker", hint=hint, headers={"Retry-After": str(seconds)})


def answer_of(told: WholeAnswer) -> Response:
    """Return a worker's answer as it is."""
    _, response, body = told
    made = Response(body, response.status_code)
    made.raw_headers = [(k, v) for k, v in headers_of(response) if k != b"content-length"]
    made.raw_headers.append((b"content-length", str(len(body)).encode()))
    return made


@contextmanager
def reading() -> Iterator[None]:
    """Read what a worker said. Raises Nonsense where it is not of the form it should have."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Nonsense from error


def nonsense() -> Problem:
    """Return what is answered where a worker's answer makes no sense."""
    hint = "GET /v1/workers lists them; what changes something may have happened"
    return make(502, "an answer of a worker makes no sense", code="worker_nonsense", hint=hint)


def not_all(silent: Sequence[Worker], *, nothing: bool = True) -> Problem:
    """Return what is answered where workers that may have a chunk are not there."""
    names = ", ".join(worker.name for worker in silent)
    hint = "it may have copies: send this again when it is back, or start the router without it"
    done = "nothing was done" if nothing else "it was done on the others"
    return make(
        503, f"no answer from {names}; {done}", code="worker_down", hint=hint,
        headers={"Retry-After": "5"},
    )  # fmt: skip


def unreachable(worker: Worker, failure: WorkerFailed) -> Problem:
    """Return what is answered where a worker that alone could answer did not.

    What it had read may have happened: 502, and 504 where it is only slow. What it had not has not: 503.
    """
    if failure.slow:
        hint = "it may still be at it: a request that changes something may happen yet"
        return make(504, "the worker did not answer in time", code="worker_slow", hint=hint)
    if failure.sent:
        hint = "it may have happened: look before you send it again, or send an Idempotency-Key"
        return make(502, f"the worker is gone: {failure.why}", code="worker_died", hint=hint)
    hint = "nothing was done; try again when it is back"
    return make(
        503, "the worker that has this does not answer", code="worker_down", hint=hint,
        headers={"Retry-After": "5"},
    )  # fmt: skip

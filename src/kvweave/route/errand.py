"""A request that one worker alone can answer: sent there, and again only where that cannot do it twice."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from starlette.responses import Response
from starlette.types import ASGIApp

from kvweave.route.forward import Call, WorkerFailed, whole
from kvweave.route.relay import AnswerRead, Passing, broken
from kvweave.route.state import IDEMPOTENCY, RouterState, answer_of
from kvweave.route.tenant import RouteTenant
from kvweave.route.worker import Worker

AGAIN = (0.2, 1.0)  # seconds before what may be sent again is


@dataclass(eq=False)
class Errand:
    """A tenant's request on its way to a worker that is known."""

    state: RouterState
    call: Call
    tenant: RouteTenant

    def took(self, worker: Worker, response: httpx.Response, body: bytes) -> None:
        """Take in a whole answer."""

    async def on(self, worker: Worker) -> ASGIApp:
        """Return the worker's answer. Raises WorkerFailed before its first byte.

        It is sent again if nothing of it was sent before, if it only reads, or if it has an
        ``Idempotency-Key``, which keeps it with this worker, unless nothing of it was sent.
        """
        keyed = self.call.header(IDEMPOTENCY) is not None
        repeatable = self.call.method == "GET" or keyed
        is_new = keyed and self.state.noted(self.tenant, self.call) is None
        self.state.note(self.call, worker)
        sent = False
        for pause in (*AGAIN, None):
            try:
                with ExitStack() as stack:
                    job = stack.enter_context(worker.job())
                    response = await self.state.forwarder.send(worker, self.call)
                    worker.first(job)
                    passing = Passing(
                        response, stack.pop_all(), AnswerRead(), cut=lambda why: self._cut(worker, why)
                    )  # fmt: skip
                break
            except WorkerFailed as failure:
                sent = sent or failure.sent
                if is_new and not sent:
                    self.state.note(self.call, None)
                if pause is None or failure.slow or (failure.sent and not repeatable):
                    raise
                self.state.metrics.retries.labels("died" if failure.sent else "refused").inc()
                await asyncio.sleep(pause)
        self.state.count(worker, response)
        return passing if passing.is_stream else await self._whole(worker, passing)

    async def _whole(self, worker: Worker, passing: Passing) -> Response:
        with passing.until:
            try:
                body = await whole(passing.response)
            except WorkerFailed as failure:
                self._cut(worker, failure.why)
                return broken(failure.why).response
        self.took(worker, passing.response, body)
        return answer_of((worker, passing.response, body))

    def _cut(self, worker: Worker, why: str) -> None:
        self.state.metrics.cut.labels(worker.name).inc()
        self.state.failed(worker, WorkerFailed(why, sent=True))

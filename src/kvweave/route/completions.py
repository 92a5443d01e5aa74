"""``/v1/chat/completions``, ``/v1/completions`` and what else changes nothing: chosen, sent, and sent again where that is safe.

A completion without a context changes nothing that a client can see; nor does a response whose id nobody was told. It is sent again, to another worker,
where the connection was refused or the worker died before the first byte of its answer; the latter once
only, or a request that kills workers would kill them all. Once a byte is there it is never sent again.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvweave.chunk.prints import prints
from kvweave.route import directory
from kvweave.route.choose import RouteChoice
from kvweave.route.forward import Call, WorkerFailed, whole
from kvweave.route.relay import AnswerRead, Passing, broken
from kvweave.route.state import RouterState, WholeAnswer, answer_of, reading, unreachable
from kvweave.route.tenant import RouteTenant
from kvweave.route.wanted import PromptText, prompt_of
from kvweave.route.worker import Worker
from kvweave.serve.guard.problems import make

DEATHS = 1  # workers that may die of a request before it is given up


async def complete(request: Request) -> ASGIApp:
    """Answer a completion."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    prompt = prompt_of(call.json())
    if prompt.by_id:
        return not_by_id(prompt)
    return await RoutedCompletion(state, call, state.tenant_of(call), prompt).answer()


def not_by_id(prompt: PromptText) -> Response:
    """Return what is answered where a chunk is named by its id."""
    hint = "name it: an id is a number that every worker gives by itself"
    what = f"{prompt.by_id[0]} is a chunk of one worker, and the router does not know which"
    return make(501, what, code="not_routed", param="messages", hint=hint).response


@dataclass(eq=False)
class RoutedCompletion:
    """One completion and the workers that have tried it; with a ``home`` that is the only one."""

    state: RouterState
    call: Call
    tenant: RouteTenant
    prompt: PromptText
    home: Worker | None = None
    tried: set[str] = field(default_factory=set)
    deaths: int = 0
    looked_again: bool = False

    async def answer(self) -> ASGIApp:
        """Try workers until one answers, or none is left that may."""
        last: ASGIApp | None = None
        while True:
            if self.prompt.names:
                names = self.prompt.names
                silent = await directory.look(self.state, self.tenant, self.call, names)
                lost = directory.lost(self.state, self.tenant, names, silent)
                if lost is not None:
                    return lost.response
            able = self.state.taking() if self.home is None else [self.home]
            workers = [w for w in able if w.name not in self.tried]
            noted = self.state.noted(self.tenant, self.call)
            workers = [noted] if noted in workers else workers
            if not workers:
                return last or self.state.nobody().response
            choice = self._choose(workers)
            worker = choice.worker
            try:
                refused = await self._lend(worker)
                if refused is not None:
                    return answer_of(refused)
                answered = await self._try(choice)
            except WorkerFailed as failure:
                self.state.failed(worker, failure)
                self.tried.add(worker.name)
                last = unreachable(worker, failure).response
                self.deaths += failure.sent
                if failure.slow or self.deaths > DEATHS or self.home is not None:
                    return last
                self._again("died" if failure.sent else "refused")
                continue
            if isinstance(answered, Response) and self._may_try_again(worker, answered):
                last = answered
                continue
            return answered

    def _choose(self, workers: list[Worker]) -> RouteChoice:
        started = time.perf_counter()
        choice = self.state.chooser.choose(self.tenant, self.prompt, workers)
        self.state.metrics.choosing.observe(time.perf_counter() - started)
        return choice

    async def _lend(self, worker: Worker) -> WholeAnswer | None:
        if not self.prompt.names:
            return None
        names = self.prompt.names
        return await directory.lend(self.state, self.tenant, self.call, names, worker)

    def _may_try_again(self, worker: Worker, answered: Response) -> bool:
        """Tell whether a worker refused a request that another one may take."""
        if (
            answered.status_code in (503, 529) and self.home is None
        ):  # it stops, or has no room: nothing was done
            self.tried.add(worker.name)
            self._again("unavailable")
            return True
        if answered.status_code == 404 and self.prompt.names and not self.looked_again:
            self.looked_again = True  # a chunk went behind our back
            directory.forget(self.tenant)
            self._again("chunk gone")
            return True
        return False

    def _again(self, why: str) -> None:
        self.state.metrics.retries.labels(why).inc()

    async def _try(self, choice: RouteChoice) -> ASGIApp:
        """Return a worker's answer, whole or on its way. Raises WorkerFailed before its first byte."""
        state, worker = self.state, choice.worker
        with ExitStack() as stack:
            job = stack.enter_context(worker.job(choice.seconds))
            state.note(self.call, worker)
            response = await self._first(worker)
            worker.first(job)
            state.count(worker, response)
            if response.status_code == 200:
                if self.call.target.startswith(b"/v1/"):  # elsewhere vLLM asks for no key
                    self.tenant = state.tenants.keep(self.tenant)
                    state.note(self.call, worker)
                state.chooser.sent(self.tenant, choice)
                state.tenants.bound()
            read = AnswerRead()
            passing = Passing(
                response, stack.pop_all(), read, lambda: self._done(choice, read), lambda why: self._cut(worker, why)
            )  # fmt: skip
        return passing if passing.is_stream else await self._whole(passing, choice, read)

    async def _first(self, worker: Worker) -> httpx.Response:
        """Return the head of a worker's answer. Raises WorkerFailed, also when probes give it up meanwhile:
        a process that is stopped, or behind a cable that was pulled, refuses nothing."""
        sending = asyncio.ensure_future(self.state.forwarder.send(worker, self.call))
        lost = asyncio.ensure_future(worker.lost.wait())
        try:
            await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise WorkerFailed(f"it is down: {worker.why}", sent=True)
            return sending.result()
        except BaseException:
            sending.cancel()
            await asyncio.wait((sending,))
            if not sending.cancelled() and sending.exception() is None:
                await sending.result().aclose()
            raise
        finally:
            lost.cancel()

    async def _whole(self, passing: Passing, choice: RouteChoice, read: AnswerRead) -> Response:
        with passing.until:
            response = passing.response
            try:
                body = await whole(response)
            except WorkerFailed as failure:
                self._cut(choice.worker, failure.why)
                return broken(failure.why).response
        if response.status_code == 200:
            read.whole(body)
            self._done(choice, read)
        return answer_of((choice.worker, response, body))

    def _cut(self, worker: Worker, why: str) -> None:
        self.state.metrics.cut.labels(worker.name).inc()
        self.state.failed(worker, WorkerFailed(why, sent=True))

    def _done(self, choice: RouteChoice, read: AnswerRead) -> None:
        """Take in what an answer taught."""
        state, name = self.state, choice.worker.name
        if not read.ended or read.failed:
            return
        self.tenant.keep_stored(read.stored, name)
        metrics = state.metrics
        metrics.saved.labels(name).inc(max(0.0, choice.saved))
        n_prompt, n_cached = read.n_prompt, read.n_cached
        if n_prompt is not None and n_cached is not None:
            state.chooser.found(self.tenant, choice, n_prompt, n_cached)
            metrics.thought.labels(name).inc(choice.n_there)
            metrics.cached.labels(name).inc(n_cached)
            metrics.prompt.labels(name).inc(n_prompt)
        answer = PromptText(prints(read.text), ()) if read.text else None
        state.chooser.sent(self.tenant, choice, answer)


async def models(request: Request) -> Response:
    """List the models of all workers, each once; or one of them."""
    state: RouterState = request.app.state.router
    call = await Call.of(request)
    told, _ = await state.ask_all(state.there(), call)
    if not told:
        return state.nobody().response
    good = [each for each in told if each[1].is_success]
    wanted = request.path_params.get("model")
    if wanted is not None or len(good) < 2:
        return answer_of((good or told)[0])
    return merged_models(good)


def merged_models(told: list[WholeAnswer]) -> Response:
    """Return one list of models, in the shape of the first."""
    found: dict[str, object] = {}
    with reading():
        pages = [json.loads(body) for _, _, body in told]
        for page in pages:
            for model in page.get("data", ()):
                found.setdefault(model["id"], model)
    if "object" in pages[0]:
        return JSONResponse({"object": "list", "data": list(found.values())})
    ends = {"first_id": next(iter(found), None), "last_id": next(reversed(found), None)}
    more = any(page.get("has_more") for page in pages)
    return JSONResponse({"data": list(found.values()), "has_more": more, **ends})

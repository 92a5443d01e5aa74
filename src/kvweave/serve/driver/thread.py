"""The one thread that owns the engine; everything else hands it work and gets events back.

::

    asyncio                                     the driver's thread
    call(work)    -> calls   (fair over tenants) -> work(engine) between two steps, or `Tasks`
    answer(begin) -> waiting (fair over tenants) -> begin(engine) when there is room, or `Tasks`
                     active                      -> engine.loop.step(), Delta ..., Finished
    later(ids)                                   -> canonical KV, when nothing waits; audits
    wants(engine)                                -> what waits is loaded while others run

An answer that is closed by its reader frees its rows wherever it is: it is taken out of the queue,
or cancelled between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import TypeVar

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.errors import KVWeaveError, Overloaded
from kvweave.run.loop import Task
from kvweave.serve.driver.ahead import AHEAD, Ahead
from kvweave.serve.driver.audits import IdleAudits
from kvweave.serve.driver.fair import Crowd, FairQueue, Spent
from kvweave.serve.driver.idle import Idle
from kvweave.serve.driver.pace import Sizing
from kvweave.serve.driver.tasks import Tasks
from kvweave.serve.driver.work import (
    AnswerJob,
    Begin,
    Beginning,
    Delta,
    Done,
    DriverCall,
    Event,
    Finished,
    Sink,
    Wants,
    abandon,
    nothing,
    unknown,
)
from kvweave.weave.answer import Answer
from kvweave.weave.context import Context
from kvweave.weave.turn import Turn

__all__ = ["Begin", "Delta", "Done", "Driver", "Event", "Finished"]

T = TypeVar("T")
log = logging.getLogger("kvweave.serve")

STOPPING = "the server is stopping"


class Driver:
    """Runs calls and answers of many asyncio tasks on one engine, in one thread.

    ``max_waiting`` bounds the answers, and apart from them the calls, one tenant may have in the
    queue; ``max_active`` the answers that run together. Beyond that a tenant of which nothing runs
    may have one: long answers of others do not keep it out, and decoding takes turns.
    """

    def __init__(
        self, engine: Engine, *, max_waiting: int = 64, max_active: int | None = None
    ) -> None:
        self.engine = engine  # touched only in the driver's thread, once that has started
        self.max_waiting = max_waiting
        self.max_active = max_active or engine.config.max_batch
        # the tenant, his answer, the seconds it waited, the name of its context
        self.on_answer: Callable[[str, Answer, float, str], None] = lambda *_: None
        self._wake = threading.Condition()  # guards everything below that both sides touch
        self._calls: FairQueue[DriverCall] = FairQueue()
        self._waiting: FairQueue[AnswerJob] = FairQueue()
        self._active: list[AnswerJob] = []
        self._ahead, self._idle = Ahead(), Idle(engine.maker)
        self._tasks = Tasks(engine.loop)
        self.audits = IdleAudits(engine)
        self._pace = Sizing(engine.loop.schedule)
        self._spent, self._crowd = Spent(), Crowd()
        self._deadline: float | None = None  # time.monotonic(); set: no new work
        self._thread: threading.Thread | None = None
        self._steps = self._tokens = self._cancelled = 0
        self._seconds = 1.0  # an answer takes about so long

    @property
    def stopping(self) -> bool:
        """Whether new work is refused for good."""
        return self._deadline is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvweave-driver", daemon=True)
        self._thread.start()

    def refuse(self, grace: float = 10.0) -> None:
        """Take no new work, and return; what waits gets Overloaded, what runs has ``grace`` seconds more."""
        with self._wake:
            if self._deadline is None or not grace:
                self._deadline = time.monotonic() + grace
            self._wake.notify()

    def stop(self, grace: float = 10.0) -> None:
        """As `refuse`, and wait until the thread has ended; the engine may be closed then."""
        self.refuse(grace)
        if self._thread is not None:
            self._thread.join()

    async def call(self, work: Callable[[Engine], T | Task[T]], *, tenant: str = "") -> T:
        """Run ``work`` between two steps and return or raise what it does; if that is a task, what
        comes of it. A task whose call is cancelled is closed.

        Raises Overloaded at once when too many of the tenant's calls wait; one cancelled in time never begins.
        """
        call = DriverCall(work, asyncio.get_running_loop().create_future())
        with self._wake:
            self._admit(self._calls, tenant)
            self._calls.put(tenant, call)
            self._wake.notify()
        try:
            result: T = await call.future
            return result
        finally:
            with self._wake:
                self._calls.remove(tenant, call)

    async def answer(
        self, tenant: str, begin: Begin, done: Done = nothing, wants: Wants = unknown
    ) -> AsyncGenerator[Event, None]:
        """Queue an answer with the first ``anext`` and yield what comes of its turns.

        ``begin`` runs in the driver's thread when it is the tenant's turn; a task goes on beside
        others. ``done``, if ``begin`` returned, when all its turns have ended, also when they failed
        or were cancelled (then with those answers there are). ``wants`` tells, while it waits,
        which chunks it will use. Closing the generator cancels. Raises Overloaded at once when too
        many of the tenant's answers wait, and what ``begin`` or the model raises.
        """
        job = AnswerJob(tenant, begin, done, Sink(), wants)
        with self._wake:
            self._admit(self._waiting, tenant)
            self._waiting.put(tenant, job)
            self._wake.notify()
        try:
            while (event := await job.sink.queue.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            with self._wake:
                job.cancelled = True
                if self._waiting.remove(tenant, job):
                    self._cancelled += 1
                self._wake.notify()

    def later(self, ids: Iterable[ChunkId]) -> None:
        """Compute canonical KV of these chunks when there is nothing better to do."""
        with self._wake:
            self._idle.add(ids)
            self._wake.notify()

    def stats(self) -> dict[str, float]:
        """Return counts since the start and what there is now; from any thread."""
        with self._wake:
            return {
                "waiting": len(self._waiting),
                "active": len(self._active),
                "calls": len(self._calls),
                "later": len(self._idle) + self._tasks.n_own + self.audits.n_before,
                "steps": self._steps,
                "tokens": self._tokens,
                "cancelled": self._cancelled,
            }

    def is_busy(self, context: Context) -> bool:
        """Tell whether an answer of a context is under way; in the driver's thread."""
        turns = (turn for job in self._active for turn in job.turns)
        return context.session.busy or any(turn.context is context for turn in turns)

    def _admit(self, queue: FairQueue[DriverCall] | FairQueue[AnswerJob], tenant: str) -> None:
        assert self._thread is not None, "start() the driver first"
        self._crowd.note(tenant)
        if self._deadline is not None:
            raise Overloaded(10, STOPPING)
        if queue.count(tenant) >= self.max_waiting:
            rounds = 1 + len(self._waiting) // self.max_active
            raise Overloaded(min(60, max(1, round(self._seconds * rounds))))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._has_work():
                    if self._deadline is not None:
                        return
                    self._wake.wait()
            try:
                self._turn()
            except Exception as error:  # not one request's fault: nobody may wait for ever
                log.exception("the driver failed")
                self._fail(self._active, error)
                self._tasks.fail(error)
                self.audits.stop(error)

    def _has_work(self) -> bool:
        work = self._calls or self._waiting or self._active or self._idle or self._tasks
        return bool(work or self.audits) or (not self.stopping and self.audits.is_due())

    def _turn(self) -> None:
        """Do one round: cancel, call, admit, step, hand out, or idle work."""
        if self._deadline is not None:
            self._close(self._deadline)
        for job in [job for job in self._active if job.cancelled and job.begun]:
            self._end(job, cancelled=True)
        self._spent.turn()
        self._run_calls()
        self._begin_waiting()
        if self._active or self._tasks or self.audits:
            with self._wake:
                waiting = self._waiting.first(AHEAD)
            self._ahead.look(self.engine, waiting)
            self._step()
        if not self._waiting and not self._tasks.n_own:
            self._idle.work(self._tasks)
        if not (self._waiting or self._active or self._tasks or self._idle or self.stopping):
            self.audits.begin()

    def _close(self, deadline: float) -> None:
        """Turn away what waits; past the deadline end what runs."""
        with self._wake:
            left, calls = self._waiting.clear(), self._calls.clear()
            self._idle.clear()
        self._tasks.drop()
        self.audits.stop(Overloaded(10, STOPPING))
        for job in left:
            job.sink.put(Overloaded(10, STOPPING))
        for call in calls:
            call.tell(Overloaded(10, STOPPING))
        if time.monotonic() >= deadline:
            for job in [job for job in self._active if job.begun]:
                self._end(job, cancelled=True)
            self._tasks.fail(Overloaded(10, STOPPING))

    def _run_calls(self) -> None:
        until = time.monotonic() + self._crowd.between
        while True:
            with self._wake:
                tenant = self._calls.next(but=self._held_up())
                if tenant is None:
                    return
                call = self._calls.take_of(tenant)
            self.audits.touched()
            try:
                with self._spent.by(tenant):
                    self._tasks.take(call.work(self.engine), call)
            except Exception as error:
                call.tell(error)
            if time.monotonic() >= until:
                return

    def _held_up(self) -> set[str]:
        running = (job.tenant for job in self._active)
        return self._spent.greedy({*self._calls.tenants(), *self._waiting.tenants(), *running})

    def _begin_waiting(self) -> None:
        """Begin answers. A gate may run passes for each: those that run must not wait for all."""
        until = time.monotonic() + self._crowd.between
        while True:
            with self._wake:
                running, but = {job.tenant for job in self._active}, self._held_up()
                but |= running if len(self._active) >= self.max_active else set()
                tenant = self._waiting.next(but, self._spent.behind(running))
                if tenant is None:
                    return
                job = self._waiting.take_of(tenant)
                self._active.append(job)
            with self._spent.by(tenant):
                self._begin(job)
            if self._active and time.monotonic() >= until:
                return

    def _begin(self, job: AnswerJob) -> None:
        job.waited = time.monotonic() - job.asked
        try:
            begun = job.begin(self.engine)
        except Exception as error:
            self._begun(job, error)
            return
        if isinstance(begun, Generator):
            self._tasks.begin(begun, Beginning(job, self._begun, self._gone))
        else:
            self._begun(job, None, begun)

    def _begun(self, job: AnswerJob, error: Exception | None, turns: Sequence[Turn] = ()) -> None:
        if error is not None:
            self._gone(job, error)
            return
        job.turns, job.begun = list(turns), True
        self._hand_out(job)  # a gate may have computed the first token

    def _gone(self, job: AnswerJob, error: Exception | None = None) -> None:
        self._cancelled += error is None
        self._remove(job)
        job.sink.put(error)

    def _step(self) -> None:
        ran, loop, started = True, self.engine.loop, time.monotonic()
        asked = self._active or len(self._tasks) > self._tasks.n_own
        self._pace.plan(others=bool(self._crowd) or not asked)
        try:
            ran = loop.step()
            self._pace.note(time.monotonic() - started)
        except Exception as error:  # what is one answer's fault is found when it is handed out
            log.exception("a step failed")
            self._fail(self._active, error)
        self._steps += 1
        for job in list(self._active):
            self._hand_out(job)
        self._tasks.go_on()
        self.audits.go_on()
        if not ran and (self._active or self._tasks):
            self._fail(self._active, stuck := RuntimeError("an answer has nothing to run"))
            self._tasks.fail(stuck)

    def _hand_out(self, job: AnswerJob) -> None:
        if not job.begun:
            return
        for index, turn in enumerate(job.turns):
            if index in job.answers:
                continue
            if turn.error is not None:
                known = isinstance(turn.error, KVWeaveError)
                log.log(logging.INFO if known else logging.ERROR, "an answer: %s", turn.error)
                self._fail([job], turn.error)
                return
            text, choices = turn.take()
            self._tokens += len(choices)
            if text or choices:
                job.sink.put(Delta(index, text, choices))
            if turn.done:
                try:
                    answer = turn.finish()
                except Exception as error:
                    self._fail([job], error)
                    return
                self._finished(job, index, answer)
        if len(job.answers) == len(job.turns):
            self._end(job)

    def _finished(self, job: AnswerJob, index: int, answer: Answer) -> None:
        job.answers[index] = answer
        total = answer.usage.get("total")
        if isinstance(total, float):
            self._seconds += 0.1 * (total - self._seconds)
        job.sink.put(Finished(index, answer))
        try:
            self.on_answer(job.tenant, answer, job.waited, job.turns[index].context.name)
        except Exception:
            log.exception("an answer could not be counted")

    def _fail(self, jobs: Iterable[AnswerJob], error: Exception) -> None:
        for job in [job for job in jobs if job.begun]:  # of others their tasks are told
            job.sink.put(error)
            for index, turn in enumerate(job.turns):
                if index not in job.answers:
                    abandon(turn)
            self._leave(job)

    def _end(self, job: AnswerJob, cancelled: bool = False) -> None:
        """Let a job go whose turns are done, or cancel them."""
        for index, turn in enumerate(job.turns):
            if index in job.answers:
                continue
            try:
                self._finished(job, index, turn.cancel())
            except Exception:
                log.exception("a cancelled answer could not be kept")
                abandon(turn)
        self._cancelled += cancelled
        self._leave(job)
        job.sink.put(None)

    def _leave(self, job: AnswerJob) -> None:
        self._remove(job)
        self.audits.touched()
        try:
            job.done(self.engine, [job.answers[i] for i in sorted(job.answers)])
        except Exception:
            log.exception("what follows an answer failed")

    def _remove(self, job: AnswerJob) -> None:
        with self._wake:
            if job in self._active:
                self._active.remove(job)

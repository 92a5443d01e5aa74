"""One step of the engine, top to bottom: choose who runs, one model pass, sample, hand out.

What a context needs before it decodes is a job (see `Steps`): it yields works, one after the other,
and ends with the logits of the last row. Contexts of any number run together in one packed pass:
those that decode bring one row each, those that prepare a piece of the work they are at::

    step   A: prompt of 6 rows           B: look, then repair       C
    1      rows 0..3                     look                       decode
    2      rows 4..5, first token        repair 0..1                decode
    3      decode                        repair 2..3, first token   decode

A request's fault is its own: `Loop.step` never raises it, and the others go on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from traceback import clear_frames
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import InvalidArgument, LoadFailed
from kvweave.interrupts import let_in
from kvweave.run.apart import apart
from kvweave.run.base import Backend, Ints, Observer, Rows, Steps, Work
from kvweave.run.sample import Choice, Detokenizer, Sampler, Sampling, StopScanner, decoder, sample
from kvweave.run.schedule import Grant, Job, Schedule
from kvweave.store.kv import KV
from kvweave.verbs import Gate

T = TypeVar("T")
_KEYS = count(1)
MOMENT = 0.002  # seconds between two looks for chunks that nothing can be done without


def new_key() -> int:
    """Return a key that no other request of this process has."""
    return next(_KEYS)


@dataclass(slots=True)
class Request:
    """What to compute for one context, then tokens to generate.

    ``steps`` ends with the logits [vocab] of the last row, or None where nothing is to be sampled.
    While it runs it may set ``raw`` and ``observer``: they get the generated tokens' rows, the
    first as number ``n_raw``. Nothing else may write ``rows`` from then on. ``watch`` is shown the
    logits [vocab] of every token taken, ``decoded`` told of each one's row: it may take rows
    away, and lowers ``n_rows`` by them. In the ``background`` (what for) one runs alone.
    """

    key: int
    rows: Rows
    steps: Steps[Tensor | None]
    sampling: Sampling | None  # None only computes rows
    tenant: str = ""
    prompt: Ints | None = None  # the tokens before, where a repetition penalty looks at them
    raw: KV | None = None
    n_raw: int = 0
    observer: Observer | None = None
    watch: Callable[[Tensor], None] | None = None
    decoded: Callable[[], None] | None = None
    background: Literal["", "audit", "refine"] = ""
    urgent: bool = False  # an answer waits for it
    out: list[int] = field(default_factory=list)  # all but the last have their row
    choices: list[Choice] = field(default_factory=list)
    text: str = ""
    fresh: list[str] = field(default_factory=list)  # text not yet streamed
    finish: str = ""  # stop, length, cancelled, error; "" while running
    error: Exception | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds from `started`
    ended: float | None = None
    prepared: bool = False  # the steps have returned
    n_rows: int = 0  # rows there were then
    work: Work | None = None  # what the steps wait for
    n_run: int = 0  # rows of it that were run
    found: list[Tensor] = field(default_factory=list)  # their logits, one tensor a piece
    logits: Tensor | None = None  # [vocab] to sample the next token from
    sampler: Sampler | None = None
    detokenizer: Detokenizer | None = None
    scanner: StopScanner | None = None

    @property
    def running(self) -> bool:
        return not self.finish

    @property
    def n_pending(self) -> int:
        """Rows of the work at hand that were not run; waiting counts as one."""
        return 0 if self.work is None else max(1, self.work.n) - self.n_run

    @property
    def loading(self) -> bool:
        """Whether the next pass would wait for chunks."""
        rows = self.rows if self.work is None else self.work.rows
        return rows.pending and not rows.arrived

    def next_work(self, n_rows: int) -> Work:
        """Return the next ``n_rows`` rows of the work at hand, or the one that decodes."""
        if self.work is not None:
            return self.work.part(self.n_run, self.n_run + n_rows)
        n = len(self.out) - 1
        slot = self.n_rows + n
        self.rows.reserve(slot + 1)
        return Work(
            self.rows,
            tokens=np.array(self.out[-1:]),
            slots=np.array([slot]),
            positions=self.rows.positions[slot - 1 : slot] + 1,
            want=np.array([0]),
            raw=self.raw,
            observer=self.observer,
            at=self.n_raw + n,
        )


# Work on an engine that waits for requests: yields each, goes on when it is over, returns T.
Task = Generator[Request, None, T]


class Loop:
    """Runs requests until they are finished; who drives it holds ``gate.lock``."""

    def __init__(self, backend: Backend, max_batch: int = 16, max_rows: int = 512) -> None:
        self.backend, self.gate = backend, Gate(apart)
        self.schedule = Schedule(max_batch, max_rows)
        self.requests: dict[int, Request] = {}  # running, in order of arrival
        self.seconds = defaultdict[str, float](float)  # in steps, by what only waits behind all
        self._nothing = torch.empty(0, backend.n_vocab, dtype=backend.dtype, device=backend.device)

    def add(self, request: Request) -> None:
        """Queue a request and run its steps up to their first work.

        What they raise is the request's error. Raises InvalidArgument for a key that is running.
        """
        if request.key in self.requests:
            raise InvalidArgument("key", f"request {request.key} is running")
        asked = request.sampling
        if asked is not None:
            about = self.backend.ends, request.prompt, self.backend.n_vocab
            request.sampler = Sampler(asked, self.backend.device, *about)
            if (decode := self.decode(asked.shown)) is not None:
                request.detokenizer, request.scanner = Detokenizer(decode), StopScanner(asked.stop)
        self.requests[request.key], started = request, time.perf_counter()
        try:
            if asked is not None and asked.stop and request.detokenizer is None:
                reason = "this model came without a tokenizer, so nothing it writes is text"
                raise InvalidArgument("stop", reason, "use stop_tokens")
            self._advance(request, lambda: next(request.steps))
        except BaseException as error:
            self._fail(request, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if request.background:  # what is placed first takes its time too
                self.seconds[request.background] += time.perf_counter() - started
        if request.n_pending:
            n_left = request.sampling.max_tokens if request.sampling is not None else 0
            who = request.tenant, False, bool(request.background), request.urgent
            self.schedule.add(Job(request.key, request.n_pending, n_left, *who))

    def cancel(self, key: int) -> None:
        """Stop a request; the rows computed up to now stay."""
        if (request := self.requests.get(key)) is not None:
            self._finish(request, "cancelled")
            self._close(request)

    @apart()
    def step(self) -> bool:
        """Run one model pass; return False when there is nothing to run. What fails fails only
        the requests at fault: see `Request.error`."""
        let_in()
        started, grants = time.perf_counter(), self._plan()
        if not grants and all(request.logits is None for request in self.requests.values()):
            waits = any(request.loading for request in self.requests.values())
            time.sleep(MOMENT * waits)  # whoever drives this may do something else meanwhile
            return waits
        what = sorted({request.background for request in self.requests.values()})
        try:
            if (interrupt := self._run(grants)) is not None:
                raise interrupt
            self._sample([r for r in self.requests.values() if r.logits is not None])
        finally:
            self.seconds[what[0]] += time.perf_counter() - started
        return True

    def run(self, until: Callable[[], bool]) -> None:
        """Step until ``until()`` or nothing is left."""
        while not until() and self.step():
            pass

    def finish(self, task: Task[T]) -> T:
        """Run a task here and now, with all other requests; raises what ends it."""
        try:
            request = next(task)
            while True:
                if request.key not in self.requests:  # else others wait for it too
                    self.add(request)
                while request.running and self.step():
                    pass
                request = goes_on(task, request)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            task.close()

    def decode(self, shown: Iterable[int] = ()) -> Callable[[list[int]], str] | None:
        """Return tokens -> text, with special ones that are ``shown``; None without a tokenizer."""
        tokenizer = self.backend.tokenizer
        return None if tokenizer is None else decoder(tokenizer, shown)

    def _plan(self) -> list[Grant]:
        """Return who runs; who waits for chunks under a pass does when nobody else can, one at a time."""
        sampled = [key for key, r in self.requests.items() if r.logits is not None]
        loading = [key for key, r in self.requests.items() if r.logits is None and r.loading]
        behind = [key for key, r in self.requests.items() if r.background]
        behind = behind if len(behind) < len(self.requests) else []
        grants = self.schedule.step({*sampled, *loading, *behind})
        if loading and not grants and not sampled:
            ready = [k for k in loading if (w := self.requests[k].work) is None or not w.waits]
            grants = self.schedule.step({*loading, *behind} - {*ready[:1]})
        return grants

    def _run(self, grants: Sequence[Grant]) -> BaseException | None:
        """Run these grants and take them back; return what interrupted a request's own steps.

        What interrupts the pass is raised; it is run again with the next step.
        """
        try:
            passed = self._forward(grants)
        except BaseException:
            for grant in grants:
                self.schedule.done(grant.key, 0)
            raise
        interrupt: BaseException | None = None
        for grant, logits in zip(grants, passed, strict=True):
            request = self.requests.get(grant.key)
            if request is None:  # cancelled meanwhile
                self.schedule.done(grant.key, 0)
                continue
            try:
                self._passed(request, grant, logits)
            except BaseException as error:
                self._fail(request, error)
                interrupt = interrupt if isinstance(error, Exception) else error
            pending = None if grant.is_decode or not request.running else request.n_pending
            self.schedule.done(grant.key, grant.n_rows, not request.running, pending)
        return interrupt

    def _forward(self, grants: Sequence[Grant]) -> list[Tensor | Exception]:
        """Return each grant's logits, or why it has none."""
        found: dict[int, Any] = {grant.key: self._work(grant) for grant in grants}
        works = [key for key, work in found.items() if isinstance(work, Work)]
        if works:  # no local knows one afterwards: errors keep frames
            found |= zip(works, self._pass([found[key] for key in works]), strict=True)
        return [found[grant.key] for grant in grants]

    def _work(self, grant: Grant) -> Work | Tensor | Exception:
        """Return what a grant runs; what it waited for has nothing to run."""
        try:
            work = self.requests[grant.key].next_work(grant.n_rows)
            if work.waits:
                work.rows.settle()
            return self._nothing if work.waits else work
        except Exception as error:
            return error

    def _pass(self, works: Sequence[Work]) -> Sequence[Tensor | Exception]:
        """Run works together; where that fails each alone, so that only who is at fault fails."""
        try:
            return self.backend.forward(works)
        except Exception as error:
            if len(works) == 1:
                return [error]
        return [self._pass([work])[0] for work in works]

    def _passed(self, request: Request, grant: Grant, logits: Tensor | Exception) -> None:
        """Take what a grant found: logits to sample from, or to go on with. Raises its fault."""
        if isinstance(logits, LoadFailed) and not grant.is_decode:
            why = logits
            self._advance(request, lambda: request.steps.throw(why))
        elif isinstance(logits, Exception):
            raise logits
        elif grant.is_decode:
            request.logits = logits[0]
            if request.decoded is not None:
                request.decoded()
        else:
            request.n_run += grant.n_rows
            request.found.append(logits)
            if not request.n_pending:
                found = torch.cat(request.found) if len(request.found) > 1 else request.found[0]
                self._advance(request, lambda: request.steps.send(found))

    def _advance(self, request: Request, go: Callable[[], Work]) -> None:
        """Go on in a request's steps, to the next work that has rows or to their end."""
        request.work, request.n_run, request.found = None, 0, []
        try:
            work = go()
            while not (work.n or (work.waits and work.rows.pending)):
                work = request.steps.send(self._nothing)
            request.work = work
        except StopIteration as done:
            self._prepared(request, done.value)

    def _prepared(self, request: Request, logits: Tensor | None) -> None:
        request.prepared, request.n_rows = True, request.rows.n
        if request.sampling is None or logits is None:
            self._finish(request, "length")
        elif logits.ndim != 1:
            raise InvalidArgument("steps", f"returned logits of shape {tuple(logits.shape)}")
        else:
            request.logits = logits

    def _sample(self, requests: Sequence[Request]) -> None:
        """Give each request its next token."""
        if not requests:
            return
        rows = [request.logits for request in requests if request.logits is not None]
        samplers = [request.sampler for request in requests if request.sampler is not None]
        for request, choice in zip(requests, sample(torch.stack(rows), samplers), strict=True):
            seen, request.logits = request.logits, None
            try:
                if request.watch is not None and seen is not None:
                    request.watch(seen)
                self._take(request, choice)
            except Exception as error:
                self._fail(request, error)

    def _take(self, request: Request, choice: Choice | Exception) -> None:
        """Add one sampled token; decide whether the request ends."""
        if isinstance(choice, Exception):
            raise choice
        if request.first_token is None:
            request.first_token = time.perf_counter() - request.started
        request.out.append(choice.token)
        request.choices.append(choice)
        sampling = request.sampling
        assert sampling is not None
        ended = choice.token in sampling.stop_tokens
        if ended or (choice.token in self.backend.ends and not sampling.ignore_eos):
            self._finish(request, "stop")
            return
        if request.detokenizer is not None and request.scanner is not None:
            text, stopped = request.scanner.feed(request.detokenizer.feed(choice.token))
            self._emit(request, text)
            if stopped:
                self._finish(request, "stop", flush=False)
                return
        if len(request.out) >= sampling.max_tokens:
            self._finish(request, "length")
        elif request.key not in self.schedule:  # its steps had nothing to run
            n_left = sampling.max_tokens - len(request.out)
            self.schedule.add(Job(request.key, 0, n_left, request.tenant))

    def _finish(self, request: Request, why: str, flush: bool = True) -> None:
        request.finish = why
        request.ended = time.perf_counter() - request.started
        self.requests.pop(request.key, None)
        self.schedule.cancel(request.key)
        request.work, request.found, request.logits = None, [], None
        if flush and request.detokenizer is not None and request.scanner is not None:
            text, stopped = request.scanner.feed(request.detokenizer.flush())
            request.finish = "stop" if stopped and why == "length" else why
            self._emit(request, text if stopped else text + request.scanner.flush())

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request by what went wrong in it."""
        self._finish(request, "error", flush=False)
        interrupted = RuntimeError("interrupted while it was prepared")
        clear_frames(error.__traceback__)  # its lines are kept, but no activations and no rows
        request.error = error if isinstance(error, Exception) else interrupted
        self._close(request)

    def _close(self, request: Request) -> None:
        """Let the steps undo what they have begun."""
        try:
            request.steps.close()
        except Exception as error:
            request.finish, request.error = "error", request.error or error

    def _emit(self, request: Request, text: str) -> None:
        if text:
            request.text += text
            request.fresh.append(text)


def goes_on(task: Task[T], request: Request) -> Request:
    """Return what a task waits for next, whose request is over. Raises StopIteration at its end, or its error."""
    if request.error is not None:
        return task.throw(request.error)
    return next(task)

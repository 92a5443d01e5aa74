"""One step of the engine, top to bottom: choose who runs, one model pass, sample, hand out.

Contexts of any number run together in one packed pass: those that decode bring one row each,
those that prefill or repair bring a piece of their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.run.attention import Reads, Segment
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.run.sample import Choice, Detokenizer, Sampler, Sampling, StopScanner
from kvweave.run.schedule import Job, Schedule, Turn
from kvweave.store.kv import KV


@dataclass(slots=True)
class Request:
    """Rows to compute for one context, then tokens to generate.

    ``raw``, if given, receives the unrotated KV of the computed rows in order, then of generated
    tokens; ``reads`` what they attend to.
    """

    key: int
    rows: KVRows
    tokens: Tensor  # [n] int64, on the model's device
    slots: Tensor  # [n] int64, CPU, increasing
    positions: Tensor  # [n] int64
    raw: KV | None
    sampling: Sampling | None  # None only computes the rows
    tenant: str = ""
    reads: Reads | None = None
    first: Tensor | None = None  # [vocab] logits of the last row, where it is computed already
    n_done: int = 0  # rows computed
    out: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # stop, length, cancelled; "" while running
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds from `started`
    ended: float | None = None
    sampler: Sampler | None = None
    detokenizer: Detokenizer | None = None
    scanner: StopScanner | None = None
    fresh: list[str] = field(default_factory=list)  # text not yet streamed

    @property
    def running(self) -> bool:
        return not self.finish

    @property
    def next_slot(self) -> int:
        return int(self.slots[-1]) + 1 + max(0, len(self.out) - 1)


class Loop:
    """Runs requests until they are finished. Not thread-safe: one driver calls `step`."""

    def __init__(self, runner: Runner, max_batch: int = 16, max_rows: int = 512) -> None:
        self.runner = runner
        self.schedule = Schedule(max_batch, max_rows)
        self.requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Queue a request; a request with nothing to do is finished at once."""
        n = request.tokens.numel() - request.n_done
        n_new = request.sampling.max_tokens if request.sampling is not None else 0
        if n == 0 and request.first is None:
            self._finish(request, "length")
            return
        decode = self.decode()
        if request.sampling is not None:
            request.sampler = Sampler(request.sampling, self.runner.device)
        if request.sampling is not None and decode is not None:
            request.detokenizer = Detokenizer(decode)
            request.scanner = StopScanner(request.sampling.stop)
        if request.first is not None:
            assert request.sampler is not None
            self._take(request, request.sampler(request.first))
            request.n_done = request.tokens.numel()
            n, n_new = 0, n_new - 1
        if request.running:
            self.schedule.add(Job(request.key, n, n_new, request.tenant))
            self.requests[request.key] = request

    def cancel(self, key: int) -> None:
        """Stop a request; its rows up to now stay valid."""
        request = self.requests.pop(key, None)
        self.schedule.cancel(key)
        if request is not None and request.running:
            self._finish(request, "cancelled")

    def step(self) -> bool:
        """Run one model pass; return False when there is nothing to run.

        An error in the pass cancels the requests of this step and is raised.
        """
        turns = self.schedule.step()
        if not turns:
            return False
        try:
            self._run(turns)
        except BaseException:
            for turn in turns:
                self.schedule.done(turn.key, turn.n_rows, True)
                request = self.requests.pop(turn.key, None)
                if request is not None:
                    self._finish(request, "error")
            raise
        return True

    def run(self, until: Callable[[], bool]) -> None:
        """Step until ``until()`` or nothing is left."""
        while not until() and self.step():
            pass

    def _run(self, turns: list[Turn]) -> None:
        segments, want, sampled = [], [], []
        start = 0
        for turn in turns:
            request = self.requests[turn.key]
            segments.append(self._segment(request, turn))
            start += segments[-1].n
            last = turn.is_decode or request.n_done + turn.n_rows == request.tokens.numel()
            if last and request.sampling is not None:
                want.append(start - 1)
                sampled.append(request)
        logits = self.runner.forward(segments, torch.tensor(want, device=self.runner.device))
        for row, request in zip(logits, sampled, strict=True):
            assert request.sampler is not None
            self._take(request, request.sampler(row))
        for turn in turns:
            request = self.requests[turn.key]
            if not turn.is_decode:
                request.n_done += turn.n_rows
            if request.running and request.sampling is None:
                if request.n_done == request.tokens.numel():
                    self._finish(request, "length")
            self.schedule.done(turn.key, turn.n_rows, not request.running)
            if not request.running:
                del self.requests[turn.key]

    def _segment(self, request: Request, turn: Turn) -> Segment:
        device = self.runner.device
        if turn.is_decode:
            slot = request.next_slot
            position = int(request.positions[-1]) + len(request.out)
            request.rows.reserve(slot + 1)
            at = request.tokens.numel() + len(request.out) - 1
            return Segment(
                request.rows,
                torch.tensor([request.out[-1]], device=device),
                torch.tensor([slot]),
                torch.tensor([position], device=device),
                request.raw,
                at,
                reads=request.reads,
            )
        span = slice(request.n_done, request.n_done + turn.n_rows)
        return Segment(
            request.rows,
            request.tokens[span],
            request.slots[span],
            request.positions[span],
            request.raw,
            request.n_done,
            reads=request.reads,
        )

    def _take(self, request: Request, choice: Choice) -> None:
        """Add one sampled token; decide whether the request ends."""
        if request.first_token is None:
            request.first_token = time.perf_counter() - request.started
        request.out.append(choice.token)
        request.choices.append(choice)
        sampling = request.sampling
        assert sampling is not None
        ended = choice.token in sampling.stop_tokens
        if ended or (choice.token in self.runner.ends and not sampling.ignore_eos):
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

    def _finish(self, request: Request, why: str, flush: bool = True) -> None:
        request.finish = why
        request.ended = time.perf_counter() - request.started
        if flush and request.detokenizer is not None and request.scanner is not None:
            text, stopped = request.scanner.feed(request.detokenizer.flush())
            self._emit(request, text if stopped else text + request.scanner.flush())

    def _emit(self, request: Request, text: str) -> None:
        if text:
            request.text += text
            request.fresh.append(text)

    def decode(self) -> Callable[[list[int]], str] | None:
        """Return tokens -> text, None for a model without a tokenizer."""
        tokenizer = self.runner.tokenizer
        if tokenizer is None:
            return None
        return lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

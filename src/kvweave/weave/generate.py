"""One answer of one context: weave, decode, and make the new text a chunk."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvweave.chunk.identity import Kind
from kvweave.errors import OverBudget, check_options
from kvweave.run.sampling import Choice, Sampling
from kvweave.weave.parts import Part
from kvweave.weave.plan import Plan

if TYPE_CHECKING:
    from kvweave.weave.context import Context


def request_from(max_tokens: int, options: Mapping[str, object]) -> tuple[Sampling, float | None]:
    """Build a Sampling, and take out ``max_drift``. Raises InvalidArgument for an unknown option,
    with what is near."""
    check_options(options, ["max_drift", *(f.name for f in fields(Sampling))])
    clean, stop = dict(options), options.get("stop", ())
    max_drift = clean.pop("max_drift", None)
    clean["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=max_tokens, **clean)  # type: ignore[arg-type]
    return sampling, None if max_drift is None else float(max_drift)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated text and how it came about; prints as the text.

    ``usage`` holds token counts, ``kv`` (see Plan.counts) and seconds: ``ttft`` from the call to
    the first token, ``weave`` of it before the model ran, ``total``, ``idle`` spent afterwards on
    canonical KV.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str  # stop, length, cancelled
    choices: tuple[Choice, ...]
    plan: Plan
    usage: dict[str, object]

    def __str__(self) -> str:
        return self.text


class Turn:
    """A running answer. `run` drives it to the end, `stream` piece by piece, `cancel` stops it."""

    def __init__(self, context: Context, sampling: Sampling, chat: bool) -> None:
        self.context, self.chat = context, chat
        self._started = time.perf_counter()
        self._before = context.snapshot()
        self._answer: Answer | None = None
        self._gone = False  # an error put the context back to before
        self._n_taken = 0  # choices that `take` has handed out
        header = context._maker.chat.header() if chat else ""
        self._header: Part | None = None
        if header:
            self._header = context.append(header, kind="assistant", label="answer")
        settings = context.settings
        try:
            self._woven = context._weaver.prepare(
                context._state, context.parts, context._strategy, settings.share, sampling
            )
        except BaseException:
            context.restore(self._before)
            raise
        context._last = self._woven.plan
        self._weave_seconds = time.perf_counter() - self._started
        self._woven.request.started = self._started
        context._loop.add(self._woven.request)
        context._answering = True

    @property
    def done(self) -> bool:
        """Whether the last token was sampled."""
        return not self._woven.request.running

    @property
    def failed(self) -> bool:
        """Whether the model pass raised; only `abandon` makes sense then."""
        return self._woven.request.finish == "error"

    def take(self) -> tuple[str, list[Choice]]:
        """Return the text and the choices that are new since the last call, for who drives the
        loop himself; a choice may come before its text."""
        request = self._woven.request
        text = "".join(request.fresh)
        request.fresh.clear()
        choices = request.choices[self._n_taken :]
        self._n_taken += len(choices)
        return text, choices

    def run(self) -> Answer:
        """Drive the loop until this answer is complete; other turns progress with it."""
        try:
            self.context._loop.run(lambda: self.done)
        except BaseException:
            self.abandon()
            raise
        return self.finish()

    def stream(self) -> Generator[str]:
        """Yield text as it comes; finishes, or cancels when the iterator is closed."""
        request = self._woven.request
        try:
            while True:
                while request.fresh:
                    yield request.fresh.pop(0)
                if self.done or not self.context._loop.step():
                    break
            yield from request.fresh
            request.fresh.clear()
        except GeneratorExit:
            self.cancel()
            raise
        except BaseException:
            self.abandon()
            raise
        self.finish()

    def cancel(self) -> Answer:
        """Stop here; what was generated stays as a chunk."""
        self.context._loop.cancel(self._woven.request.key)
        return self.finish()

    def abandon(self) -> None:
        """Stop here and put the context back to what it was before the answer."""
        self.context._loop.cancel(self._woven.request.key)
        self.context._answering = False
        self.context._state.woven = []
        self.context.restore(self._before)
        self._gone = True

    def finish(self) -> Answer:
        """Make the new text a chunk of the context and return the answer; the second call too."""
        if self._answer is not None:
            return self._answer
        context, request = self.context, self._woven.request
        context._answering = False
        if not self._gone and request.n_done < request.tokens.numel():
            self.abandon()  # cancelled before its rows were complete
        if not self._gone:
            context._weaver.commit(context._state, self._woven)
            self._add_parts(self._kept_tokens())
        started = time.perf_counter()
        self._denoise()
        usage: dict[str, object] = {
            "prompt_tokens": self._woven.plan.n_tokens,
            "completion_tokens": len(request.out),
            "kv": self._woven.plan.counts(),
            "ttft": request.first_token,
            "weave": self._weave_seconds,
            "total": request.ended,
            "idle": time.perf_counter() - started,
        }
        self._answer = Answer(
            request.text, tuple(request.out), request.finish, tuple(request.choices),
            self._woven.plan, usage,
        )  # fmt: skip
        return self._answer

    def _denoise(self) -> None:
        """Compute canonical KV of this turn; without room the next prune prefills it instead."""
        context = self.context
        if not context.settings.denoise:
            return
        known = {p.uid for p in self._before.parts[:-1]}
        try:
            context._maker.canonicalise(p.id for p in context.parts if p.uid not in known)
        except OverBudget:
            return

    def _kept_tokens(self) -> list[int]:
        """Return the generated tokens that stay: no end token, nothing past a stop string."""
        request, context = self._woven.request, self.context
        assert request.sampling is not None
        out = list(request.out)
        ends = context._loop.runner.ends | set(request.sampling.stop_tokens)
        if request.finish == "stop" and out and out[-1] in ends:
            return out[:-1]
        decode = context._loop.decode()
        if request.finish == "stop" and decode is not None:
            while out and not request.text.startswith(decode(out)):
                out.pop()
        return out

    def _add_parts(self, tokens: list[int]) -> None:
        """Put header, generated tokens and the closing text into one chunk (two with thinking)."""
        context, request = self.context, self._woven.request
        head = [int(t) for t in context._table.tokens(self._header.id)] if self._header else []
        after = context._maker.chat.wrap("assistant").after if self.chat else ""
        whole = head + tokens + (context._maker.tokens(after) if after else [])
        if not whole or (not tokens and self._header is None):
            return
        n_rows = len(head) + min(len(tokens), max(0, len(request.out) - 1))
        pieces = self._split(whole, len(head) + len(tokens))
        with context.edit():
            if self._header is not None:
                context.drop(self._header, mode="forget")
            parts = []
            for kind, piece in pieces:
                if self.chat:
                    parts.append(context.answer_part(kind, piece))
                else:
                    parts.append(context.append(piece, kind="assistant"))
        context._weaver.extend(context._state, parts, (len(head), n_rows), request)
        first = int(request.slots[-1])  # this row predicted the first token
        context._answered = (context.parts, first, first + max(1, len(tokens)))

    def _split(self, whole: list[int], n_text: int) -> list[tuple[Kind, list[int]]]:
        """Cut a thinking block off the answer, so that it can be pruned on its own."""
        mark = self.context._maker.chat.think_end
        if not self.chat or mark is None or mark not in whole[: n_text - 1]:
            return [("assistant", whole)]
        cut = whole.index(mark) + 1
        return [("thinking", whole[:cut]), ("assistant", whole[cut:])]


def run_all(turns: list[Turn]) -> list[Answer]:
    """Drive several contexts' turns together, one packed pass a step; return their answers."""
    if not turns:
        return []
    loop = turns[0].context._loop
    try:
        loop.run(lambda: all(t.done for t in turns))
    except BaseException:
        for turn in turns:
            turn.abandon()
        raise
    return [t.finish() for t in turns]

"""The rows of one context: weave them, answer over them, measure them.

A session knows the rows, not the edits: parts come with each call, and a running answer (`Turn`)
puts its text into whatever gives it the verbs of `Editor`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

import numpy as np

from kvweave.chunk.identity import Kind
from kvweave.errors import OverBudget
from kvweave.run.loop import Loop
from kvweave.run.sampling import Choice, Sampling
from kvweave.weave.answer import Answer
from kvweave.weave.check import Check
from kvweave.weave.editor import Editor
from kvweave.weave.history import BEGUN
from kvweave.weave.maker import Maker
from kvweave.weave.oracle import compare
from kvweave.weave.parts import (
    Part,
    exact_prefix,
    require_speech,
)
from kvweave.weave.plan import Plan
from kvweave.weave.repair import NoRepair, Strategy, Wish, strategy
from kvweave.weave.settings import Settings, check_share
from kvweave.weave.sources import runs, tokens_of
from kvweave.weave.state import State
from kvweave.weave.weaver import Weaver, Weaving

# parts that were there and the first and last of the rows that spoke, when a context answered last
NO_ANSWER: tuple[tuple[Part, ...], int, int] = ((), 0, 0)
log = logging.getLogger("kvweave.weave")
COMPARED = 64  # predictions of the last answer that `check` compares, at most


class Session:
    """Rows of one context, by ``key`` among those of all namespaces."""

    def __init__(
        self, key: str, weaver: Weaver, maker: Maker, loop: Loop, settings: Settings
    ) -> None:
        self.key, self.settings = key, settings
        self.weaver, self.maker, self.loop = weaver, maker, loop
        rows = weaver.backend.new_rows(weaver.codec)
        self.state = State(key, rows, settings.prune == "evict", settings.namespace)
        self.strategy = strategy(settings.repair)
        self.plan: Plan | None = None  # of the last weave
        self.turn: Turn | None = None  # between its beginning and its end
        self._answered = NO_ANSWER

    def preview(self, parts: Sequence[Part]) -> Plan:
        """Say what a weave would do now, without doing it."""
        return self.weaver.plan(self.state, parts, self.strategy, self.settings.share)

    def weave(
        self,
        parts: Sequence[Part],
        repair: str | Strategy | None,
        share: float | None,
        max_drift: float | None,
    ) -> Plan:
        """Bring all rows up to date; with ``repair``, what is not exact anew by that strategy."""
        share = self.settings.share if share is None else share
        check_share(share)
        chosen = self.strategy if repair is None else strategy(repair)
        wish = self._wish(chosen, share, max_drift)
        woven = self.state.woven
        left = self.state.woven = woven[: None if repair is None else exact_prefix(woven)]
        try:
            weaving = self.weaver.prepare(self.state, parts, chosen, wish)
        except BaseException:
            if self.state.woven is left:  # no row has changed
                self.state.woven = woven
            raise
        self.strategy, self.plan = chosen, self._run(weaving)
        return self.plan

    def begin(
        self, editor: Editor, sampling: Sampling, max_drift: float | None, chat: bool
    ) -> Turn:
        """Queue an answer. Raises InvalidArgument for a bound that cannot be kept."""
        wish = self._wish(self.strategy, self.settings.share, max_drift)
        self.turn = Turn(self, editor, (sampling, wish), chat)
        return self.turn

    def check(self, parts: tuple[Part, ...]) -> Check:
        """Measure the distance to a full prefill over the rows as the last answer saw them, or, when
        parts were edited since, as they are woven now."""
        require_speech(parts)
        answered, start, stop = self._answered
        plan = self.preview(parts)
        if answered != parts or any(s.placed for s in plan.spans):
            start, stop = plan.n_tokens - 1, plan.n_tokens
            if plan.prefilled or any(s.placed for s in plan.spans):
                self.weave(parts, None, None, None)
        elif plan.prefilled:  # the answer's last rows, behind those that it saw
            self._run(self.weaver.prepare(self.state, parts, NoRepair(), Wish(0.0)))
        table, state = self.weaver.table, self.state
        tokens = np.concatenate([tokens_of(table, p).astype(np.int64) for p in parts])
        virtual = [p for p in state.woven if p.part.virtual]
        loaded = {p.part.uid: self.weaver.sources.rows_of(p.part) for p in virtual}
        span = slice(max(start, stop - COMPARED), stop)
        return compare(self.weaver.backend, state.rows, tokens, span, runs(virtual, {}, loaded))

    def fork(self, key: str) -> Session:
        """Return a session with copies of the rows. Raises OverBudget."""
        twin = Session(key, self.weaver, self.maker, self.loop, self.settings)
        self.weaver.shelf.charge(key, self.state.n_bytes)
        try:
            twin.state = self.state.copy(key)
        except BaseException:
            self.weaver.shelf.charge(key, 0)
            raise
        twin.strategy, twin.plan = self.strategy, self.plan
        return twin

    def close(self) -> None:
        """End what runs and let go of the rows."""
        if self.turn is not None:
            self.turn.abandon()
        self.state = State(self.key, self.weaver.backend.new_rows(self.weaver.codec))
        self.weaver.shelf.charge(self.key, 0)

    def _wish(self, chosen: Strategy, share: float, max_drift: float | None) -> Wish:
        bound = self.settings.max_drift if max_drift is None else max_drift
        return self.weaver.wish(self.state, chosen, share, bound)

    def _run(self, weaving: Weaving) -> Plan:
        """Compute the rows of a weave, and record it."""
        request = weaving.request
        try:
            self.loop.add(request)
            self.loop.run(lambda: not request.running)
            if request.error is not None:
                raise request.error
            self.weaver.commit(self.state, weaving)
        except BaseException:
            self.loop.cancel(request.key)
            self.weaver.settle_account(self.state)
            raise
        assert weaving.plan is not None
        if any(span.placed for span in weaving.plan.spans):
            self._answered = NO_ANSWER  # its rows are not these
        return weaving.plan


class Turn:
    """A running answer. `run` drives it to the end, `stream` piece by piece, `cancel` stops it."""

    def __init__(
        self, session: Session, context: Editor, asked: tuple[Sampling, Wish], chat: bool
    ) -> None:
        self.context, self.chat = context, chat
        self._session = session
        self._started = time.perf_counter()
        self._before = context.snapshot()
        self._answer: Answer | None = None
        self._gone = False  # the context was put back to before
        self._n_taken = 0  # choices that `take` has handed out
        header = session.maker.chat.header() if chat else ""
        self._header: Part | None = None
        if header:
            with context.edit(BEGUN):
                self._header = context.append(header, kind="assistant", label="answer")
        sampling, wish = asked
        try:
            self._weaving = session.weaver.prepare(
                session.state, context.parts, session.strategy, wish, sampling
            )
            self._weave_seconds = time.perf_counter() - self._started
            self._weaving.request.started = self._started
            session.loop.add(self._weaving.request)
        except BaseException:
            session.weaver.settle_account(session.state)
            context.restore(self._before)
            raise

    @property
    def done(self) -> bool:
        """Whether the last token was sampled."""
        return not self._weaving.request.running

    @property
    def complete(self) -> bool:
        """Whether the context has its text."""
        return self._answer is not None and not self._gone

    @property
    def plan(self) -> Plan | None:
        """How its context is woven, once the repair has chosen."""
        return self._weaving.plan

    @property
    def failed(self) -> bool:
        """Whether it ended in an error; only `abandon` makes sense then."""
        return self.error is not None

    @property
    def error(self) -> Exception | None:
        """What it ended in, if that is an error."""
        return self._weaving.request.error

    def take(self) -> tuple[str, list[Choice]]:
        """Return the text and the choices that are new since the last call, for who drives the
        loop himself; a choice may come before its text."""
        request = self._weaving.request
        text = "".join(request.fresh)
        request.fresh.clear()
        choices = request.choices[self._n_taken :]
        self._n_taken += len(choices)
        return text, choices

    def run(self) -> Answer:
        """Drive the loop until this answer is complete; other turns progress with it."""
        try:
            self._session.loop.run(lambda: self.done)
        except BaseException:
            self.abandon()
            raise
        return self.finish()

    def stream(self) -> Generator[str]:
        """Yield text as it comes; finishes, or cancels when the iterator is closed or let go of."""
        pieces = self._pieces()
        next(pieces)  # closing what has not begun would not reach the answer
        return pieces

    def _pieces(self) -> Generator[str]:
        request = self._weaving.request
        try:
            yield ""
            while True:
                while request.fresh:
                    yield request.fresh.pop(0)
                if self.done or not self._session.loop.step():
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
        self._session.loop.cancel(self._weaving.request.key)
        return self.finish()

    def abandon(self) -> None:
        """Stop here and put the context back to what it was before the answer."""
        session = self._session
        session.loop.cancel(self._weaving.request.key)
        if self._gone or self._answer is not None:
            return
        self._gone, session.turn = True, None
        session._answered = NO_ANSWER
        session.state.woven = []
        session.weaver.settle_account(session.state)
        self.context.restore(self._before)

    def finish(self) -> Answer:
        """Make the new text a chunk of the context and return the answer; the second call too.

        Raises what the answer ended in, with the context put back to before it.
        """
        if self._answer is not None:
            return self._answer
        session, request = self._session, self._weaving.request
        if request.error is not None:
            self.abandon()
            raise request.error
        session.turn = None
        if not self._gone and not request.prepared:
            self.abandon()  # cancelled before its rows were complete
        plan = self._weaving.plan
        if not self._gone:
            try:
                session.weaver.commit(session.state, self._weaving)
                if plan is not None:
                    self.context.wove(tuple(p.part for p in self._weaving.placed), plan)
                self._add_parts(self._kept_tokens())
            except BaseException:
                self.abandon()
                raise
            session.plan = plan
        plan = session.preview(self.context.parts) if plan is None else plan
        usage: dict[str, object] = {
            "prompt_tokens": plan.n_tokens,
            "completion_tokens": len(request.out),
            "kv": plan.counts(),
            "ttft": request.first_token,
            "weave": self._weave_seconds,
            "total": request.ended,
        }
        self._answer = Answer(
            request.text, tuple(request.out), request.finish, tuple(request.choices), plan, usage
        )
        started = time.perf_counter()
        self._denoise()
        usage["idle"] = time.perf_counter() - started
        return self._answer

    def _denoise(self) -> None:
        """Compute canonical KV of this turn; what fails there is not the answer's fault, and the next
        prune prefills it instead."""
        if not self._session.settings.denoise:
            return
        known = {p.uid for p in self._before.parts[:-1]}
        new = [p.id for p in self.context.parts if p.uid not in known and not p.virtual]
        try:
            self._session.maker.canonicalise(new)
        except OverBudget:
            return
        except Exception:
            log.exception("no canonical KV of an answer in %s", self._session.key)

    def _kept_tokens(self) -> list[int]:
        """Return the generated tokens that stay: no end token, nothing past a stop string."""
        request, loop = self._weaving.request, self._session.loop
        assert request.sampling is not None
        out = list(request.out)
        ends = self._session.weaver.backend.ends | set(request.sampling.stop_tokens)
        if request.finish == "stop" and out and out[-1] in ends:
            return out[:-1]
        decode = loop.decode()
        if request.finish == "stop" and decode is not None:
            while out and not request.text.startswith(decode(out)):
                out.pop()
        return out

    def _add_parts(self, tokens: list[int]) -> None:
        """Put header, generated tokens and the closing text into one chunk (two with thinking)."""
        session, context, request = self._session, self.context, self._weaving.request
        table, maker = session.weaver.table, session.maker
        head = [int(t) for t in table.tokens(self._header.id)] if self._header else []
        after = maker.chat.wrap("assistant").after if self.chat else ""
        whole = head + tokens + (maker.tokens(after) if after else [])
        if not whole or (not tokens and self._header is None):
            return
        n_rows = len(head) + min(len(tokens), max(0, len(request.out) - 1))
        pieces = self._split(whole, len(head) + len(tokens))
        with context.edit("answer"):
            if self._header is not None:
                context.drop(self._header, mode="forget")
            parts = []
            for kind, piece in pieces:
                if self.chat:
                    parts.append(context.answer_part(kind, piece))
                else:
                    parts.append(context.append(piece, kind="assistant"))
            session.weaver.extend(session.state, parts, (len(head), n_rows), self._weaving)
        first = self._weaving.placed[-1].slots[1] - 1  # this row predicted the first token
        session._answered = (context.parts, first, first + max(1, len(tokens)))

    def _split(self, whole: list[int], n_text: int) -> list[tuple[Kind, list[int]]]:
        """Cut a thinking block off the answer, so that it can be pruned on its own."""
        mark = self._session.maker.chat.think_end
        if not self.chat or mark is None or mark not in whole[: n_text - 1]:
            return [("assistant", whole)]
        cut = whole.index(mark) + 1
        return [("thinking", whole[:cut]), ("assistant", whole[cut:])]


def run_all(turns: list[Turn]) -> list[Answer]:
    """Drive several contexts' turns together, one packed pass a step; return their answers.

    What one of them ends in is raised when the others have their answers.
    """
    if not turns:
        return []
    try:
        turns[0]._session.loop.run(lambda: all(t.done for t in turns))
    except BaseException:
        for turn in turns:
            turn.abandon()
        raise
    for turn in (t for t in turns if not t.failed):
        turn.finish()
    return [turn.finish() for turn in turns]

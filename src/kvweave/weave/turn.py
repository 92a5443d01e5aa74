"""A running answer: from its header to the chunks that keep its text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from kvweave.chunk.identity import Kind
from kvweave.errors import InvalidArgument, OverBudget
from kvweave.run.base import Ints
from kvweave.run.loop import Request
from kvweave.run.sampling import Choice, Sampling
from kvweave.verbs import checked
from kvweave.weave.answer import Answer
from kvweave.weave.editor import Editor
from kvweave.weave.history import BEGUN
from kvweave.weave.keeping import runs_of
from kvweave.weave.parts import Part
from kvweave.weave.pieces import Pieces
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Wish
from kvweave.weave.session import NO_ANSWER, Session
from kvweave.weave.shadow import given_of
from kvweave.weave.sources import tokens_of
from kvweave.weave.trying import Again, again_of

PIECE = 512  # tokens of a chunk of an answer of which a token policy lets most go

log = logging.getLogger("kvweave.weave")


def begin(
    session: Session,
    context: Editor,
    sampling: Sampling,
    max_drift: float | None,
    header: str | None,
) -> Turn:
    """Queue an answer. Raises InvalidArgument for a bound that cannot be kept."""
    session.pause()
    sampling.require_known(session.weaver.backend.n_vocab)
    wish = session.wish(session.strategy, session.settings.share, max_drift)
    session.turn = turn = Turn(session, context, (sampling, wish), header)
    return turn


@checked
class Turn:
    """A running answer. `run` drives it to the end, `stream` piece by piece, `cancel` stops it."""

    closed = False

    def __init__(
        self, session: Session, context: Editor, asked: tuple[Sampling, Wish], header: str | None
    ) -> None:
        self.context, self.chat = context, header is not None
        self._session, self.gate = session, session.loop.gate
        self._started = time.perf_counter()
        self._before = context.snapshot()
        session.weaver.table.if_undone(self._undone)
        self._answer: Answer | None = None
        self._gone = False  # the context was put back to before
        self._n_taken = 0  # choices that `take` has handed out
        self._header: Part | None = None
        closing = session.maker.chat.wrap("assistant").after if self.chat else ""
        self._closing = session.maker.tokens(closing) if closing else []
        if header:
            with context.edit(BEGUN):
                self._header = context.append(header, kind="assistant", label="answer")
        sampling, wish = asked
        try:
            chosen, wish, way = session.repairing(context.parts, wish)
            self._weaving = session.weaver.prepare(
                session.state, context.parts, chosen, wish, (sampling, len(self._closing))
            )
            self._weaving.alarm = way == "full"
            shadow = session.weaver.shadow
            self._watch = shadow.watch(sure=way == "probe") if session.audited else None
            self._weaving.request.watch = self._watch
            if sampling.repetition_penalty != 1:
                tokens = [tokens_of(session.weaver.table, part) for part in context.parts]
                self._weaving.request.prompt = np.concatenate([np.zeros(0, np.int64), *tokens])
            self._weave_seconds = time.perf_counter() - self._started
            self._weaving.request.started = self._started
            session.loop.add(self._weaving.request)
        except BaseException:
            session.weaver.settle_account(session.state)
            context.restore(self._before)
            raise

    @property
    def request(self) -> Request:
        """What runs of it, for a task that waits for its end."""
        return self._weaving.request

    @property
    def done(self) -> bool:
        """Whether the last token was sampled."""
        return not self._weaving.request.running

    @property
    def complete(self) -> bool:
        """Whether the context has its text."""
        return self._answer is not None and not self._gone

    @property
    def ended(self) -> bool:
        """Whether `finish` or `cancel` has given its answer."""
        return self._answer is not None

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

    def stream(self) -> Pieces:
        """Yield text as it comes; finishes, or cancels when the iterator is closed or let go of."""
        return Pieces(self, self._weaving.request.fresh)

    def step(self) -> bool:
        """Run one step of the loop, of all that runs; False where this answer needs no more."""
        return not self.done and self._session.loop.step()

    def read_out(self) -> Answer:
        """As `finish`, for who has read the text to its end. Raises InvalidArgument where it was given up."""
        if self._gone:
            reason = "the answer was given up: its context was closed, or another error came first"
            raise InvalidArgument("stream", reason, "what came of it up to there is all there is")
        return self.finish()

    def cancel(self) -> Answer:
        """Stop here; what was generated stays as a chunk."""
        self._session.loop.cancel(self._weaving.request.key)
        return self.finish()

    def abandon(self) -> None:
        """Stop here and put the context back to what it was before the answer."""
        self._session.loop.cancel(self._weaving.request.key)
        if self._gone or self._answer is not None:
            return
        self._give_up()
        self._session.weaver.table.if_undone(self._undone)
        self.context.restore(self._before)

    def _give_up(self) -> None:
        session = self._session
        session.loop.cancel(self._weaving.request.key)
        self._gone, session.turn = True, None
        session.weaver.shadow.leave(self._watch)
        session.answered = NO_ANSWER
        session.state.woven = []
        self._weaving.let_go()
        session.weaver.settle_account(session.state)

    def _undone(self) -> Callable[[], None] | None:
        """Go with a transaction of others in which it was begun or has ended, when that fails."""
        if self._answer is None and not self._gone:
            self._give_up()
        return self._drop_header if self._header is not None else None

    def _drop_header(self) -> None:
        if self._header in self.context.parts and not self.context.closed:
            self._session.weaver.table.if_undone(self._undone)
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
            session.weaver.table.if_undone(self._undone)
            try:
                session.weaver.commit(session.state, self._weaving)
                given = self._given()
                if plan is not None:
                    self.context.wove(tuple(p.part for p in self._weaving.placed), plan)
                self._add_parts(self._kept_tokens())
            except BaseException:
                self.abandon()
                raise
            session.plan = plan = None if plan is None else session.state.told(plan)
            if plan is not None:
                self._account(plan, given)
        self._weaving.let_go()
        plan = session.preview(self.context.parts) if plan is None else plan
        usage: dict[str, object] = {
            "prompt_tokens": plan.n_tokens,
            "completion_tokens": len(request.out),
            "kv": plan.counts(),
            "ledger": self.context.costs.totals(),
            "ttft": request.first_token,
            "weave": self._weave_seconds,
            "total": request.ended,
        }
        self._answer = Answer(
            request.text, tuple(request.out), request.finish, tuple(request.choices), plan, usage,
            None if request.scanner is None else request.scanner.matched,
        )  # fmt: skip
        started = time.perf_counter()
        self._denoise()
        usage["idle"] = time.perf_counter() - started
        return self._answer

    def _given(self) -> tuple[Ints, Ints] | None:
        """Return what an audit of this answer would prefill; None where there is to be none."""
        weaving, request = self._weaving, self._weaving.request
        virtual = any(p.part.virtual for p in weaving.placed)
        keeper = self._session.state.keeper
        if keeper is not None and keeper.moved:  # nothing to hold it against: positions closed up
            return None
        if self._watch is None or weaving.cell is None or virtual or not request.out:
            return None
        table, rows = self._session.weaver.table, self._session.state.rows
        return given_of([tokens_of(table, p.part) for p in weaving.placed], request.out, rows)

    def _account(self, plan: Plan, given: tuple[Ints, Ints] | None) -> None:
        """Note what the answer cost; put it aside to be audited."""
        cell, shadow = self._weaving.cell, self._session.weaver.shadow
        cost = self.context.answered(plan, len(self._weaving.request.out))
        if given is not None and self._watch is not None and cell is not None:
            try:
                shadow.take(self._watch, cell, plan.drift, given, (cost, self._again()))
            except Exception:  # the answer is given
                log.exception("an answer was not put aside for an audit")
        shadow.leave(self._watch)

    def _again(self) -> Again | None:
        """Return what it takes to weave this context in other ways; None where a calibration has chosen."""
        weaver = self._session.weaver
        if weaver.calibration is not None:
            return None
        return again_of(self._weaving, weaver.backend, weaver.sources, weaver.dependence)

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
            out.pop()
        decode, scanner = loop.decode(request.sampling.shown), request.scanner
        if decode is not None and scanner is not None and scanner.matched is not None:
            while out and not request.text.startswith(decode(out)):
                out.pop()
        return out

    def _add_parts(self, tokens: list[int]) -> None:
        """Put header, generated tokens and the closing text into one chunk (two with thinking)."""
        session, context, request = self._session, self.context, self._weaving.request
        table = session.weaver.table
        head = [int(t) for t in table.tokens(self._header.id)] if self._header else []
        whole = head + tokens + self._closing
        keeper, state = session.state.keeper, session.state
        moved = keeper is not None and keeper.moved
        if not whole or (not tokens and self._header is None):
            if not moved:
                session.answered = NO_ANSWER
                return
            whole = []  # nothing was said, but rows have closed up before it
        n_rows = len(head) + min(len(tokens), max(0, len(request.out) - 1))
        pieces = self._split(whole, len(head) + len(tokens)) if whole else []
        if moved:  # most of it goes: in pieces that are let go of one by one
            most = max(1, min(PIECE, session.weaver.backend.limit // 2))
            cuts = [(kind, range(0, len(piece), most), piece) for kind, piece in pieces]
            pieces = [(kind, piece[i : i + most]) for kind, at, piece in cuts for i in at]
        with context.edit("answer"):
            if self._header is not None:
                context.drop(self._header, mode="forget")
            parts = []
            for kind, piece in pieces:
                if self.chat:
                    parts.append(context.answer_part(kind, piece))
                else:
                    parts.append(context.append(piece, kind="assistant"))
            if moved and keeper is not None:
                n_before, n = self._weaving.placed[-1].slots[1] - len(head), state.rows.n
                there = keeper.numbers(n)
                there = there[: np.searchsorted(there, n_before + n_rows)]
                behind = np.arange(n_before + n_rows, n_before + len(whole))
                context.leave(*runs_of(np.concatenate((there, behind))))
                session.weaver.extend_left(state, context.parts, len(there))
                session.answered = NO_ANSWER
                return
            session.weaver.extend(state, parts, (len(head), n_rows), self._weaving)
        first = self._weaving.placed[-1].slots[1] - 1  # this row predicted the first token
        session.answered = (context.parts, first, first + max(1, len(tokens)))

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
    failure: Exception | None = None
    try:
        turns[0]._session.loop.run(lambda: all(t.done for t in turns))
        for turn in turns:
            try:
                turn.finish()
            except Exception as error:
                failure = failure or error
    except BaseException:
        for turn in turns:  # those that have their answer keep it
            turn.abandon()
        raise
    try:
        if failure is not None:
            raise failure
        return [turn.finish() for turn in turns]
    finally:
        del failure  # its traceback knows this frame: a circle

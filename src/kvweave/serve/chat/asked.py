"""One request for text, from its prompts to the contexts that answer it.

Everything that touches the engine runs in the driver's thread: `Asked.begin` when it is this
request's turn, `Asked.done` when all its answers have ended.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from kvweave.engine import Engine
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.run.grammar import Grammar
from kvweave.run.loop import Task
from kvweave.run.sample import Sampling
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.forced import grammar_of, held
from kvweave.serve.chat.prompts import MakePrompt
from kvweave.serve.chat.read import AnswerReader, ToldEvent
from kvweave.serve.driver.work import Event
from kvweave.serve.reuse.find import Wanted
from kvweave.serve.reuse.pooled import PooledContext, WeaveOptions
from kvweave.serve.reuse.render import Prompt
from kvweave.serve.state import ServerState
from kvweave.weave.answer import Answer
from kvweave.weave.plan import Plan
from kvweave.weave.turn import Turn

NEW_TOKENS = 1024  # at most so many when a chat request does not say

Counts = dict[str, int | float | None]


@dataclass(slots=True)
class Opened:
    """One prompt whose answers run."""

    prompt: Prompt
    wanted: Wanted
    context: str
    n_tokens: int
    n_computed: int  # tokens of it that have KV only because this request computed it
    n_completed: int
    turn: Turn | None  # None where no answer is wanted
    woven: Plan | None  # before its answers began
    seconds: float  # from the request's arrival to here: waiting, placing
    rule: str = ""  # what its context was edited by before it came

    @property
    def plan(self) -> Plan:
        """How it was woven; known from the first token on."""
        plan = self.woven
        if plan is None and self.turn is not None:
            plan = self.turn.plan
        assert plan is not None, "the repair has not chosen yet"
        return plan

    def counts(self) -> Counts:
        """Return ``usage.kv``: the plan's counts, less what had KV only because of this request."""
        plan = self.plan
        counts = plan.counts()
        n_exact, n_reused = plan.exact - self.n_computed, plan.reused
        gone_reused = min(self.n_completed, n_reused)
        gone_exact = min(self.n_completed - gone_reused, n_exact)  # the rest is repaired: computed
        # with several answers the header comes after the weave
        late = self.n_tokens - plan.n_tokens
        counts["exact"], counts["reused"] = n_exact - gone_exact, n_reused - gone_reused
        counts["prefilled"] = plan.prefilled + self.n_computed + gone_reused + gone_exact + late
        return counts


def prompt_of(state: ServerState, ask: ChatAsk) -> Prompt:
    """Return what the template makes of a chat. Raises InvalidArgument, ContextTooLong."""
    variables, _ = state.renderer.template.variables(ask.variables)
    tools = ask.shown_tools or None
    prompt = state.renderer.render(ask.messages, tools, variables, continues=ask.continues)
    return prompt.kept_nowhere() if ask.private and not state.options.keep_unstored else prompt


@dataclass(slots=True)
class Asked:
    """A request: prompts, and ``n`` answers to each.

    With ``max_tokens`` 0 the rows of the prompts are computed, and nothing is answered.
    """

    state: ServerState
    tenant: str
    prompts: Sequence[MakePrompt]
    sampling: Sampling
    max_tokens: int | None
    how: WeaveOptions
    n: int = 1
    chat: bool = True
    private: bool = False  # ``store: false``
    continues: bool = False  # the last message of a chat: what is written is no whole one
    reader: AnswerReader | None = None  # of a chat
    grammar: Grammar | None = None
    arrived: float = field(default_factory=time.perf_counter)
    opened: list[Opened] = field(default_factory=list)
    left: tuple[PooledContext, int] | None = None  # what answered, given back, and its version
    _sessions: list[PooledContext] = field(default_factory=list)

    @classmethod
    def of_chat(cls, state: ServerState, tenant: str, ask: ChatAsk) -> Asked:
        """Return the request that a chat is. Raises InvalidArgument."""
        tools = ask.shown_tools
        form, ends = state.form_with(bool(tools)), state.driver.engine.runner.ends
        grammar, shown = grammar_of(ask, form, state.grammars), () if form is None else form.shown
        if form is not None and grammar is not None and ask.tool_choice in ("none", "auto"):
            form, shown = form.held(), tuple(id for id in shown if id not in ends)
        return cls(
            state,
            tenant,
            [lambda state: prompt_of(state, ask)],
            replace(ask.sampling, shown=shown),
            ask.max_tokens,
            ask.how,
            ask.n,
            private=ask.private and not state.options.keep_unstored,
            continues=ask.continues,
            reader=AnswerReader(form, tools, ends, parallel=ask.parallel),
            grammar=grammar,
        )

    def read(self, event: Event) -> ToldEvent:
        """Return what an event of a chat tells."""
        assert self.reader is not None, "a completion is only text"
        prompt = self.opened[event.index // self.n].prompt
        return self.reader.take(event, prompt.front, prompt.lead)

    def events(self) -> AsyncGenerator[Event, None]:
        """Queue it; see `Driver.answer`."""
        return self.state.driver.answer(self.tenant, self.begin, self.done, self.wants)

    def begin(self, engine: Engine) -> Task[Sequence[Turn]]:
        """Open the contexts and begin all answers: ``n`` of the first prompt, of the second ..."""
        turns: list[Turn] = []
        try:
            for make in self.prompts:
                turns += yield from self._begin(make(self.state), engine)
        except BaseException:
            for turn in turns:
                turn.abandon()
            self.state.sessions.give_back(self._sessions)
            raise
        return turns

    def wants(self, engine: Engine) -> list[int]:
        """Return the stored chunks that are in the prompts, as far as they are known now."""
        state, base, ids = self.state, self.state.sessions.engine_base, []
        for make in self.prompts if state.options.reuse == "all" else ():
            wanted = state.assembler.assemble(make(state).segments, self.tenant, base)
            ids += [int(piece.id) for piece in wanted.pieces if piece.id is not None]
        return ids

    def done(self, engine: Engine, answers: list[Answer]) -> None:
        """Give the contexts back, and remember the answers by their text."""
        whole = len(answers) == len(self._sessions)
        kept = self.chat and not self.warms and not self.continues
        for index, session in enumerate(self._sessions):
            if kept and session.reuse == "all" and not session.private:
                self._remember(session, (index, answers[index]) if whole else None)
        self.state.sessions.give_back(self._sessions)
        if kept and whole and len(answers) == 1 and not self.private:
            self.left = self._sessions[0], self._sessions[0].context.history.version

    @property
    def warms(self) -> bool:
        """Whether only the rows of the prompts are wanted."""
        return self.max_tokens == 0

    def _begin(self, prompt: Prompt, engine: Engine) -> Task[Sequence[Turn]]:
        state, sessions, reuse = self.state, self.state.sessions, self.state.options.reuse
        base, segments = sessions.engine_base, prompt.segments

        wanted = state.assembler.assemble(segments, self.tenant, base, reuse)

        def again() -> Wanted:
            nonlocal wanted
            wanted = state.assembler.assemble(segments, self.tenant, base, reuse)
            return wanted

        # the turn adds the header itself, and makes it one chunk with the answer
        header = engine.maker.tokens(prompt.header)
        n_base = 0 if base is None else engine.table.get(base).n_tokens
        n = (n_base if wanted.base is None else wanted.base.n) + len(wanted.tokens())
        n += 0 if self.warms else len(header)
        if n == 0:
            raise InvalidArgument("prompt", "it is empty", "send some text")
        n_new = max(1, self._n_new(n))
        sampling = replace(
            self.sampling, max_tokens=n_new, min_tokens=min(n_new, self.sampling.min_tokens)
        )
        if self.grammar is not None:
            form = None if self.reader is None else self.reader.form
            begun = held(self.grammar, form, prompt.front, engine.runner.tokenizer)
            sampling = replace(sampling, constraint=begun)
        sizes = [] if self.warms else [sampling.max_tokens] * self.n
        session = yield from sessions.opening(
            wanted, self.how, reuse, sizes, private=self.private, again=again
        )
        self._sessions.append(session)
        rule, session.rule = session.rule, ""
        # the rows of the prompt are computed once
        woven = (yield from sessions.weaving(session)) if self.n > 1 or self.warms else None
        turns = [] if self.warms else self._turns(session, sampling, prompt.header)
        self.opened.append(
            Opened(
                prompt, wanted, session.context.name, n, session.n_computed, session.n_completed,
                turns[0] if turns else None, woven, time.perf_counter() - self.arrived, rule,
            )
        )  # fmt: skip
        return turns

    def _turns(self, session: PooledContext, sampling: Sampling, header: str) -> list[Turn]:
        sessions, own = self.state.sessions, [session]
        for _ in range(self.n - 1):
            own.append(sessions.twin(session))
            self._sessions.append(own[-1])
        turns: list[Turn] = []
        try:
            for i, each in enumerate(own):
                seed = None if sampling.seed is None else (sampling.seed + i) % 2**63
                given = header if self.chat else None
                turns.append(sessions.begin(each, replace(sampling, seed=seed), header=given))
        except BaseException:
            for turn in turns:
                turn.abandon()
            raise
        return turns

    def _n_new(self, n_prompt: int) -> int:
        """Return how many tokens may come. Raises ContextTooLong."""
        limit, most = self.state.limit, self.state.options.max_prompt
        if most is not None and n_prompt > most:
            raise ContextTooLong(n_prompt, most)
        maker = self.state.driver.engine.maker
        # an answer is closed as the template closes it, whoever ended it
        n_end = len(maker.tokens(maker.chat.wrap("assistant").after)) if self.chat else 0
        left = limit - n_prompt - n_end
        if left < 1:
            raise ContextTooLong(n_prompt + 1 + n_end, limit)
        # agents ask for more than any window has: they get what there is
        return min(left, NEW_TOKENS if self.max_tokens is None else self.max_tokens)

    def _remember(self, session: PooledContext, answer: tuple[int, Answer] | None) -> None:
        parts = session.context.parts[session.n_asked :]
        ids = tuple(part.id for part in parts)
        if not ids:
            return
        assembler, table = self.state.assembler, self.state.driver.engine.table
        text = "".join(assembler.text(table.tokens(id)) for id in ids)
        self.state.library.note_answer(self.tenant, text, ids)
        if self.reader is not None and answer is not None and len(self.opened) == 1:
            prompt = self.opened[0].prompt
            said = self.reader.said(*answer, prompt.front)
        else:
            said = None
        if said is not None:
            self.state.library.said.note(self.tenant, table.get(ids[0]).base, said, ids)

    # ---- what is told of it

    def usage(self, n_completion: int) -> dict[str, object]:
        """Return the usage; what was found counts as cached."""
        kv: dict[str, int | float | None] = {}
        every = [opened.counts() for opened in self.opened]
        for counts in every:
            for key, value in counts.items():
                if key != "drift":
                    kv[key] = int(kv.get(key) or 0) + int(value or 0)
        drifts = [counts["drift"] for counts in every]
        known = [drift for drift in drifts if drift is not None]
        kv["drift"] = max(known) if known and len(known) == len(drifts) else None
        n_prompt = sum(opened.n_tokens for opened in self.opened)
        cached = int(kv.get("exact") or 0) + int(kv.get("reused") or 0)
        read = {} if self.reader is None else self.reader.answers
        thought = {"reasoning_tokens": sum(each.n_thought for each in read.values())}
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            **({} if self.reader is None else {"completion_tokens_details": thought}),
            "total_tokens": n_prompt + n_completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "kv": kv,
        }

    def report(self, ttft: float | None) -> dict[str, object]:
        """Return the extension of the response: one context's, or for several prompts a list."""
        told = [
            {
                "context": opened.context,
                "plan": opened.plan.to_dict(),
                "reasons": opened.wanted.reasons,
                "weave": opened.seconds,
                **({"ahead": opened.rule} if opened.rule else {}),
            }
            for opened in self.opened
        ]
        first: dict[str, object] = {**told[0]} if len(told) == 1 else {"prompts": told}
        return {**first, "ttft": ttft}

"""P6, minus one plus one: a long conversation in a window; every turn the oldest turn leaves.

::

    [system][u-000][a-000][u-001][a-001] ... [u-011] [header] reply     12 turns
    [system]              [u-001][a-001] ... [u-012] [header] reply     the oldest one is gone

What stays in the context is the expected reply, whatever a method would have written, so that all
methods hold the same conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvweave.demo.world import Conversation, Spec
from kvweave.engine import Engine
from kvweave.suite.exam import Exam, Trial, clear, counts, outcome
from kvweave.suite.method import FULL, Method
from kvweave.suite.reply import Heard
from kvweave.suite.words import Paper, Question
from kvweave.weave.context import Context
from kvweave.weave.plan import Plan

WINDOW, PRUNES = 12, 100  # turns in the context, and prunes of a stream
SPEC = Spec(
    facts=(2, 4),
    filler=(6, 20),
    entities=(8, 40),
    asks=0.9,
    override=0.1,
    overrides=2,
    again=0.03,
    ask_overridden=0.3,
    alias=0.35,
)


@dataclass(frozen=True, slots=True)
class StreamTurn:
    """One turn as tokens: the user's message, the header, the whole reply, and the question."""

    user: str
    reply: tuple[int, ...]
    question: Question
    prunes: int  # turns that have left before this one
    asks: bool


def script(exam: Exam, seed: str, prunes: int = PRUNES, window: int = WINDOW) -> list[StreamTurn]:
    """Return the turns of one conversation."""
    words, talk = exam.words, Conversation(seed, SPEC)
    steps = []
    for i in range(window + prunes):
        turn = talk.turn(range(max(0, i - window + 1), i))
        said, told = words.told(turn.user), words.told(turn.reply)
        asked = (*words.user(said), *words.tokens(words.header))
        question = Question(turn.kind, asked, words.expected(told), turn.value or "")
        reply = (*words.tokens(words.header), *words.reply(told))
        steps.append(StreamTurn(said, reply, question, i - window + 1, turn.asks))
    return steps


def hold(
    exam: Exam,
    index: int,
    steps: Sequence[StreamTurn],
    methods: Sequence[Method],
    window: int = WINDOW,
) -> list[Trial]:
    """Return the outcomes of every question asked after a prune, the oracle's own first."""
    paper = Paper("P6", index, (), tuple(step.question for step in steps))
    measured = [i for i, step in enumerate(steps) if step.asks and step.prunes > 0]
    truth = {i: _truth(exam, steps, i, window) for i in measured}
    found = []
    for i in measured:
        made = outcome(paper, i, truth[i], truth[i], method=FULL)
        found.append(dataclasses.replace(made, prunes=steps[i].prunes))
    for method in methods:
        for mode in method.modes:
            if mode == "never":
                continue
            for i, plan, reply in _under(exam, steps, method, mode == "evict", window):
                if i in truth:
                    made = outcome(paper, i, truth[i], reply, method=method.label, mode=mode)
                    found.append(dataclasses.replace(made, prunes=steps[i].prunes, **counts(plan)))
    return found


def _truth(exam: Exam, steps: Sequence[StreamTurn], i: int, window: int) -> Heard:
    before = steps[max(0, i - window + 1) : i]
    tokens = list(exam.words.head)
    for step in before:
        tokens += (*exam.words.user(step.user), *step.reply)
    return exam.oracle(tokens, [steps[i].question])[0]


def _under(
    exam: Exam, steps: Sequence[StreamTurn], method: Method, evict: bool, window: int
) -> Iterator[tuple[int, Plan, Heard]]:
    """Hold the conversation under one method; yield each turn's plan and reply."""
    engine = exam.engine(method.base, evict)
    context = exam.context(engine, method, evict)
    n_head = len(context.parts)
    header = exam.words.tokens(exam.words.header)
    for i, step in enumerate(steps):
        with context.edit():
            if i >= window:
                context.drop(n_head, n_head + 1)
            context.message("user", step.user)
            if header:
                context.append(header, kind="assistant")
        plan = context.weave()
        run = (context, context.n_tokens - 1, step.question.asked[-1:])
        yield i, plan, exam.replies([run], [step.question])[0]
        with context.edit():
            if header:
                context.drop(-1, mode="forget")
            if evict:
                context.append(step.reply, kind="assistant")
            else:
                _store(engine, context, i, step)
        if evict:
            context.weave()  # the reply has read what stands before it, as when it is decoded
    engine.close_context(context.name)
    clear(engine)


def _store(engine: Engine, context: Context, i: int, step: StreamTurn) -> None:
    """Give the turn canonical KV, as an engine does when it is idle."""
    user = [int(t) for t in engine.table.tokens(context.parts[-1].id)]
    engine.put_many([(f"turn/{i}/u", user), (f"turn/{i}/a", step.reply)])
    context.append_chunk(f"turn/{i}/a")

"""How far predictions are from a full prefill of the edited prompt, on models that can be asked.

A run is replayed in one context for each way to repair, which lives from the first request to the last:
what is approximate stays so, and adds up. At each request the answer that the run has is forced, and
compared with a full prefill of the same prompt.

- *world*: the bundled model and runs of its own world: an output is a note of facts and a question, the
  answer is right or wrong (`made_runs`).
- *text*: a model of prose and code, and the text of public runs, each message cut to a few tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pruning.count import same
from pruning.rules import RULES, Piece, Rule
from pruning.timed import name_of
from pruning.trace import AgentRun, TracedMessage

from kvweave import Engine
from kvweave.demo.vocabulary import ASK, FILLER, text
from kvweave.run.model import Runner
from kvweave.suite import stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.protocols import Draft, Size
from kvweave.suite.reply import Heard
from kvweave.suite.words import Question
from kvweave.weave.context import Context
from kvweave.weave.plan import Plan

WAYS = {"none": ("none", 0.0), "auto": ("auto", 0.05), "auto 15 %": ("auto", 0.15)}
WINDOW = 16_000  # what the rules' sizes are for; runs here are shorter, and counted up to it


@dataclass(frozen=True)
class AskedRun:
    """A run in tokens: what each message, mark and summary says, and what is asked for each answer.

    ``run`` has the tokens that rules see. ``needs``: the message that an answer's fact stands in.
    """

    run: AgentRun
    said: list[list[int]]
    mark: list[int]
    summary: list[int]
    questions: dict[int, Question]
    needs: dict[int, int]

    def tokens(self, piece: Piece) -> list[int]:
        """Return the tokens of a piece; each summary says something else."""
        kind, index = piece.key
        if kind == "message":
            return self.said[index]
        return (
            self.mark if kind == "mark" else self.summary[index % 7 :] + self.summary[: index % 7]
        )


def made_runs(exam: Exam, n: int, seed: int = 0, steps: int = 30) -> Iterator[AskedRun]:
    """Yield runs of the bundled model's world. Facts are asked for that stand in this output or one
    before it, mostly a recent one, half of them taken over from there."""
    for index in range(n):
        yield made_run(exam, random.Random(f"{seed}/{index}"), f"world/{index}", steps)


def made_run(exam: Exam, rng: random.Random, name: str, steps: int) -> AskedRun:
    """Make one of them."""
    words, draft = (
        exam.words,
        Draft(rng, Size(notes=(steps, steps), entities=(36, 36), filler=(6, 14))),
    )
    facts: list[tuple[str, str, str, int]] = []
    asked: list[tuple[str, str, str, int]] = []
    for step in range(steps):
        facts.append((*draft.fact(step), step))
        recent = [f for f in facts if f[3] >= step - (4 if rng.random() < 0.8 else step)]
        entity, attribute, value, where = rng.choice(recent)
        if rng.random() < 0.5 and where < step:
            other = draft.take(lambda p, a=attribute, e=entity: p[1] == a and p[0] != e)
            draft.add(step, "from", entity, attribute, "same", *other, "also")
            entity = other[0]
        asked.append((entity, attribute, value, where))
    notes = [draft.text(step) for step in range(steps)]
    messages = [TracedMessage("system", 1), TracedMessage("user", 1)]
    said = [list(words.head), words.user(text(rng.choices(FILLER, k=12)))]
    questions, needs = {}, {}
    before: list[int] = []
    for step, (entity, attribute, value, where) in enumerate(asked):
        again = rng.random() < 0.1 and before
        call = rng.choice(before) if again else step
        before.append(call)
        messages.append(TracedMessage("tool", 1, "look", str(call)))
        said.append(list(words.user(f"{notes[step]} {text([ASK, entity, attribute])}")))
        reply = text([entity, attribute, value, "."])
        questions[len(messages)] = Question(
            "asked", words.tokens(words.header), words.expected(reply), value
        )
        needs[len(messages)] = 2 + 2 * where
        messages.append(TracedMessage("assistant", 1))
        said.append([*words.tokens(words.header), *words.reply(reply)])
    return counted_up(AgentRun(name, tuple(messages)), said, words.user("so well ."),
                      words.user(text(rng.choices(FILLER, k=20))), questions, needs)  # fmt: skip


def text_runs(
    exam: Exam, runs: Sequence[AgentRun], steps: int = 30, sizes: tuple[int, int] = (20, 36)
) -> Iterator[AskedRun]:
    """Yield the first requests of runs that have text, of each message the first tokens: ``sizes`` of an
    answer and of an output."""
    for run in runs:
        messages, said, questions = [], [], {}
        for i, message in enumerate(run.messages[: 2 * steps + 2]):
            size = sizes[message.role != "assistant"]
            tokens = exam.words.maker.tokens(message.text[: 8 * size] or "-")[:size]
            if i == 0:
                tokens = [*exam.words.head, *tokens]
            if message.role == "assistant" and len(tokens) > 8:
                questions[i] = Question("prose", tuple(tokens[:4]), tuple(tokens[4:]))
            messages.append(replace(message, tokens=1))
            said.append(list(tokens))
        marks = [exam.words.maker.tokens(t) for t in ("Old output cleared.\n", "The messages before this are a summary of what was done so far.\n")]  # fmt: skip
        yield counted_up(
            AgentRun(run.name, tuple(messages)), said, marks[0], marks[1], questions, {}
        )


def counted_up(
    run: AgentRun, said: list[list[int]], mark: Sequence[int], summary: Sequence[int],
    questions: dict[int, Question], needs: dict[int, int],
) -> AskedRun:  # fmt: skip
    """Return it with lengths for the rules, as if it filled the window they are for."""
    factor = WINDOW / sum(map(len, said))
    messages = [
        replace(m, tokens=max(1, round(factor * len(t))))
        for m, t in zip(run.messages, said, strict=True)
    ]
    return AskedRun(
        replace(run, messages=tuple(messages)), said, list(mark), list(summary), questions, needs
    )


class Living:
    """One context that a run is replayed in."""

    def __init__(self, runner: Runner, asked: AskedRun, repair: str, share: float) -> None:
        self.asked = asked
        self.engine = Engine(
            runner, base=asked.said[0], repair=repair, share=share, denoise="never", budget="64GiB"
        )  # type: ignore[arg-type]
        self.context: Context = self.engine.context("run")
        self.before: list[Piece] = []

    def request(self, now: Sequence[Piece], question: Sequence[int]) -> Plan:
        """Make the context hold these pieces and compute what is asked, one token further. New text is
        prefilled in its place; what the context had has canonical KV by then."""
        here = self.before or [now[0]]
        with self.context.edit():
            self.context.drop(*(i for i, piece in enumerate(here) if piece not in now))
            for i, piece in enumerate(now):
                if piece not in here:
                    self.add(i, piece)
            self.context.append(question)
        self.before = list(now)
        return self.context.generate(max_tokens=1, ignore_eos=True).plan

    def add(self, index: int, piece: Piece) -> None:
        """Put a piece there, stored by its name."""
        name = name_of(piece.key)
        if self.engine.table.lookup(name) is None:
            self.context.insert(index, self.asked.tokens(piece), name=name)
        else:
            self.context.insert_chunk(index, name)

    def heard(self, exam: Exam, question: Question) -> Heard:
        """Return the forced reply."""
        start = self.context.n_tokens - 2
        [reply] = exam.replies([(self.context, start, question.asked[-1:])], [question])
        return reply

    def answered(self, answer: Piece) -> None:
        """Put the answer there instead of what was asked; in idle time all gets canonical KV."""
        self.context.drop(-1, -2)
        self.add(len(self.context.parts), answer)
        self.before.append(answer)
        self.context.weave()
        self.engine.denoise()

    def close(self) -> None:
        """Let go of it."""
        self.engine.close()


def replayed(exam: Exam, asked: AskedRun, name: str, rule: Rule, ways: dict[str, tuple[str, float]] = WAYS) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield what each way did at each request from the first edit on."""
    contexts = {way: Living(exam.runner, asked, *how) for way, how in ways.items()}  # type: ignore[arg-type]
    before: list[Piece] = []
    was_edited = False
    for request, index in enumerate(i for i in asked.run.asked if i in asked.questions):
        question = asked.questions[index]
        now = rule.edit(asked.run.messages[:index])
        is_edited = same(before, now) < len(before)
        was_edited = was_edited or is_edited
        truth = None
        if was_edited:
            prompt = [t for piece in now for t in asked.tokens(piece)]
            [truth] = exam.oracle(prompt, [question])
        stands = index not in asked.needs or ("message", asked.needs[index]) in {k for k, _ in now}
        for way, living in contexts.items():
            plan = living.request(now, question.asked)
            if truth is not None:
                reply = living.heard(exam, question)
                right, kl, _ = judge(question, truth, reply)
                yield {
                    "rule": name, "run": asked.run.name, "request": request, "way": way, "edited": is_edited,
                    "stands": stands, "kl": kl, "right": right, "full": judge(question, truth, truth)[0],
                    "top1": float((reply.logits.argmax(-1) == truth.logits.argmax(-1)).double().mean()),
                    "sent": plan.n_tokens, "prefilled": plan.prefilled, "repaired": plan.repaired,
                }  # fmt: skip
            living.answered(Piece(("message", index), asked.run.messages[index].tokens))
        before = [*now, Piece(("message", index), asked.run.messages[index].tokens)]
    for living in contexts.values():
        living.close()


def drifts(
    exam: Exam, runs: Sequence[AskedRun], step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the trials of all rules that edit."""
    found = []
    for asked, (name, make) in itertools.product(runs, list(RULES.items())[1:]):
        found += replayed(exam, asked, name, make())
        step(name)
    return found


def summed(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a rule and way: KL and first choices over all requests since the first edit, right
    answers where the fact still stands in the prompt."""
    rows = []
    for rule, way in dict.fromkeys((t["rule"], t["way"]) for t in trials):
        mine = [t for t in trials if (t["rule"], t["way"]) == (rule, way)]
        there = [t for t in mine if t["stands"]]
        by_run = [
            [t["kl"] for t in mine if t["run"] == run]
            for run in dict.fromkeys(t["run"] for t in mine)
        ]
        rows.append({
            "rule": rule, "way": way, "n": len(mine), "runs": len(by_run), "n_there": len(there),
            "kl": stats.mean(by_run).to_list(),
            "kl_95": float(np.quantile([t["kl"] for t in mine], 0.95)),
            "top1": float(np.mean([t["top1"] for t in mine])),
            "right": float(np.mean([t["right"] for t in there])),
            "full": float(np.mean([t["full"] for t in there])),
            "repaired": sum(t["repaired"] for t in mine) / sum(t["sent"] for t in mine),
        })  # fmt: skip
    return rows

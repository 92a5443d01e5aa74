"""Runs of agents in the tokens of a model that can be asked.

- *world*: the bundled model and runs of its own world: an output is a note of facts and a question, the
  answer is right or wrong (`made_runs`).
- *text*: a model of prose and code, and the text of public runs behind declarations of tools, each
  message cut in proportion to the positions it is good for (`text_runs`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pruning.rules import Piece
from pruning.trace import AgentRun, TracedMessage

from kvweave.demo.vocabulary import ASK, FILLER, text
from kvweave.suite.exam import Exam
from kvweave.suite.protocols import Draft, Size
from kvweave.suite.words import Question

LENGTH = 22_000  # tokens of a public run, the median: so long rules take a made run to be
LEAST = 16  # tokens of a text that are left of it
TOOLS = {
    "bash": ("Run a command in a shell and return what it prints.", ["command", "timeout"]),
    "read": ("Return the lines of a file.", ["path", "first", "last"]),
    "edit": ("Replace a text in a file, which must stand there once.", ["path", "old", "new"]),
    "grep": ("Find lines that a regular expression matches.", ["pattern", "path"]),
}
MARK = "Old output cleared.\n"
SUMMARY = "The messages before this are a summary of what was done so far.\n"


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

    def prompt(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the tokens of all of them."""
        return [t for piece in pieces for t in self.tokens(piece)]

    def whole(self, index: int) -> list[Piece]:
        """Return the messages before one as they were, without a rule."""
        return [Piece(("message", i), m.tokens) for i, m in enumerate(self.run.messages[:index])]


# ---- the bundled model's world


def made_runs(exam: Exam, n: int, seed: int = 0, steps: int = 28) -> Iterator[AskedRun]:
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
    asked = list(facts(rng, draft, steps))
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
    factor = LENGTH / sum(map(len, said))
    counted = [
        replace(m, tokens=max(1, round(factor * len(t))))
        for m, t in zip(messages, said, strict=True)
    ]
    mark, summary = words.user("so well ."), words.user(text(rng.choices(FILLER, k=20)))
    return AskedRun(
        AgentRun(name, tuple(counted)), said, list(mark), list(summary), questions, needs
    )


def facts(rng: random.Random, draft: Draft, steps: int) -> Iterator[tuple[str, str, str, int]]:
    """State a fact in each note; yield what is asked for behind it: entity, attribute, value, and the
    note that says so."""
    stated: list[tuple[str, str, str, int]] = []
    for step in range(steps):
        stated.append((*draft.fact(step), step))
        recent = [f for f in stated if f[3] >= step - (4 if rng.random() < 0.8 else step)]
        entity, attribute, value, where = rng.choice(recent)
        if rng.random() < 0.5 and where < step:
            other = draft.take(lambda p, a=attribute, e=entity: p[1] == a and p[0] != e)
            draft.add(step, "from", entity, attribute, "same", *other, "also")
            entity = other[0]
        yield entity, attribute, value, where


# ---- the text of public runs


def text_runs(
    exam: Exam, runs: Sequence[AgentRun], steps: int = 28, most: int = 2000
) -> Iterator[AskedRun]:
    """Yield the first requests of runs that have text, each message under a line with its role and cut
    to its first tokens, ``most`` in all. Rules see the tokens that the provider counted."""
    tokens = exam.words.maker.tokens
    for run in runs:
        last = run.asked[:steps][-1]
        messages = run.messages[: last + 1]
        base = f"{messages[0].text}\n{declared()}\n"
        texts = [tokens(m.text) for m in messages[1:]]
        kept = cuts([len(t) for t in texts], most)
        said, questions = [[*exam.words.head, *tokens(base)]], {}
        for i, (message, all_of_it, n) in enumerate(
            zip(messages[1:], texts, kept, strict=True), start=1
        ):
            header, body = tokens(f"\n# {message.role}\n"), all_of_it[:n]
            said.append([*header, *body])
            if message.role == "assistant":
                questions[i] = Question("prose", tuple(header), tuple(body))
        yield AskedRun(
            replace(run, messages=messages), said, tokens(MARK), tokens(SUMMARY), questions, {}
        )


def declared() -> str:
    """Return the tools as an agent declares them."""
    return json.dumps([
        {"type": "function", "function": {"name": name, "description": about, "parameters": {
            "type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys[:1]}}}
        for name, (about, keys) in TOOLS.items()
    ])  # fmt: skip


def cuts(lengths: Sequence[int], most: int) -> list[int]:
    """Return how many tokens are left of texts, in proportion but at least `LEAST`, ``most`` in all
    where that goes."""

    def left(factor: float) -> list[int]:
        return [min(n, max(LEAST, int(factor * n))) for n in lengths]

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(left(middle)) <= most else (low, middle)
    return list(lengths) if sum(lengths) <= most else left(low)

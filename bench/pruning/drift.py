"""How far predictions are from a full prefill of the edited prompt, on models that can be asked.

A run is replayed in one context for each way to repair, which lives from the first request to the last:
what is approximate stays so, and adds up. The answers that the run has are forced, and compared with a
full prefill of the same prompt, at some requests from the first edit on. Beside it stands how far the edit
itself moves predictions: a full prefill of the edited prompt against one of all that there was.

The floor of what can be measured: contexts that nothing is edited in (``no edits``), and one that repairs
all of what was (``full``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pruning.rules import RULES, Piece, Rule, same
from pruning.timed import name_of
from pruning.tokens import AskedRun

from kvweave import Engine
from kvweave.run.model import Runner
from kvweave.suite import stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.reply import Heard
from kvweave.suite.words import Question
from kvweave.weave.context import Context
from kvweave.weave.plan import Plan

Ways = Mapping[str, tuple[str, float]]  # strategy, share
WAYS: Ways = {"none": ("none", 0.0), "auto": ("auto", 0.05), "auto 15 %": ("auto", 0.15)}
FLOOR: dict[str, Ways] = {
    "no edits": {"none": WAYS["none"]},
    "SWE-agent, last 5": {**WAYS, "full": ("full", 1.0)},  # the rule of the most edits
}
MEASURED = 12  # requests of a run of text


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

    def answered(self, answer: Piece) -> Plan:
        """Put the answer there instead of what was asked, as if it had been decoded: nothing is repaired
        for it. In idle time all gets canonical KV."""
        self.context.drop(-1, -2)
        self.add(len(self.context.parts), answer)
        self.before.append(answer)
        plan = self.context.weave(share=0.0)
        self.engine.denoise()
        return plan

    def close(self) -> None:
        """Let go of it."""
        self.engine.close()


@dataclass(frozen=True)
class EditedRequest:
    """What a rule sends for an answer."""

    number: int
    answer: int  # the message
    now: list[Piece]
    edited: bool  # it does not just go on from the one before


def requests(asked: AskedRun, rule: Rule) -> list[EditedRequest]:
    """Return all requests of a run under a rule."""
    found, before = list[EditedRequest](), list[Piece]()
    for number, index in enumerate(i for i in asked.run.asked if i in asked.questions):
        now = rule.edit(asked.run.messages[:index])
        found.append(EditedRequest(number, index, now, same(before, now) < len(before)))
        before = [*now, *asked.whole(index + 1)[-1:]]
    return found


def chosen(all_of_them: Sequence[EditedRequest], most: int) -> set[int]:
    """Return the numbers of at most so many requests from the first edit on, spread evenly, the first and
    the last among them; of all where nothing is edited."""
    first = next((r.number for r in all_of_them if r.edited), 0)
    there = [r.number for r in all_of_them[first:]]
    return {there[round(x)] for x in np.linspace(0, len(there) - 1, min(most, len(there)))}


class Replay:
    """Replays one run, under one rule after the other. ``most``: requests measured of each."""

    def __init__(self, exam: Exam, asked: AskedRun, most: int = MEASURED) -> None:
        self.exam, self.asked, self.most = exam, asked, most
        self._whole: dict[int, Heard] = {}

    def truth(self, pieces: Sequence[Piece], answer: int) -> Heard:
        """Return the answer that a full prefill of these pieces gives."""
        prompt = self.asked.prompt(pieces)
        [heard] = self.exam.oracle(prompt, [self.asked.questions[answer]])
        return heard

    def whole(self, answer: int) -> Heard:
        """Return what a full prefill of the unedited prompt gives; once for all rules."""
        if answer not in self._whole:
            self._whole[answer] = self.truth(self.asked.whole(answer), answer)
        return self._whole[answer]

    def under(self, name: str, rule: Rule, ways: Ways = WAYS) -> Iterator[dict[str, Any]]:
        """Yield what each way did at each request that is measured."""
        asked, every = self.asked, requests(self.asked, rule)
        measured = chosen(every, self.most)
        if name != "no edits" and not any(r.edited for r in every):
            return
        living = {way: Living(self.exam.runner, asked, *how) for way, how in ways.items()}  # type: ignore[arg-type]
        for request in every:
            question, answer = asked.questions[request.answer], asked.whole(request.answer + 1)[-1]
            is_measured = request.number in measured
            truth = self.truth(request.now, request.answer) if is_measured else None
            for way, context in living.items():
                plan = context.request(request.now, question.asked)
                if truth is not None:
                    reply = context.heard(self.exam, question)
                    told = {"rule": name, "run": asked.run.name, "way": way}
                    yield told | self.compared(request, truth, reply, plan)
                context.answered(answer)
        for context in living.values():
            context.close()

    def compared(
        self, request: EditedRequest, truth: Heard, reply: Heard, plan: Plan
    ) -> dict[str, Any]:
        """Return how one reply is, against a full prefill's."""
        question, needs = self.asked.questions[request.answer], self.asked.needs
        keys = {key for key, _ in request.now}
        right, kl, nll = judge(question, truth, reply)
        full, _, full_nll = judge(question, truth, truth)
        _, moved, _ = judge(question, truth, self.whole(request.answer))
        same_choice = reply.logits.argmax(-1) == truth.logits.argmax(-1)
        return {
            "request": request.number, "edited": request.edited, "kl": kl, "moved": moved, "nll": full_nll, "lost": nll - full_nll,
            "stands": request.answer not in needs or ("message", needs[request.answer]) in keys,
            "top1": float(same_choice.double().mean()), "right": right, "full": full,
            "sent": plan.n_tokens, "prefilled": plan.prefilled, "repaired": plan.repaired,
        }  # fmt: skip


def drifts(
    exam: Exam, runs: Sequence[AskedRun], step: Callable[[str], None], most: int = MEASURED
) -> list[dict[str, Any]]:
    """Return the trials of all rules."""
    found = []
    for asked in runs:
        replay = Replay(exam, asked, most)
        for name, make in RULES.items():
            found += replay.under(name, make(), FLOOR.get(name, WAYS))
            step(name)
    return found


def summed(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a rule and way; intervals are [value, low, high], of runs drawn as wholes.

    ``kl``, ``moved`` (by the edit itself) and ``lost`` (log-likelihood of what the run says next) are nats a
    token; ``late``: KL in the second half of a run's requests over that in the first; ``of_none``: KL over
    that without repair; ``right`` of facts that still stand in the prompt.
    """
    rows = []
    for rule, way in dict.fromkeys((t["rule"], t["way"]) for t in trials):
        mine = by_run(trials, rule, way)
        every = list(itertools.chain(*mine))
        there = [t for t in every if t["stands"]]
        rows.append({
            "rule": rule, "way": way, "n": len(every), "runs": len(mine), "n_there": len(there),
            **{key: stats.mean([[t[key] for t in run] for run in mine]).to_list() for key in ("kl", "moved", "lost", "top1")},
            "kl_95": stats.quantile([t["kl"] for t in every], 0.95),
            "late": late(mine), "of_none": of_none(mine, by_run(trials, rule, "none")),
            **{key: float(np.mean([t[key] for t in there])) if there else None for key in ("right", "full")},
            "nll": float(np.mean([t["nll"] for t in every])),
            "sent": float(np.mean([t["sent"] for t in every])),
            "repaired": sum(t["repaired"] for t in every) / sum(t["sent"] for t in every),
        })  # fmt: skip
    return rows


def by_run(trials: Sequence[dict[str, Any]], rule: str, way: str) -> list[list[dict[str, Any]]]:
    """Return the trials of a rule and way, run by run."""
    mine = [t for t in trials if (t["rule"], t["way"]) == (rule, way)]
    return [[t for t in mine if t["run"] == run] for run in dict.fromkeys(t["run"] for t in mine)]


def late(runs: Sequence[Sequence[dict[str, Any]]]) -> list[float] | None:
    """Return the KL of the second halves over that of the first; None where runs have no halves."""
    halves = [(run[: len(run) // 2], run[-(len(run) // 2) :]) for run in runs if len(run) > 1]
    if not halves:
        return None
    first, second = ([[t["kl"] for t in half] for half in side] for side in zip(*halves, strict=True))  # fmt: skip
    return stats.ratio(second, first).to_list()


def of_none(
    runs: Sequence[Sequence[dict[str, Any]]], none: Sequence[Sequence[dict[str, Any]]]
) -> list[float]:
    """Return the KL over that without repair."""
    found, other = ([[t["kl"] for t in run] for run in side] for side in (runs, none))
    return stats.ratio(found, other).to_list()

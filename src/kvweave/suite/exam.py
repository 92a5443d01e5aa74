"""Run one case through the engine under many methods, and compare every reply with the oracle's.

::

    [system][note/0][note/1] ... [note/9]  [question + header]   reply + end
    `base-' `--- stored chunks, woven ---' `--- prefilled ----'  `- forced -'

The reply is not decoded token by token: the expected one is run in one pass over a copy of the
rows. All its tokens are the likeliest ones exactly when greedy decoding would write it. What to
repair is chosen before that, with the question as the only rows not yet computed.

A model that was not trained on this world words its replies as it likes. Where it would not write the
expected one, it is decoded too, and right if the last value in its first line is the right one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.demo.plain import value_of
from kvweave.engine import Engine
from kvweave.run.base import Backend, Rows, Work
from kvweave.suite.computed import counted
from kvweave.suite.method import FULL, Method, Pruning
from kvweave.suite.reply import Heard, written
from kvweave.suite.words import Paper, Question, Words
from kvweave.weave.calibration import Calibration
from kvweave.weave.context import Context
from kvweave.weave.maker import Maker
from kvweave.weave.oracle import forced, prefill
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Auto


@dataclass(frozen=True, slots=True)
class Trial:
    """How one method did on one question.

    ``right`` is 1 when the whole reply is the expected one, of a model that was not trained on this
    world when it names the value (of leak questions: when the removed value is named); of prose it is
    the share of tokens predicted. ``kl`` is KL(oracle || woven) in
    nats, the mean over the reply. ``candidates`` are the rows reused approximately, ``repaired`` those
    recomputed, in P5 by the weaves before and after the prune.
    """

    protocol: str
    case: int
    item: int
    kind: str
    mode: str  # of a prune: forget, evict, or never (it had not been there); else ""
    method: str
    right: float
    kl: float
    nll: float  # nats a token of the expected reply
    candidates: int = 0
    repaired: int = 0
    prefilled: int = 0
    drift: float | None = None  # what the plan predicted
    evidence: Any = None
    prunes: int = 0  # before this question, of a stream
    cost: float = 0.0  # what was computed, as a share of the context: see `kvweave.suite.computed`

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description."""
        return dataclasses.asdict(self)


class Exam:
    """Engines of one model for all methods, and the protocols in its tokens.

    ``system`` is the text of the base instead of the system message. Contexts are woven under the
    ``calibration``, which may be set between two cases.
    """

    def __init__(self, runner: Backend, system: str | None = None, evidence: bool = True) -> None:
        self.runner, self.evidence = runner, evidence
        self.calibration: Calibration | None = None
        self._engines: dict[tuple[bool, bool], Engine] = {}
        self._n = count()
        self._seen: set[tuple[bool, str]] = set()  # (base, strategy) the notes were woven by before
        blank = Engine(runner, base="")
        self.words = Words(Maker(runner, blank.shelf, blank.table), system)
        blank.close()

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()

    def sit(self, paper: Paper, methods: Sequence[Method]) -> list[Trial]:
        """Return the outcome of every method for every question, the oracle's own first."""
        truth = self.truth(paper)
        found = [
            outcome(paper, i, truth[i], truth[i], method=FULL) for i in range(len(paper.questions))
        ]
        for method in methods:
            modes: tuple[Pruning | str, ...] = method.modes if paper.dropped is not None else ("",)
            for mode in modes:
                found += self.under_counted(paper, method, truth, mode)
        self.clear()
        return found

    def under_counted(
        self, paper: Paper, method: Method, truth: list[Heard], mode: str = ""
    ) -> list[Trial]:
        """Return the outcomes under one method, with what it computed."""
        if method.build().rank == 0 and mode != "evict":
            self._store(paper, method)  # which is not the method's work
        with counted(self.runner) as computed:
            found = list(self.under(paper, method, truth, mode))
        cost = computed.cost(paper, method.is_blind)
        return [dataclasses.replace(trial, cost=cost) for trial in found]

    def clear(self) -> None:
        """Remove the notes of all papers."""
        self._seen.clear()
        for engine in self._engines.values():
            clear(engine)

    def engine(self, base: bool, evict: bool = False) -> Engine:
        """Return the engine of methods with or without a base.

        Contexts that evict have one of their own: exact KV of their prefilled notes must not be
        found by the others.
        """
        if (base, evict) not in self._engines:
            text = self.words.system if base else ""
            self._engines[base, evict] = Engine(
                self.runner, base=text, repair="none", share=0.0, denoise="never"
            )
        made = self._engines[base, evict]
        made.weaver.calibration = self.calibration
        return made

    def context(self, engine: Engine, method: Method, evict: bool = False) -> Context:
        """Open a context that begins with the system message, the same tokens for every method."""
        strategy = method.build()
        if isinstance(strategy, Auto):
            strategy.evidence = self.evidence  # what a calibration is made of
        context = engine.context(
            f"exam-{next(self._n)}",
            repair=strategy,
            share=method.share,
            prune="evict" if evict else "forget",
            denoise=False,
            **dict(method.settings),
        )
        rest = self.words.head[context.n_tokens :]
        if rest:
            if engine.table.lookup("system") is None:
                engine.put("system", rest, kind="system")
            context.append_chunk("system")
        return context

    def oracle(self, tokens: Sequence[int], questions: Sequence[Question]) -> list[Heard]:
        """Return the reply of a full prefill to every question; the shared part is run once."""
        n, shared = len(tokens), np.array(tokens, np.int64)
        longest = max(len(q.asked) + len(q.expected) for q in questions)
        rows, _ = prefill(self.runner, shared, np.arange(n), slice(0, 0))
        rows.reserve(n + longest)
        found = []
        for question in questions:
            ids = [*question.asked, *question.expected[:-1]]
            stop = n + len(ids)
            slots, want = np.arange(n, stop), np.arange(len(question.asked) - 1, len(ids))
            work = Work(rows, np.array(ids, np.int64), slots, slots, want)
            logits = self.runner.forward([work])[0]
            found.append(self._reply(question, rows, n, question.asked, logits))
            rows.truncate(n)
        return found

    def replies(
        self, runs: Sequence[tuple[Context, int, Sequence[int]]], questions: Sequence[Question]
    ) -> list[Heard]:
        """Return the reply to each question in a (woven context, slot, tokens asked from there on)."""
        rows = [context.session.state.rows for context, _, _ in runs]
        ids = [(*asked, *q.expected[:-1]) for (_, _, asked), q in zip(runs, questions, strict=True)]
        starts = [slot for _, slot, _ in runs]
        found = []
        for i, logits in enumerate(forced(self.runner, list(zip(rows, starts, ids, strict=True)))):
            asked = runs[i][2]
            logits = logits[len(asked) - 1 :]
            found.append(self._reply(questions[i], rows[i], starts[i], asked, logits))
        return found

    def _reply(
        self, question: Question, rows: Rows, start: int, asked: Sequence[int], logits: Tensor
    ) -> Heard:
        """Decode the reply where the expected one does not decide."""
        if self.words.trained or not question.value:
            return Heard(logits)
        if hits(question, logits).all():
            return Heard(logits, question.value)
        return Heard(logits, written(self.runner, rows, start, asked))

    def truth(self, paper: Paper) -> list[Heard]:
        """Return the oracle's replies."""
        notes = [t for _, tokens in paper.left() for t in tokens]
        return self.oracle([*self.words.head, *notes], paper.questions)

    def under(
        self, paper: Paper, method: Method, truth: list[Heard], mode: str = ""
    ) -> Iterator[Trial]:
        """Weave the notes under one method and ask every question."""
        evict = mode == "evict"
        engine = self.engine(method.base, evict)
        stores = method.build().rank > 0
        if stores:  # patches of one method must not help another
            self.clear()
        if not evict:
            self._store(paper, method)
        if method.before and (method.base, method.before) not in self._seen:
            self._weave_before(engine, method, paper)
        context = self.context(engine, method, evict)
        n_head = len(context.parts)
        with context.edit():
            for i, (name, tokens) in enumerate(paper.notes):
                if evict:
                    context.append(tokens)  # prefilled here: what stands behind a note has read it
                elif mode != "never" or i != paper.dropped:
                    context.append_chunk(name)
        kept = 0  # rows in front of the dropped note, repaired before it went
        if paper.dropped is not None and mode != "never":
            spans = context.weave().spans[: n_head + paper.dropped]
            kept = sum(s.n_repaired for s in spans)
            context.drop(n_head + paper.dropped)
        asked = self._ask_blind if method.is_blind else self._ask
        for i, (plan, reply) in enumerate(asked(engine, context, paper.questions)):
            made = outcome(paper, i, truth[i], reply, method=method.label, mode=mode)
            yield dataclasses.replace(made, **counts(plan, kept))
        engine.close_context(context.name)
        if stores:
            self.clear()

    def _store(self, paper: Paper, method: Method) -> None:
        engine = self.engine(method.base)
        if engine.table.lookup(paper.notes[0][0]) is None:
            engine.put_many(dict(paper.notes).items())

    def _weave_before(self, engine: Engine, method: Method, paper: Paper) -> None:
        """Weave the notes once, wholly repaired, and let go of the context."""
        first = Method(method.before, 1.0, method.base)
        context = self.context(engine, first)
        with context.edit():
            for name, _ in paper.notes:
                context.append_chunk(name)
        context.weave()
        engine.close_context(context.name)
        self._seen.add((method.base, method.before))

    def _ask(
        self, engine: Engine, context: Context, questions: Sequence[Question]
    ) -> Iterator[tuple[Plan, Heard]]:
        """Weave anew for every question, in copies of the context that run in one packed pass."""
        runs = []
        for question in questions:
            twin = engine.fork(context, f"exam-{next(self._n)}")
            twin.append(question.asked)
            runs.append((twin, twin.n_tokens - 1, question.asked[-1:]))
        answers = engine.generate_many([twin for twin, _, _ in runs], max_tokens=1)
        yield from zip([a.plan for a in answers], self.replies(runs, questions), strict=True)
        for twin, _, _ in runs:
            engine.close_context(twin.name)

    def _ask_blind(
        self, engine: Engine, context: Context, questions: Sequence[Question]
    ) -> Iterator[tuple[Plan, Heard]]:
        """Weave once, then run every question with its reply: the choice would be the same."""
        plan = context.weave()
        n = context.n_tokens
        runs = [(context, n, q.asked) for q in questions]
        for reply in self.replies(runs, questions):
            yield plan, reply


def outcome(
    paper: Paper, item: int, truth: Heard, reply: Heard, *, method: str, mode: str = ""
) -> Trial:
    """Judge a reply."""
    question = paper.questions[item]
    right, kl, nll = judge(question, truth, reply)
    return Trial(paper.protocol, paper.index, item, question.kind, mode, method, right, kl, nll)


def hits(question: Question, logits: Tensor) -> Tensor:
    """Return which tokens of the expected reply are the likeliest."""
    return logits.argmax(-1) == torch.tensor(question.expected, device=logits.device)


def judge(question: Question, truth: Heard, reply: Heard) -> tuple[float, float, float]:
    """Return whether the reply is right, KL(oracle || woven) and nats a token."""
    expected = torch.tensor(question.expected, device=reply.logits.device)
    found = reply.logits.double().log_softmax(-1)
    wanted = truth.logits.double().log_softmax(-1)
    kl = (wanted.exp() * (wanted - found)).sum(-1).clamp_min(0).mean()
    nll = -found.gather(1, expected[:, None]).mean()
    right = hits(question, reply.logits)
    if question.kind == "prose":
        share = float(right.double().mean())
    elif reply.said is not None:
        share = float(value_of(reply.said) == question.value)
    else:
        share = float(right[-1] if question.is_leak else right.all())
    return share, float(kl), float(nll)


def counts(plan: Plan, kept: int = 0) -> dict[str, Any]:
    """Return what a plan says about rows, for a `Trial`; ``kept`` were repaired before."""
    reused = [s for s in plan.spans if s.how in ("reuse", "repair")]
    evidence: Any = getattr(plan, "evidence", None)
    if dataclasses.is_dataclass(evidence):
        evidence = dataclasses.asdict(evidence)  # type: ignore[arg-type]
    return {
        "candidates": sum(s.n_tokens - s.n_prefilled for s in reused),
        "repaired": plan.repaired + kept,
        "prefilled": plan.prefilled,
        "drift": plan.drift,
        "evidence": evidence,
    }


def clear(engine: Engine) -> None:
    """Remove all chunks but the base and the system message; their KV goes with them."""
    for name in engine.table.names():
        if name != "system":
            engine.files.rm(name)

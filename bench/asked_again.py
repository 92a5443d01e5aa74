"""What do later questions of one edited context need of repair?

A text is placed in the context as behind an edit: its first notes as they were, all others from KV that
never saw them. Then eight questions are asked, one after the other, each answered by the reply that is
expected; every question is held against a full prefill of all that stands there::

    [system][note/0][note/1] | [note/2] ... [note/7] [question][reply] [question][reply] ...
    `------- exact --------'   `---- placed -------'

| way | what is repaired of all that is approximate |
|---|---|
| `none` | nothing |
| `every time` | 5 % at every question, as `auto` does; 2 % |
| `once` | 5 % of what no question has met yet |
| `less` | the same, and of the others `LEFT` as much, at least `FEW` rows |
| `less, asked` | the same, no first rows of chunks among the others |
| `anew` | 5 %, all placed again before each question: what the share is for one question |
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, progress, report, table
from models.worlds import BOS
from pruning.count import FEW, LEFT, rows_of
from regret import WEIGHTS, kind_of, papers
from rich.table import Table

from kvweave.run.base import Steps
from kvweave.run.model import Runner
from kvweave.suite import prose, stats
from kvweave.suite.computed import Computed, counted
from kvweave.suite.exam import Exam, judge
from kvweave.suite.method import Method
from kvweave.suite.protocols import Size, cases
from kvweave.suite.reply import Heard
from kvweave.suite.words import Paper, Question
from kvweave.weave.passes import Passes
from kvweave.weave.plan import Plan
from kvweave.weave.recipes import THIRDS
from kvweave.weave.repair import Auto, Strategy, Verdict, Wish, strategy

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
MODELS = ("bundled", "llama-one", "qwen3-last", "neox-first", "gemma3-slide", "qwen3moe-chain", "olmo2-path", "deepseek-last", "llama-prose", "qwen3-bytes")  # fmt: skip
PROTOCOLS = ("P1", "P2", "P3", "P4", "P8")
SHARE, EXACT, ASKED = 0.05, 2, 8
PIECE = 16  # tokens of prose that are given, and that are predicted


class Less(Auto):
    """`auto` that repairs less of rows that an earlier question has met: ``left`` of the share, but ``few``
    rows if the share has them; with ``asked`` all of these go to what the question needs. One conversation
    is all it knows."""

    def __init__(self, left: float, few: int, asked: bool = False) -> None:
        super().__init__()
        self.left, self.few, self.asked, self.met = left, few, asked, 0

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Repair as `auto` does, with another share."""
        stale = [p for p in passes.placed if p.ready and not p.exact]
        slots = passes.candidates(stale)
        if len(slots) and len(passes.unready):
            met = int((slots < self.met).sum())
            new = len(slots) - met
            rows = rows_of(wish.share, new, met, self.left, self.few)
            self.hedge = THIRDS / 3 * (wish.share * new / max(rows, 1e-9) if self.asked else 1)
            wish = replace(wish, share=rows / len(slots))
            self.met = passes.n
        return (yield from super().repair(passes, wish))


@dataclass(frozen=True)
class Way:
    """A strategy, made for each conversation, at a share; ``anew``: before each question all is placed
    again."""

    make: Callable[[], Strategy]
    share: float = SHARE
    anew: bool = False


def ways(tried: bool) -> dict[str, Way]:
    """Return each way; with ``tried`` other constants, too."""
    made = {
        "none": Way(partial(strategy, "none"), 0.0),
        "every time": Way(Auto),
        "every time, 2 %": Way(Auto, 0.02),
        "once": Way(partial(Less, 0.0, 0)),
        "less": Way(partial(Less, LEFT, FEW)),
        "less, asked": Way(partial(Less, LEFT, FEW, True)),
        "anew": Way(Auto, anew=True),
    }
    if tried:
        rules = itertools.product((0.0, 0.1, 0.2, 0.5), (0, 8, 16))
        made |= {f"{x:g}, {n} rows": Way(partial(Less, x, n)) for x, n in rules}
    return made


def world(exam: Exam, name: str, n: int, seed: str, longer: int) -> Iterator[Paper]:
    """Yield ``n`` cases of one model, of the bundled one as many of each protocol; texts are so many times
    ``longer`` where there is a choice."""
    if name == "bundled":
        size = Size(notes=(9 * longer, 12 * longer), entities=(36, 36), questions=ASKED)
        for protocol in PROTOCOLS:
            for i, case in enumerate(
                itertools.islice(cases(protocol, seed, size), -(-n // len(PROTOCOLS)))
            ):
                yield exam.words.paper(case, i)
    elif kind_of(name).wording is not None:
        yield from papers(kind_of(name), exam, n, seed)
    else:
        yield from texts(exam, n, seed, longer)


def texts(exam: Exam, n: int, seed: str, longer: int) -> Iterator[Paper]:
    """Yield held-out prose: eight chunks, of which the fourth is gone, and what follows in pieces."""
    size = prose.CHUNK * prose.CHUNKS * longer
    whole = size + 2 * PIECE * ASKED
    documents = [exam.words.maker.tokens(text) for text in prose.texts(True)]
    places = [(d, s) for d in documents for s in range(0, len(d) - whole + 1, whole)]
    for index, (document, start) in enumerate(
        random.Random(seed).sample(places, min(n, len(places)))
    ):
        tokens = document[start : start + whole]
        chunks = [tuple(tokens[i : i + prose.CHUNK]) for i in range(0, size, prose.CHUNK)]
        notes = tuple((f"prose/{i}", chunk) for i, chunk in enumerate(chunks) if i != 3)
        starts = range(size, whole, 2 * PIECE)
        asked = [
            Question(
                "prose", tuple(tokens[i : i + PIECE]), tuple(tokens[i + PIECE : i + 2 * PIECE])
            )
            for i in starts
        ]
        yield Paper("prose", index, notes, tuple(asked))


def conversation(exam: Exam, way: Way, paper: Paper) -> Iterator[tuple[Plan, Heard]]:
    """Place the notes as behind an edit and ask all questions, one after the other."""
    engine = exam.engine(True)
    how = way.make()
    context = exam.context(engine, Method(how, way.share))
    for _, tokens in paper.notes[:EXACT]:
        context.append(tokens)
    context.weave()
    with context.edit():
        for name, _ in paper.notes[EXACT:]:
            context.append_chunk(name)
    for question in paper.questions:
        context.append(question.asked)
        anew = context.weave(how, way.share) if way.anew else None
        plan = context.generate(max_tokens=1, ignore_eos=True).plan
        last = context.n_tokens - 2
        [reply] = exam.replies([(context, last, question.asked[-1:])], [question])
        yield anew or plan, reply
        with context.edit():
            context.drop(-1)
            context.append(said(exam, question))
    engine.close_context(context.name)


def said(exam: Exam, question: Question) -> list[int]:
    """Return a whole reply."""
    words = exam.words
    after = words.tokens(words.maker.chat.wrap("assistant").after) if words.header else ()
    return [*question.expected, *after[1:]]


def trials(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each way did at each question."""
    path = BUNDLED if name == "bundled" else WEIGHTS / name
    runner = Runner.load(
        str(path), device="cpu", dtype="float32"
    )  # half of it is as coarse as KLs are
    exam = Exam(runner, None if name == "bundled" else BOS, evidence=False)
    with counted(runner) as spent:
        yield from examined(exam, name, options, spent)
    exam.close()


def examined(
    exam: Exam, name: str, options: argparse.Namespace, spent: Computed
) -> Iterator[dict[str, Any]]:
    """Yield what each way did at each question, by an exam whose backend is counted."""
    for paper in world(exam, name, options.n, options.seed, options.longer):
        before = [*exam.words.head, *(t for _, tokens in paper.notes for t in tokens)]
        truth = []
        for question in paper.questions:
            truth += exam.oracle(before, [question])
            before += [*question.asked, *said(exam, question)]
        exam.engine(True).put_many(dict(paper.notes).items())
        for label, way in ways(options.tried).items():
            start = spent.rows
            for turn, (plan, reply) in enumerate(conversation(exam, way, paper)):
                question, wanted = paper.questions[turn], truth[turn]
                right, kl, _ = judge(question, wanted, reply)
                replied = len(question.expected)
                same = wanted.logits.argmax(-1) == reply.logits.argmax(-1)
                yield {
                    "model": name, "protocol": paper.protocol, "case": paper.index, "way": label,
                    "turn": turn + 1, "kl": kl, "right": right, "same": float(same.all()),
                    "full": judge(question, wanted, wanted)[0], "repaired": plan.repaired,
                    "computed": spent.rows - start - replied - plan.prefilled,
                    "placed": sum(len(t) for _, t in paper.notes[EXACT:]),
                }  # fmt: skip
                start = spent.rows
        exam.clear()


def summed(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a model and way: the first question, and those behind it."""
    made = []
    for model, way in dict.fromkeys((t["model"], t["way"]) for t in found):
        mine = [t for t in found if (t["model"], t["way"]) == (model, way)]
        usual = [t for t in found if (t["model"], t["way"]) == (model, "every time")]
        row: dict[str, Any] = {"model": model, "way": way}
        for part, turns in {"first": range(1, 2), "later": range(2, ASKED + 1)}.items():
            some = [t for t in mine if t["turn"] in turns]
            row[part] = {
                "n": len(some), "kl": stats.mean(by_case(some, "kl")).to_list(),
                "kl_95": float(np.quantile([t["kl"] for t in some], 0.95)),
                "same": stats.mean(by_case(some, "same")).to_list(),
                **{key: float(np.mean([t[key] for t in some])) for key in ("right", "full")},
                **{key: sum(t[key] for t in some) / sum(t["placed"] for t in some) for key in ("repaired", "computed")},
            }  # fmt: skip
            others = [t for t in usual if t["turn"] in turns]
            row[part]["kl_more"] = stats.difference(by_case(some, "kl"), by_case(others, "kl")).to_list()  # fmt: skip
            row[part]["same_more"] = stats.difference(by_case(some, "same"), by_case(others, "same")).to_list()  # fmt: skip
        each = [[t for t in mine if t["turn"] == i] for i in range(1, ASKED + 1)]
        row["kl_by_turn"] = [float(f"{np.mean([t['kl'] for t in some]):.4g}") for some in each if some]  # fmt: skip
        row["repaired_by_turn"] = [round(float(np.mean([t["repaired"] for t in some])), 2) for some in each if some]  # fmt: skip
        made.append(row)
    return made


def by_case(found: Sequence[dict[str, Any]], key: str) -> list[list[float]]:
    """Return the values of each case."""
    made: dict[Any, list[float]] = {}
    for t in found:
        made.setdefault((t["protocol"], t["case"]), []).append(t[key])
    return list(made.values())


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table a model."""
    head = ("way", "KL 1", "KL later", "more", "from", "to", "same", "right", "repaired", "computed")  # fmt: skip
    made = []
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        lines = [
            [
                r["way"], *(f"{x:.2g}" for x in (r["first"]["kl"][0], r["later"]["kl"][0], *r["later"]["kl_more"])),
                *(f"{x:.1%}" for x in (r["later"]["same"][0], *(r["later"][k] for k in ("right", "repaired", "computed")))),
            ]
            for r in mine
        ]  # fmt: skip
        made.append(table(f"{model}, {mine[0]['later']['n']} later questions", head, lines))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--n", type=int, default=10, help="cases of a model")
    parser.add_argument("--seed", default="report")
    parser.add_argument(
        "--longer", type=int, default=3, help="times: texts of the bundled model, prose"
    )
    parser.add_argument("--tried", action="store_true", help="all rules that were tried")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, here = time.perf_counter(), machine(torch.device("cpu"))
    found: list[dict[str, Any]] = []
    with progress("models", len(options.models)) as advance:
        for name in options.models:
            found += trials(name, options)
            advance(name)
    rows = summed(found)
    setup = {
        "n": options.n,
        "seed": options.seed,
        "longer": options.longer,
        "share": SHARE,
        "exact_notes": EXACT,
    }
    result = {"rows": rows, "setup": setup, "seconds": round(time.perf_counter() - started, 1), "machine": here}  # fmt: skip
    report(result, tables(rows), options, "asked_again")


if __name__ == "__main__":
    main()

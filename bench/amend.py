"""Does an erratum do what replacing does? One fact of a context is corrected, in several ways.

The context is a system message and ten notes of the bundled model's world, all exact, as in a chat that
grew. One note's fact turns out wrong. Three kinds of questions are asked afterwards: for that fact
(``corrected``), for a fact of a later note that was taken over from it (``taken over``), and for one
that has nothing to do with it (``other``). All is held against a full prefill of the edited truth,
the notes as they would be if the fact had been right from the start::

    replace   [system][note 0][note 1, edited][note 2]...[question]   what stands behind is woven anew
    amend     [system][note 0][note 1][note 2]...[erratum][question]  only the erratum is computed
    behind    [system][note 0][note 1][erratum][note 2]...[question]  an erratum that the later notes may read
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, progress, report, table
from rich.table import Table

from kvweave import Engine
from kvweave.demo.vocabulary import NOW, STOP, VALUES, text
from kvweave.run.model import Runner
from kvweave.suite import stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.protocols import TEST, Draft, Item, ask
from kvweave.suite.words import Question
from kvweave.weave.context import Context

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
WAYS: dict[str, tuple[str, str, float]] = {  # what is done, strategy, share
    "nothing": ("nothing", "none", 0.0),
    "amend": ("amend", "auto", 0.05),
    "behind, none": ("behind", "none", 0.0),
    "behind, auto 5%": ("behind", "auto", 0.05),
    "replace, none": ("replace", "none", 0.0),
    "replace, auto 5%": ("replace", "auto", 0.05),
    "replace, auto 15%": ("replace", "auto", 0.15),
    "replace, full": ("replace", "full", 1.0),
}
_Notes = list[str]


def case(seed: str) -> tuple[_Notes, _Notes, int, str, list[Item]]:
    """Return the notes, the notes as they should be, which of them is wrong, the erratum, and the
    questions with the right replies."""
    rng = random.Random(seed)
    draft = Draft(rng, TEST)
    first, second = draft.two_notes()
    (entity, attribute), other, old = draft.alias(first, second)
    apart = draft.fact(rng.randrange(len(draft.notes)))
    draft.fill()
    notes = [draft.text(i) for i in range(len(draft.notes))]
    new = rng.choice([value for value in VALUES if value != old])
    wrong, right = text([entity, attribute, old, STOP]), text([entity, attribute, new, STOP])
    assert notes[first].count(wrong) == 1
    edited = list(notes)
    edited[first] = notes[first].replace(wrong, right)
    items = [
        ask("corrected", entity, [(attribute, new)]),
        ask("taken over", other[0], [(other[1], new)]),
        ask("other", apart[0], [(apart[1], apart[2])]),
    ]
    return notes, edited, first, text([NOW, entity, attribute, new, STOP]), items


class Bench:
    """The bundled model, an engine, and contexts in it."""

    def __init__(self) -> None:
        runner = Runner.load(str(BUNDLED), device="cpu")
        self.exam = Exam(runner, evidence=False)
        self.engine = Engine(runner, base=self.exam.words.system, denoise="never")
        self._n = itertools.count()

    def of_case(self, index: int) -> list[dict[str, Any]]:
        """Return a trial for each way and question."""
        words, engine = self.exam.words, self.engine
        notes, edited, wrong, erratum, items = case(f"amend/{index}")
        told, truth = ([words.user(each) for each in some] for some in (notes, edited))
        questions = [
            Question(i.kind, words.tokens(words.maker.chat.message("user", i.question) + words.header),
                     words.expected(i.reply), i.value)
            for i in items
        ]  # fmt: skip
        wanted = self.exam.oracle([*words.head, *itertools.chain(*truth)], questions)
        names = [f"case/{index}/{i}" for i in range(len(told))]
        engine.put_many(zip(names, told, strict=True))
        found = []
        for way, (verb, strategy, share) in WAYS.items():
            context = engine.context(f"amend-{next(self._n)}", repair=strategy, share=share)
            with context.edit():
                for name in names:
                    context.append_chunk(name)
            context.weave(repair="full")
            context.weave(repair=strategy, share=share)  # all is exact by now; what comes after it
            done(context, verb, names[wrong], truth[wrong], words.user(erratum))
            for question, want in zip(questions, wanted, strict=True):
                found.append({"way": way, "case": index} | self.asked(context, question, want))
            engine.close_context(context.name)
        engine.files.rm(f"case/{index}/*")
        return found

    def asked(self, context: Context, question: Question, want: Any) -> dict[str, Any]:
        """Ask one question in a copy of the context, which is woven with the question there."""
        twin = self.engine.fork(context, f"amend-{next(self._n)}")
        twin.append(question.asked)
        run = (twin, twin.n_tokens - 1, question.asked[-1:])
        plan = twin.generate(max_tokens=1).plan
        [reply] = self.exam.replies([run], [question])
        right, kl, _ = judge(question, want, reply)
        self.engine.close_context(twin.name)
        return {
            "kind": question.kind, "right": right, "kl": kl,
            "full": judge(question, want, want)[0],
            "computed": plan.prefilled + plan.repaired - len(question.asked),
            "tokens": plan.n_tokens,
        }  # fmt: skip

    def close(self) -> None:
        """Let go of the model."""
        self.exam.close()
        self.engine.close()


def done(
    context: Context, verb: str, part: str, edited: Sequence[int], erratum: Sequence[int]
) -> None:
    """Do the edit."""
    if verb == "replace":
        context.replace(part, edited, kind="user")
    elif verb == "amend":
        context.amend(part, erratum)
    elif verb == "behind":
        context.insert(context.index(part) + 1, erratum, kind="user")


def summed(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a way and kind of question."""
    rows = []
    for way, kind in dict.fromkeys((t["way"], t["kind"]) for t in trials):
        mine = [t for t in trials if (t["way"], t["kind"]) == (way, kind)]
        rows.append({
            "way": way, "kind": kind, "n": len(mine),
            **{key: stats.mean([[t[key]] for t in mine]).to_list() for key in ("right", "kl")},
            **{key: float(np.mean([t[key] for t in mine])) for key in ("full", "computed", "tokens")},
        })  # fmt: skip
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return one table: a line a way and kind."""
    head = ("way", "question", "n", "right", "full right", "KL", "computed", "of tokens")
    lines = [
        [r["way"], r["kind"], r["n"], f"{r['right'][0]:.1%}", f"{r['full']:.1%}", r["kl"][0], r["computed"], r["tokens"]]
        for r in rows
    ]  # fmt: skip
    return [table("amend and replace", head, lines)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100, help="cases")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, here = time.perf_counter(), machine(torch.device("cpu"))
    bench, trials = Bench(), []
    with progress("cases", options.n) as advance:
        for index in range(options.n):
            trials += bench.of_case(index)
            advance(str(index))
    bench.close()
    rows = summed(trials)
    result = {"rows": rows, "n": options.n, "seconds": round(time.perf_counter() - started, 1), "machine": here}  # fmt: skip
    report(result, tables(rows), options, "amend")


if __name__ == "__main__":
    main()

"""Does KV of a document pay that was computed after another system message?

Each case has the same notes twice: after the system message of the context (`own`) and after another
one (`other`), to be woven behind the first. Both are held against a full prefill of the context, that
is against computing the notes anew, with nothing repaired, with the first rows of each note repaired,
and with `auto`::

    [system B][note/0][note/1] ... [question]     note/i computed after A, or after B

The bundled model is asked about P1 to P9, models of the bench about their own worlds, and prose is
continued. Behind its own message the first note is exact: what is lost there counts, too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, progress, report, table
from models.worlds import BOS
from regret import WEIGHTS, kind_of, papers
from rich.table import Table

from kvweave import Engine
from kvweave.chunk.identity import ChunkId
from kvweave.run.base import Steps
from kvweave.run.model import Runner
from kvweave.suite import prose, stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.protocols import PROTOCOLS, cases
from kvweave.suite.reply import Heard
from kvweave.suite.words import Paper
from kvweave.weave.passes import Passes, union
from kvweave.weave.repair import Strategy, Verdict, Wish, strategy

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
MODELS = ("bundled", "llama-one", "qwen3-last", "llama-prose", "qwen3-bytes")
LONGER = 48  # tokens in front of the longer message
SHARE = 0.05


class FirstRows(Strategy):
    """Recompute ``n`` rows at the front of each part, then repair as another strategy does."""

    name = "first rows"

    def __init__(self, n: int, then: str) -> None:
        self.n, self.then = n, strategy(then)
        self.draft = self.then.draft

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Repair the first rows over the context as it was placed, then the others."""
        spans = [p for p in passes.placed if p.repairable]
        ends = [np.arange(p.slot, p.slot + min(self.n, p.ready)) for p in spans]
        first = np.concatenate([np.zeros(0, np.int64), *ends])
        if len(first):
            yield passes.work(first)
            passes.repaired[first] = True
        found = yield from self.then.repair(passes, wish)
        return Verdict(union(found.chosen, first), None, None, found.in_place, found.end)


def methods() -> dict[str, tuple[bool, Strategy, float]]:
    """Return by label: whether the KV is of the other base, the strategy, and its share."""
    made: dict[str, tuple[bool, Strategy, float]] = {}
    for other in (False, True):
        whose = "other" if other else "own"
        made[f"{whose}, none"] = other, strategy("none"), 0.0
        made[f"{whose}, auto 5%"] = other, strategy("auto"), SHARE
        for share in (0.1, 0.15):
            made[f"{whose}, auto {share:.0%}"] = other, strategy("auto"), share
        for n in (1, 4, 8):
            made[f"{whose}, first {n}"] = other, FirstRows(n, "none"), 0.0
        for n in (1, 4):
            made[f"{whose}, first {n}, auto 5%"] = other, FirstRows(n, "auto"), SHARE
    return made


def messages(exam: Exam, name: str) -> dict[str, list[int]]:
    """Return system messages in tokens: the usual one, and those that stand in its place."""
    usual = list(exam.words.head)
    maker = exam.words.maker
    filler = maker.tokens(prose.texts(True)[0]) if kind_is_prose(name) else None
    if filler is None:
        other = world(exam, name, 1, "filler")[0]
        filler = [t for _, tokens in other.notes for t in tokens]
    bos = maker.bos()
    return {
        "usual": usual,
        "longer": [*usual, *filler[:LONGER]],
        "changed": [*bos, *filler[LONGER : LONGER + max(4, len(usual) - len(bos))]],
    }


def kind_is_prose(name: str) -> bool:
    """Tell whether a model continues prose."""
    return name != "bundled" and kind_of(name).wording is None


def world(exam: Exam, name: str, n: int, seed: str) -> list[Paper]:
    """Return the cases of one model, of the bundled one ``n`` of each protocol."""
    if name != "bundled":
        return list(papers(kind_of(name), exam, n, seed))
    made = [exam.words.paper(c, i) for p in PROTOCOLS for i, c in enumerate(itertools.islice(cases(p, seed), n))]  # fmt: skip
    return made


class Bench:
    """One model, an engine without a base, and the same notes after several."""

    def __init__(self, name: str) -> None:
        path = BUNDLED if name == "bundled" else WEIGHTS / name
        self.runner = Runner.load(str(path), device="cpu")
        self.name = name
        self.exam = Exam(self.runner, None if name == "bundled" else BOS, evidence=False)
        self.engine = Engine(self.runner, base="", denoise="never")
        self.messages = messages(self.exam, name)
        self._n = itertools.count()

    def base(self, message: str) -> ChunkId:
        """Return the id of a system message, computed."""
        maker = self.engine.maker
        id = maker.add(self.messages[message], kind="system")
        self.engine.table.hold(id, "bench")
        maker.canonicalise([id])
        return id

    def asked(self, paper: Paper, here: str, there: str) -> Iterator[dict[str, Any]]:
        """Weave the notes of a case behind the message ``here``; those of another base were computed
        after ``there``."""
        engine, exam = self.engine, self.exam
        notes = paper.left()
        flat = [t for _, tokens in notes for t in tokens]
        truth = exam.oracle([*self.messages[here], *flat], paper.questions)
        for other, message in ((False, here), (True, there)):
            base = self.base(message)
            ids = [engine.maker.add(tokens, base=base) for _, tokens in notes]
            for id in ids:
                engine.table.hold(id, "bench")
            engine.maker.canonicalise(ids)
            for label, (whose, how, share) in methods().items():
                if whose != other:
                    continue
                context = engine.context(f"bases-{next(self._n)}", repair=how, share=share)
                context.set_base(self.base(here), "base")
                with context.edit():
                    for id in ids:
                        context.append_chunk(f"#{id}")
                assert ("base" in context.preview().approximate) == other, "KV of another base"
                for question, wanted, (plan, reply) in zip(
                    paper.questions, truth, self.ask(context, paper), strict=True
                ):
                    right, kl, _ = judge(question, wanted, reply)
                    same = wanted.logits[0].argmax() == reply.logits[0].argmax()
                    yield {
                        "method": label, "protocol": paper.protocol, "case": paper.index,
                        "here": here, "there": there, "kl": kl, "right": right,
                        "first": float(same), "full": judge(question, wanted, wanted)[0],
                        "rows": plan.repaired / max(1, len(flat)),
                    }  # fmt: skip
                engine.close_context(context.name)
            for id in ids:  # before the next: where KV of the right base is there, it is placed
                engine.table.release(id, "bench")

    def ask(self, context: Any, paper: Paper) -> Iterator[tuple[Any, Heard]]:
        """Weave for every question in a copy of the context."""
        engine, runs = self.engine, []
        for question in paper.questions:
            twin = engine.fork(context, f"bases-{next(self._n)}")
            twin.append(question.asked)
            runs.append((twin, twin.n_tokens - 1, question.asked[-1:]))
        answers = engine.generate_many([twin for twin, *_ in runs], max_tokens=1)
        yield from zip([a.plan for a in answers], self.exam.replies(runs, paper.questions), strict=True)  # fmt: skip
        for twin, *_ in runs:
            engine.close_context(twin.name)

    def close(self) -> None:
        """Let go of the model."""
        self.exam.close()
        self.engine.close()


def of_model(name: str, n: int) -> list[dict[str, Any]]:
    """Return the trials of one model."""
    bench, found = Bench(name), []
    for i, paper in enumerate(world(bench.exam, name, n, "bases")):
        pairs = (("usual", "longer"), ("longer", "usual"), ("changed", "usual"))
        found += bench.asked(paper, *pairs[i % len(pairs)])
    bench.close()
    return [{"model": name} | trial for trial in found]


def summed(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a model, group of cases and method."""
    made = []
    keys = dict.fromkeys((t["model"], t["method"]) for t in trials)
    for model, method in keys:
        mine = [t for t in trials if (t["model"], t["method"]) == (model, method)]
        by_case: dict[Any, list[float]] = {}
        for t in mine:
            by_case.setdefault((t["protocol"], t["case"]), []).append(t["kl"])
        made.append({
            "model": model, "method": method, "n": len(mine),
            "kl": stats.mean(list(by_case.values())).to_list(),
            "kl_95": float(np.quantile([t["kl"] for t in mine], 0.95)),
            **{key: float(np.mean([t[key] for t in mine])) for key in ("first", "right", "full", "rows")},
        })  # fmt: skip
    return made


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table a model."""
    head = ("method", "n", "KL", "KL 95 %", "first token", "right", "full right", "rows")
    made = []
    for model in dict.fromkeys(r["model"] for r in rows):
        lines = [
            [r["method"], r["n"], r["kl"][0], r["kl_95"], *(f"{r[k]:.1%}" for k in ("first", "right", "full", "rows"))]
            for r in rows if r["model"] == model
        ]  # fmt: skip
        made.append(table(model, head, lines))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--n", type=int, default=6, help="cases: of each protocol, or of a model")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, here = time.perf_counter(), machine(torch.device("cpu"))
    trials: list[dict[str, Any]] = []
    with progress("models", len(options.models)) as advance:
        for name in options.models:
            trials += of_model(name, options.n)
            advance(name)
    rows = summed(trials)
    result = {"rows": rows, "n": options.n, "seconds": round(time.perf_counter() - started, 1), "machine": here}  # fmt: skip
    report(result, tables(rows), options, "bases")


if __name__ == "__main__":
    main()

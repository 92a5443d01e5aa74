"""What token policies lose over a long decode, where they choose again and again at a fixed budget.

**Talks**: a document, then question after question in one context. Each answer is written by what the
policy has left then, stays in the context, and may be long; no fact is asked for twice. The engine
chooses behind each question and every `EVERY` tokens of an answer. The budget is a share of the
*document's* rows and does not grow with what is said. `P1` (facts) and `P9` (chains of three and four
steps, all written out) are the suite's with the bundled model; ``qwen3moe-chain`` thinks in chains of its
own, up to twenty tokens.

**Traces**: such a talk of `LONG` questions is decoded as one answer whose tokens are given, questions
too: a choice comes every 64 tokens and does not know what is asked next. Policies free, watch and compute
rows as if they had drawn these tokens themselves. A reply is right where each of its tokens is the
likeliest. Between two choices tokens go in one pass, which is the same as one by one.

**Prose**: the same with what the full run drew behind held-out prose; KL to the full run at every token. The
budget is a share of all tokens.

For the intervals whole talks are drawn, of prose stretches of a sixteenth. Bytes are those in memory of a model in bfloat16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine, progress, table
from levels import used
from models import prose
from models.worlds import BOS, END, case
from policies_tokens import (
    DIVIDED,
    MODEL,
    NAMES,
    OPTIONS,
    PROSE,
    SHARES,
    VARIANTS,
    WEIGHTS,
    Plenty,
    asked,
)
from regret import NOTES, kind_of, mastered
from rich.console import Console
from torch import Tensor

from kvweave import Engine
from kvweave.keep.tokens.spec import EVERY as PAGE
from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import Rows, Work
from kvweave.run.model import Runner
from kvweave.run.sampling import Sampling
from kvweave.suite import stats
from kvweave.suite.exam import Exam
from kvweave.suite.protocols import Size, cases
from kvweave.suite.words import Question
from kvweave.weave.keeping import Keeper
from kvweave.weave.observers import Observers
from kvweave.weave.oracle import drive, prefill

SEED, FULL = "long_decode", "no policy"
EVERY = 8  # decoded tokens from one choice to the next, in talks
LIMIT = 48  # tokens of an answer: the longest that is expected has 21
BELOW = {f"{name}, below": f"{name},below=rest" for name in ("kvzip", "snapkv", "keydiff")}
NAMED = {**{name: name for name in (*NAMES, *DIVIDED)}, **VARIANTS, **BELOW}
WORLD = ("P1", "P9")
PAGES = 16  # of tokens of prose, which are drawn for the intervals
CHAINS = ("qwen3moe-chain",)  # olmo2-path did not learn documents that are long enough
ASKED = 24  # of a chain model's document
LONG = {"P1": 60, "P9": 40}  # questions of a trace; of P9 half as many are asked
PROMPT, DECODED = 256, 2048  # tokens of prose
QUARTERS = 4
PARTS = ("talks", "traces", "prose")


def spec(name: str, budget: int, every: int) -> str:
    """Return what ``keep`` is given."""
    first, *rest = NAMED[name].split(",")
    rest += ["page=4", "recent=8"] if first == "flexicache" else []
    return ",".join([f"{first}:{budget}", OPTIONS, f"every={every}", *rest])


@dataclass(frozen=True)
class Talk:
    """A document and what is asked behind it, in tokens; ``closing`` stands behind each answer."""

    on: str
    head: tuple[int, ...]
    questions: tuple[Question, ...]
    closing: tuple[int, ...]


@dataclass
class Told:
    """How a talk went under one policy: for each question whether the answer was right, its tokens, and
    whether it ended; the most bytes of the rows, and the choices that were made."""

    right: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    bytes: int = 0
    choices: int = 0
    full: int = 0  # bytes of all rows at the end


class Choices:
    """Counts, while inside, the choices of each `Keeper`."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def __enter__(self) -> Choices:
        self._was = Keeper.woven, Keeper.decoded
        woven, decoded = self._was

        def counted_woven(keeper: Keeper, *given: Any) -> None:
            woven(keeper, *given)
            self.of[id(keeper)] = self.of.get(id(keeper), 0) + 1

        def counted_decoded(keeper: Keeper, *given: Any) -> bool:
            chose = decoded(keeper, *given)
            self.of[id(keeper)] = self.of.get(id(keeper), 0) + chose
            return chose

        Keeper.woven, Keeper.decoded = counted_woven, counted_decoded  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Keeper.woven, Keeper.decoded = self._was  # type: ignore[method-assign]


# ---- talks


def talks(exam: Exam, on: str, n: int, most: int) -> Iterator[Talk]:
    """Yield ``n`` talks of a protocol, of ``most`` questions, or of a chain model's world."""
    if on in WORLD:
        closing = exam.words.tokens(exam.words.maker.chat.wrap("assistant").after)
        size = Size(notes=(10, 10), facts=(5, 7), questions=most)
        for i, made in enumerate(itertools.islice(cases(on, SEED, size), n)):
            paper = exam.words.paper(made, i)
            notes = (t for _, tokens in paper.left() for t in tokens)
            yield Talk(on, (*exam.words.head, *notes), paper.questions, closing)
        return
    ids = exam.runner.tokenizer.get_vocab()
    for i in range(n):
        found = case(kind_of(on).wording, mastered(on), NOTES, ASKED, f"{SEED}/{on}/{i}")  # type: ignore[arg-type]
        head = (ids[BOS], *(ids[w] for words in found.notes for w in words))
        questions = tuple(
            Question(about, tuple(ids[w] for w in words), tuple(ids[w] for w in reply))
            for about, words, reply in found.questions[:most]
        )
        yield Talk(on, head, questions, (ids[END],))


def talked(runner: Runner, talk: Talk, cells: Sequence[tuple[str, float]]) -> list[Told]:
    """Have one talk under every policy and budget, side by side."""
    told = [Told() for _ in cells]
    with (
        Engine(
            runner, base="", repair="none", share=0.0, denoise="never", budget="64GiB"
        ) as engine,
        Choices() as choices,
    ):
        contexts = []
        for i, (name, share) in enumerate(cells):
            keep = None if name == FULL else spec(name, round(share * len(talk.head)), EVERY)
            contexts.append(engine.context(f"talk-{i}", keep=keep, denoise=False))
        for which, question in enumerate(talk.questions):
            before = talk.closing if which else talk.head
            for context in contexts:
                context.append([*before, *question.asked])
            answers = engine.generate_many(contexts, max_tokens=LIMIT)
            for one, context, answer in zip(told, contexts, answers, strict=True):
                if not which:  # else nobody had seen its attention
                    assert answer.plan.prefilled == len(talk.head) + len(question.asked)
                rows = context.session.state.rows
                one.right.append(float(answer.tokens == question.expected))
                one.length.append(float(len(answer.tokens)))
                one.ended.append(float(answer.finish == "stop"))
                one.bytes = max(one.bytes, used(rows, runner))
        for one, context in zip(told, contexts, strict=True):
            keeper = context.session.state.keeper
            one.choices = 0 if keeper is None else choices.of[id(keeper)]
            one.full = context.n_tokens * 2 * sum(info.shape.width for info in runner.layers)
        engine.check_integrity()
    return told


# ---- prose


def passages(runner: Runner, n: int, decoded: int) -> Iterator[np.ndarray]:
    """Yield held-out prose of ``PROMPT`` tokens and what the full run draws behind it."""
    texts = [text for text in prose.texts(True) if len(text) > 4000]
    with Engine(runner, base="", repair="none", denoise="never", budget="64GiB") as engine:
        for i, text in enumerate(texts[:: max(1, len(texts) // n)][:n]):
            prompt = list(runner.tokenizer(text[:4000]).input_ids)[:PROMPT]
            context = engine.context(f"prose-{i}", denoise=False)
            context.append(prompt)
            answer = context.generate(decoded, temperature=1.0, seed=i, ignore_eos=True)
            engine.close_context(context.name)
            yield np.array([*prompt, *answer.tokens], np.int64)


class Forced:
    """One policy behind ``rows`` of a prompt, which it was shown, whose continuation is given."""

    def __init__(self, keeper: Keeper, rows: Rows, tokens: np.ndarray) -> None:
        self.keeper, self.rows, self.tokens, self.n, self.most = keeper, rows, tokens, rows.n, 0
        self.request = asked(Sampling(max_tokens=len(tokens) - rows.n + 1), rows)
        keeper.woven(rows, (), self.request, Plenty())

    def work(self) -> Work:
        """Return the tokens up to the next choice."""
        given = self.tokens[self.n : self.n + self.keeper.keep.every]
        self.rows.reserve(self.rows.n + len(given))
        n, out = np.arange(len(given)), len(self.request.out)
        slots, behind = self.rows.n + n, int(self.rows.positions[self.rows.n - 1]) + 1
        observer = self.request.observer
        self.n += len(given)
        return Work(self.rows, given, slots, behind + n, n, observer=observer, at=out)

    def ran(self, work: Work) -> None:
        """Choose, where it is time."""
        for token in work.tokens:
            self.request.out.append(int(token))
            self.keeper.decoded(self.rows, self.request, Plenty())
        self.most = max(self.most, used(self.rows, self.keeper.backend))  # type: ignore[arg-type]


def prefilled(
    runner: Runner, tokens: np.ndarray, cells: Sequence[tuple[str, int]]
) -> list[tuple[Keeper, Rows]]:
    """Run a prompt, shown to all policies at once; return each with its copy of the rows."""
    n, slots = len(tokens), np.arange(len(tokens))
    least: dict[str, Keeper] = {}
    for name, budget in sorted(cells, key=lambda cell: cell[1]):
        least.setdefault(name, Keeper(Keep.parse(spec(name, budget, PAGE)), runner))
    watches = [keeper.observing(n) for keeper in least.values()]
    both = Observers([watch for watch in watches if watch is not None])
    rows = {}
    for moves in (False, True):
        rows[moves] = runner.new_rows("raw", moves=moves)
        rows[moves].reserve(n)
        work = Work(rows[moves], tokens, slots, slots, observer=None if moves else both)
        runner.forward([work])
    for keeper in least.values():
        drive(runner, keeper.rereading(rows[False], tokens))
    made = []
    for name, budget in cells:
        keeper = least[name].copy()
        keeper.keep = Keep.parse(spec(name, budget, PAGE))
        made.append((keeper, rows[keeper.moves].clone()))
    return made


@torch.inference_mode()
def forced(
    runner: Runner, tokens: np.ndarray, cells: Sequence[tuple[str, int]], n_prompt: int
) -> list[dict[str, Any]]:
    """Return, of each policy and budget in rows, KL at every token but the first behind the prompt and
    whether it was the likeliest, the most bytes, as a share of all, and the choices."""
    n, wanted = len(tokens), full_of(runner, tokens, n_prompt)
    whole = n * 2 * sum(info.shape.width for info in runner.layers)
    with Choices() as choices:
        begun = prefilled(runner, tokens[:n_prompt], cells)
        runs = [Forced(*each, tokens[:-1]) for each in begun]
        found: list[list[Tensor]] = [[] for _ in runs]
        while runs[0].n < n - 1:
            works = [run.work() for run in runs]
            for mine, run, work, logits in zip(found, runs, works, runner.forward(works), strict=True):  # fmt: skip
                mine.append(logits)
                run.ran(work)
    said, made = torch.from_numpy(tokens[n_prompt + 1 :]), []
    for mine, run in zip(found, runs, strict=True):
        logits = torch.cat(mine)
        made.append({
            "kl": _kl(wanted, logits).tolist(), "hits": (logits.argmax(-1) == said).tolist(),
            "bytes": run.most / whole, "choices": choices.of[id(run.keeper)],
        })  # fmt: skip
    return made


def full_of(runner: Runner, tokens: np.ndarray, n_prompt: int) -> Tensor:
    """Return log-probabilities [token, vocab] of a full prefill for all but the first behind a prompt."""
    n = len(tokens)
    return prefill(runner, tokens, np.arange(n), slice(n_prompt, n - 1))[1].log_softmax(-1)


def _kl(wanted: Tensor, logits: Tensor) -> Tensor:
    """Return KL [row] of ``logits`` to the log-probabilities ``wanted``, both [row, vocab]."""
    found = logits.log_softmax(-1)
    return (wanted.double().exp() * (wanted.double() - found.double())).sum(-1).clamp_min(0)


# ---- all of it

Cells = Sequence[tuple[str, float]]


def opened(on: str) -> Exam:
    """Return an exam of a model: the bundled one, or one of the bench."""
    world = on in WORLD
    runner = Runner.load(str(MODEL if world else WEIGHTS / on), device="cpu")
    return Exam(runner, None if world else BOS, evidence=False)


def measure_talks(on: str, n: int, cells: Cells, most: int, step: Any) -> list[dict[str, Any]]:
    """Return a row a policy and budget."""
    exam, found, document = opened(on), [], []
    for talk in talks(exam, on, n, most):
        found.append(talked(exam.runner, talk, [(FULL, 1.0), *cells]))  # type: ignore[arg-type]
        document.append(len(talk.head))
        step(on)
    exam.close()
    rows = [row_of(on, each, [told[i] for told in found], [told[0] for told in found])
            for i, each in enumerate([(FULL, 1.0), *cells])]  # fmt: skip
    about = {"talks": n, "questions": sum(len(told[0].right) for told in found)}
    return [row | about | {"document": round(float(np.mean(document)))} for row in rows]


def measure_traces(on: str, n: int, cells: Cells, most: int, step: Any) -> list[dict[str, Any]]:
    """Return a row a policy and budget."""
    exam, right, rests, n_tokens, full = opened(on), [], [], [], []
    for talk in talks(exam, on, n, most):
        tokens, spans = list(talk.head), []
        for question in talk.questions:
            at = len(tokens) + len(question.asked) - len(talk.head) - 1
            spans.append(slice(at, at + len(question.expected)))
            tokens += [*question.asked, *question.expected[:-1], *talk.closing]
        budgets = [(name, round(share * len(talk.head))) for name, share in cells]
        given = np.array(tokens, np.int64)
        made = forced(exam.runner, given, budgets, len(talk.head))  # type: ignore[arg-type]
        best = full_of(exam.runner, given, len(talk.head)).argmax(-1).numpy()
        hits = best == given[len(talk.head) + 1 :]
        full.append([float(all(hits[span])) for span in spans])
        right.append([[float(all(each["hits"][span])) for span in spans] for each in made])
        rests.append(made)
        n_tokens.append((len(talk.head), len(tokens) - len(talk.head)))
        step(f"{on}, trace")
    exam.close()
    document, decoded = (round(float(x)) for x in np.mean(n_tokens, 0))
    about = {"on": on, "talks": n, "document": document, "decoded": decoded}
    about |= {"full": stats.mean(full).to_list()}
    rows = []
    for i, (name, share) in enumerate(cells):
        mine = [each[i] for each in right]
        late = [each[-(len(each) // QUARTERS or 1) :] for each in mine]
        rows.append(about | {
            "policy": name, "share": share, "questions": sum(map(len, mine)),
            "right": stats.mean(mine).to_list(), "right_late": stats.mean(late).to_list(),
            **sizes_of([each[i] for each in rests]),
        })  # fmt: skip
    return rows


def sizes_of(made: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean bytes and choices."""
    return {
        "bytes": round(float(np.mean([each["bytes"] for each in made])), 4),
        "choices": round(float(np.mean([each["choices"] for each in made])), 1),
    }


def row_of(
    on: str, cell: tuple[str, float], mine: Sequence[Told], full: Sequence[Told]
) -> dict[str, Any]:
    """Return accuracy, also of the last quarter of the questions, and what the answers are like."""
    late = [told.right[-(len(told.right) // QUARTERS or 1) :] for told in mine]
    pairs = list(zip([t.length for t in mine], [t.length for t in full], strict=True))
    return {
        "on": on, "policy": cell[0], "share": cell[1],
        "right": stats.mean([told.right for told in mine]).to_list(),
        "right_late": stats.mean(late).to_list(),
        "length": stats.ratio([a for a, _ in pairs], [b for _, b in pairs]).to_list(),
        "tokens": round(sum(map(sum, (t.length for t in mine))) / len(mine), 1),
        "endless": round(1 - sum(map(sum, (t.ended for t in mine))) / sum(len(t.ended) for t in mine), 5),
        "bytes": round(float(np.mean([a.bytes / b.full for a, b in zip(mine, full, strict=True)])), 4),
        "choices": round(float(np.mean([t.choices for t in mine])), 1),
    }  # fmt: skip


def pages(kl: Sequence[float]) -> list[list[float]]:
    """Cut a document into ``PAGES`` stretches of tokens."""
    cuts = [round(i * len(kl) / PAGES) for i in range(PAGES + 1)]
    return [list(kl[a:b]) for a, b in itertools.pairwise(cuts)]


def measure_prose(on: str, n: int, cells: Cells, decoded: int, step: Any) -> list[dict[str, Any]]:
    """Return a row a policy and budget."""
    runner, found = Runner.load(str(WEIGHTS / on), device="cpu"), []
    for tokens in passages(runner, n, decoded):
        budgets = [(name, round(share * len(tokens))) for name, share in cells]
        found.append(forced(runner, tokens, budgets, len(tokens) - decoded))  # type: ignore[arg-type]
        step(on)
    made = []
    for i, (name, share) in enumerate(cells):
        whole = [each[i]["kl"] for each in found]
        kls = [page for kl in whole for page in pages(kl)]
        late = [page for kl in whole for page in pages(kl)[-(PAGES // QUARTERS) :]]
        made.append({
            "on": on, "policy": name, "share": share, "documents": len(whole), "decoded": decoded,
            "kl": stats.mean(kls).to_list(),
            "kl_late": stats.mean(late).to_list(),
            **sizes_of([each[i] for each in found]),
        })  # fmt: skip
    return made


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=None if Console().is_terminal else 140)
    keys = ("right", "right_late", "kl", "kl_late", "length", "endless", "bytes", "choices")
    for what in (part for part in PARTS if part in found):
        rows = found[what]["rows"]
        here = [key for key in keys if key in rows[0]]
        body = [
            [r["on"], r["policy"], r["share"], *(r[k][0] if isinstance(r[k], list) else r[k] for k in here)]
            for r in rows
        ]  # fmt: skip
        console.print(table(what, ["", "policy", "share", *here], body))


def main(given: Sequence[str] | None = None) -> None:
    """Read the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--talks", type=int, default=4, help="of each kind, and traces")
    made.add_argument("--documents", type=int, default=1, help="of each prose model")
    made.add_argument("--decoded", type=int, default=DECODED, help="tokens of prose")
    made.add_argument("--questions", type=int, default=12, help="of a talk; of P9 half as many")
    made.add_argument("--quick", action="store_true", help="one of each, three policies, a budget")
    made.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="the others stay")
    made.add_argument("--out", type=Path, default=RESULTS / "long_decode.json")
    options = made.parse_args(given)
    torch.set_num_threads(1)
    names, shares, proses, long = tuple(NAMED), SHARES, PROSE, dict(LONG)
    if options.quick:
        names, shares, proses = ("streaming", "kvzip", "flexicache"), (0.3,), PROSE[:1]
        long = dict.fromkeys(WORLD, 12)
        options.talks = options.documents = 1
        options.decoded, options.questions = min(options.decoded, 200), 4
    cells, n = list(itertools.product(names, shares)), options.talks
    about = {"machine": machine(torch.device("cpu")), "options": OPTIONS, "every": EVERY, "page": PAGE,
             "limit": LIMIT, "prompt": PROMPT, "shares": shares}  # fmt: skip
    jobs = {"talks": (*WORLD, *CHAINS), "traces": WORLD, "prose": proses}
    each = {"talks": n, "traces": n, "prose": options.documents}
    result: dict[str, Any] = {}
    with progress("long", sum(each[part] * len(jobs[part]) for part in options.parts)) as step:
        for part in options.parts:
            begun, rows = time.perf_counter(), []
            for on in jobs[part]:
                if part == "talks":
                    rows += measure_talks(on, n, cells, options.questions, step)
                elif part == "traces":
                    rows += measure_traces(on, n, cells, long[on], step)
                else:
                    rows += measure_prose(on, options.documents, cells, options.decoded, step)
            seconds = round(time.perf_counter() - begun)
            result[part] = {"rows": rows, "seconds": seconds, "machine": about["machine"]}
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    result = {**before, **about, **result}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()

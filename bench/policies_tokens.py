"""What token policies lose at a budget, what they cost, and how they go with reuse and codecs.

**Quality** (default). Every document is prefilled once, watched by all policies at the same time; then
each lets go of rows by the engine's own `Keeper`, and the expected reply is run over what is left::

    asked once     [document][question] -> choice -> reply           for each of five questions
    asked of one   [document] -> choice -> [question] -> reply       all five of one cache

What is asked of one cache stands behind the budget, not in it. The whole reply is run over what is
left, its first token too, which an answer of the engine has from before the choice. The world is the suite's (accuracy), prose is held out from the models of the bench (KL to the
full prefill): one question continues it, four quote a place in it.

**Overhead** (``--overhead``): decode time a token behind 4,096 tokens, a random model, policies in turns.

**Matrix** (``--matrix``): chunks put beforehand and coded on a tier, woven at other places with `auto`
repair under each policy, through the engine.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Shape, machine, model_pair, progress, random_ids, table
from models import prose
from rich.console import Console

import kvweave.demo
from kvweave import Engine
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.base import Need
from kvweave.keep.tokens.sizes import bytes_at
from kvweave.keep.tokens.spec import EVERY, Keep
from kvweave.run.base import Ints, LayerInfo, Rows, Work
from kvweave.run.loop import Request, new_key
from kvweave.run.model import Runner
from kvweave.run.sampling import Sampling
from kvweave.suite import stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.method import Method
from kvweave.suite.protocols import TEST, cases
from kvweave.suite.reply import Heard
from kvweave.suite.words import Paper, Question
from kvweave.weave.answer import request_from
from kvweave.weave.context import Context
from kvweave.weave.keeping import Keeper
from kvweave.weave.observers import Observers
from kvweave.weave.oracle import drive, forced

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parent / "docs" / "keep.png"
MODEL = Path(kvweave.demo.__file__).parent / "model"
WEIGHTS, CACHE = HERE / "models" / "weights", HERE / ".cache" / "policies_tokens"
SHARES = (0.1, 0.2, 0.3, 0.5)
OPTIONS = "sinks=4,window=8"  # the same for all: the questions are 6 to 9 tokens
VARIANTS = {"h2o by age": "h2o,age=true", "newest": "full"}  # beside `POLICIES`
# what rests in other forms is compared by bytes: bench/levels.py
NAMES = tuple(
    n for n, kind in POLICIES.items() if n != "full" and not kind.more and not kind.splits
)
DIVIDED = tuple(n for n, kind in POLICIES.items() if kind.more or kind.splits)
PROTOCOLS = ("P1", "P2", "P3", "P4", "P5", "P7", "P8", "P9")
PROSE = ("llama-prose", "qwen3-bytes")
SEED, ASKED = "policies_tokens", 5
DOCUMENT, GIVEN, PREDICTED = 640, 16, 24  # tokens of prose
ONCE, OF_ONE = "asked once", "asked of one"


def spec(name: str, budget: str) -> str:
    """Return what ``keep`` is given."""
    first, *rest = VARIANTS.get(name, name).split(",")
    return ",".join([f"{first}:{budget}", OPTIONS, *rest])


def asked(sampling: Sampling, rows: Rows) -> Request:
    """Return a request that asks for nothing but to decode behind ``rows``."""
    return Request(new_key(), rows, iter(()), sampling)  # type: ignore[arg-type]


class Plenty:
    """Memory without end (`kvweave.weave.room`)."""

    def reserve(self, n: int) -> None:
        """Whatever is wanted."""

    def may_take(self, n: int, info: LayerInfo) -> bool:
        """Everything may come back."""
        return True

    def below(self, layer: int, slots: Sequence[Ints], info: LayerInfo, coded: bool) -> list[Ints]:
        """Return what is to go below memory."""
        return list(slots)


class Bench:
    """A document under every policy and budget."""

    def __init__(self, exam: Exam, names: Sequence[str], shares: Sequence[float]) -> None:
        self.exam, self.runner = exam, exam.runner
        self.cells = [(name, share) for name in names for share in shares]
        self.names = names
        self._least = {name: min(shares) for name in names}

    def keeper(self, name: str, share: float) -> Keeper:
        """Return a policy at work on nothing yet."""
        return Keeper(Keep.parse(spec(name, str(share))), self.runner)

    @torch.inference_mode()
    def kept(self, tokens: np.ndarray) -> dict[tuple[str, float], Rows]:
        """Prefill ``tokens`` and let every policy choose."""
        n = len(tokens)
        watching = {name: self.keeper(name, self._least[name]) for name in self.names}
        watches = [each.observing(n) for each in watching.values()]
        both = Observers([watch for watch in watches if watch is not None])
        still = self._prefilled(tokens, False, both)
        moving = self._prefilled(tokens, True, None)
        for each in watching.values():
            self._reread(each, still, tokens)
        made = {}
        for name, share in self.cells:
            keeper = self.keeper(name, share)
            keeper.watch = deepcopy(watching[name].watch)
            rows = (moving if keeper.moves else still).clone()
            keeper.woven(rows, (), asked(Sampling(max_tokens=1), rows), Plenty())
            made[name, share] = rows
        return made

    def _reread(self, keeper: Keeper, rows: Rows, tokens: np.ndarray) -> None:
        if keeper.keep.policy.needs & Need.REPLAY:
            drive(self.runner, keeper.rereading(rows, tokens))

    def _prefilled(self, tokens: np.ndarray, moves: bool, observer: Any) -> Rows:
        n = len(tokens)
        rows, slots = self.runner.new_rows("raw", moves=moves), np.arange(n)
        rows.reserve(n)
        self.runner.forward([Work(rows, tokens, slots, slots, observer=observer)])
        return rows

    def replies(self, runs: Sequence[Rows], question: Question, is_there: bool) -> list[Heard]:
        """Return the expected reply as each of ``runs`` predicts it, whose last rows are the question
        where that ``is_there``: its last token is run again over what is left."""
        asked = question.asked[-1:] if is_there else question.asked
        ids = (*asked, *question.expected[:-1])
        each = [(rows, rows.n - is_there, ids) for rows in runs]
        return [Heard(logits[len(asked) - 1 :]) for logits in forced(self.runner, each)]

    def sit(self, paper: Paper) -> dict[str, Any]:
        """Return, by mode and cell, [right, kl] of each question, and the rows' bytes."""
        head = [*self.exam.words.head, *(t for _, tokens in paper.left() for t in tokens)]
        document, truth = np.array(head, np.int64), self.exam.truth(paper)
        scores: dict[str, dict[str, list[list[float]]]] = {ONCE: {}, OF_ONE: {}}

        def note(mode: str, made: dict[tuple[str, float], Rows], which: int) -> None:
            question = paper.questions[which]
            heard = self.replies(list(made.values()), question, mode == ONCE)
            for (name, share), reply in zip(self.cells, heard, strict=True):
                right, kl, _ = judge(question, truth[which], reply)
                scores[mode].setdefault(f"{name}:{share}", []).append([right, kl])

        for which, question in enumerate(paper.questions):
            tokens = np.concatenate([document, question.asked])
            note(ONCE, self.kept(tokens), which)
        made = self.kept(document)
        for which in range(len(paper.questions)):
            note(OF_ONE, made, which)
        full = self.exam.runner.row_bytes * len(document)
        size = {f"{n}:{s}": thin(made[n, s], self.runner) / full for n, s in self.cells}
        right = [judge(q, t, t)[0] for q, t in zip(paper.questions, truth, strict=True)]
        return {"scores": scores, "bytes": size, "full": right, "tokens": len(document)}


def thin(rows: Rows, runner: Runner) -> int:
    """Return the bytes of the rows that are there, without room for more."""
    heads = sum(info.shape.k_heads for info in runner.layers)
    row = runner.row_bytes / heads  # of one head of one layer
    moving = 1.5 if runner_moves(rows) else 1.0
    return round(moving * row * (rows.n * heads - rows.n_freed))


def runner_moves(rows: Any) -> bool:
    """Tell whether unrotated keys are kept too."""
    return rows.unrotated(0) is not None


def world(exam: Exam, protocol: str, n: int) -> Iterator[Paper]:
    """Yield cases of a protocol with five questions each; of P5 those about what was not removed."""
    size = replace(TEST, questions=(2 if protocol in ("P5", "P9") else 1) * ASKED)
    for i, made in enumerate(itertools.islice(cases(protocol, SEED, size), n)):
        paper = exam.words.paper(made, i)
        mine = tuple(q for q in paper.questions if not q.is_leak)
        yield replace(paper, notes=tuple(paper.left()), dropped=None, questions=mine)


def passages(exam: Exam, name: str, n: int) -> Iterator[Paper]:
    """Yield documents of held-out prose, spread over it: one question goes on, four quote a place."""
    texts = [text for text in prose.texts(True) if len(text) > 4000]
    step, size = max(1, len(texts) // n), GIVEN + PREDICTED
    for i, text in enumerate(texts[::step][:n]):
        tokens = exam.words.maker.tokens(text[:20_000])[: DOCUMENT + size]
        if len(tokens) < DOCUMENT + size:
            continue
        places = [DOCUMENT, *(DOCUMENT * k // ASKED for k in range(1, ASKED))]
        parts = [tokens[at : at + size] for at in places]
        questions = tuple(Question("prose", tuple(p[:GIVEN]), tuple(p[GIVEN:])) for p in parts)
        yield Paper(name, i, (("text", tuple(tokens[:DOCUMENT])),), questions)


def measure(
    n: int, n_prose: int, cache: Path, minutes: float, names: Sequence[str] = (*NAMES, *VARIANTS)
) -> dict[str, list[dict[str, Any]]]:
    """Return what each case of each protocol and prose model gave, read where it was measured before;
    what time does not suffice for is left out."""
    begun = time.perf_counter()
    found: dict[str, list[dict[str, Any]]] = {}
    jobs = [(str(MODEL), protocol) for protocol in PROTOCOLS]
    jobs += [(str(WEIGHTS / name), name) for name in PROSE]
    exams: dict[str, Exam] = {}
    with progress("cases", n * len(PROTOCOLS) + n_prose * len(PROSE)) as step:
        papers = {}
        for model, what in jobs:
            is_prose = what in PROSE
            if model not in exams:
                runner = Runner.load(model, device="cpu")
                bos = str(getattr(runner.tokenizer, "bos_token", None) or "")
                exams[model] = Exam(runner, bos if is_prose else None, evidence=False)
            exam = exams[model]
            papers[what] = (
                model, list(passages(exam, what, n_prose) if is_prose else world(exam, what, n))
            )  # fmt: skip
        most = max(len(each) for _, each in papers.values())
        for i in range(most):  # one case of each in turn, so that time is spent evenly
            for what, (model, mine) in papers.items():
                if i >= len(mine):
                    continue
                file = cache / f"{what}-{i}-{mark(mine[i], names)}.json"
                if not file.exists():
                    if time.perf_counter() - begun > 60 * minutes:
                        continue
                    result = Bench(exams[model], names, SHARES).sit(mine[i])
                    cache.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(result))
                found.setdefault(what, []).append(json.loads(file.read_text()))
                step(what)
    for exam in exams.values():
        exam.close()
    return found


def mark(paper: Paper, names: Sequence[str]) -> str:
    """Return what tells a case and what is done to it from others."""
    said = repr((paper.notes, paper.questions, [spec(n, "0") for n in names], SHARES))
    return hashlib.blake2b(said.encode(), digest_size=6).hexdigest()


def quality(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return accuracy and KL of each cell with intervals, whole cases drawn."""
    rows = []
    groups = {"world": [w for w in found if w not in PROSE]}
    groups |= {what: [what] for what in found}
    for group, whats in groups.items():
        some = [case for what in whats for case in found[what]]
        if not some:
            continue
        for mode, cell in itertools.product((ONCE, OF_ONE), some[0]["bytes"]):
            name, share = cell.rsplit(":", 1)
            scores = [case["scores"][mode][cell] for case in some]
            right = stats.mean([[s[0] for s in each] for each in scores])
            kl = stats.mean([[s[1] for s in each] for each in scores])
            rows.append({
                "on": group, "mode": mode, "policy": name, "share": float(share),
                "right": right.to_list(), "kl": kl.to_list(),
                "n": sum(map(len, scores)), "cases": len(some),
                "bytes": round(float(np.mean([case["bytes"][cell] for case in some])), 4),
            })  # fmt: skip
    full = {
        group: {
            "right": stats.mean([case["full"] for w in whats for case in found[w]]).to_list(),
            "tokens": round(float(np.mean([c["tokens"] for w in whats for c in found[w]]))),
        }
        for group, whats in groups.items()
    }
    return {"full": full, "rows": rows, "gaps": gaps(found)}


def joined(old: dict[str, Any], new: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return ``old`` with what was measured of ``names`` besides, on the same documents; where that has
    others of the old ones too, how far these came out from there at most."""
    known = {(r["on"], r["mode"], r["policy"], r["share"]): r for r in old["rows"]}
    again = [(r, known.get((r["on"], r["mode"], r["policy"], r["share"]))) for r in new["rows"]]
    both = [(r, was) for r, was in again if was is not None and r["policy"] not in names]
    whole = dict(old)
    for key in ("rows", "gaps"):
        whole[key] = [r for r in old[key] if r["policy"] not in names]
        whole[key] += [r for r in new[key] if r["policy"] in names]
    whole["besides"] = {
        "policies": list(names), "beside": sorted({r["policy"] for r, _ in both}),
        "cases": {r["on"]: r["cases"] for r in new["rows"]},
        "right_apart": max((abs(r["right"][0] - was["right"][0]) for r, was in both), default=0.0),
        "kl_apart": max((abs(r["kl"][0] / was["kl"][0] - 1) for r, was in both), default=0.0),
    }  # fmt: skip
    return whole


def gaps(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return how much is lost between asking once and asking of one cache, the same questions paired:
    accuracy in the world, KL in prose."""
    made = []
    for group, whats, at in (("world", [w for w in found if w not in PROSE], 0), *((w, [w], 1) for w in PROSE if w in found)):  # fmt: skip
        some = [case for what in whats for case in found[what]]
        for cell in some[0]["bytes"] if some else ():
            name, share = cell.rsplit(":", 1)
            both = [
                [[s[at] for s in case["scores"][mode][cell]] for case in some]
                for mode in (OF_ONE, ONCE)
            ]
            gap = stats.difference(*both).to_list()
            made.append({"on": group, "policy": name, "share": float(share), "gap": gap})
    return made


# ---- overhead


class Decoding:
    """One context that decodes on behind a prompt, in an engine of its own: a step at a time."""

    def __init__(self, runner: Runner, keep: str | None, prompt: list[int], new: int) -> None:
        self.runner, self.keep, self.most = runner, keep, 0
        self.clock: list[float] = []
        self.cpu: list[float] = []
        self.engine = Engine(runner, base="", budget="64GiB", repair="none", denoise="never")
        self.context = self.engine.context("c", keep=keep)
        self.context.append(prompt)
        begun = time.process_time()
        self.turn = self.context.begin(*request_from(new + 1, {"ignore_eos": True}))
        while not self.rows.n or not self.turn.take()[1]:
            self.engine.loop.step()
        self.first = time.process_time() - begun

    @property
    def rows(self) -> Any:
        """The rows, which a choice may replace."""
        return self.context.session.state.rows

    def step(self) -> None:
        """Decode one token."""
        clock, cpu = time.perf_counter(), time.process_time()
        self.engine.loop.step()
        self.clock.append(time.perf_counter() - clock)
        self.cpu.append(time.process_time() - cpu)
        self.most = max(self.most, self.rows.n_bytes)

    def close(self) -> None:
        """End it."""
        self.turn.cancel()
        self.engine.check_integrity()
        self.engine.close()


def overhead(tokens: int, new: int, shape: Shape, budgets: Sequence[str]) -> dict[str, Any]:
    """Measure decoding behind ``tokens`` under each policy and under none, token by token in turns.

    Ratios are those of slices of `EVERY` tokens, one choice in each, to the same slice under none.
    """
    pair = model_pair(shape, "float32", "cpu", tokens + 2 * new + 4096)
    prompt, made = random_ids(tokens, shape.vocab, 1), []
    with progress("overhead", len(budgets) * (len(POLICIES) + 1 + new)) as step:
        for budget in budgets:
            running: dict[str, Decoding] = {}
            for name in ("none", *POLICIES):
                keep = None if name == "none" else f"{name}:{budget}"
                running[name] = Decoding(pair.runner, keep, prompt, new)
                step(f"{name}:{budget}")
            for i in range(new):
                for each in running.values():
                    each.step()
                step(f"token {i}")
            base = running["none"]
            for name, each in running.items():
                made.append(costs(each, base, tokens + new) | {"policy": name, "budget": budget})
            for each in running.values():
                each.close()
    setup = {"tokens": tokens, "new": new, "every": EVERY, "shape": repr(shape)}
    return {"setup": setup, "rows": made}


def costs(mine: Decoding, base: Decoding, n: int) -> dict[str, Any]:
    """Return time a token, over none, and the most bytes over those of the budget and a page."""
    cuts = range(0, len(mine.cpu) - EVERY + 1, EVERY)
    ratio = [sum(mine.cpu[i : i + EVERY]) / sum(base.cpu[i : i + EVERY]) for i in cuts]
    clock = [sum(mine.clock[i : i + EVERY]) / sum(base.clock[i : i + EVERY]) for i in cuts]
    heads = sum(info.shape.k_heads for info in mine.runner.layers)
    found: dict[str, Any] = {
        "rows": round((mine.rows.n * heads - mine.rows.n_freed) / heads),
        "ms_per_token": round(1e3 * float(np.mean(mine.clock)), 3),
        "cpu_ms_per_token": round(1e3 * float(np.mean(mine.cpu)), 3),
        "tokens_per_s": round(1 / float(np.mean(mine.clock)), 1),
        "cpu_over_none": [round(x, 3) for x in (float(np.median(ratio)), min(ratio), max(ratio))],
        "clock_over_none": [round(x, 3) for x in (float(np.median(clock)), min(clock), max(clock))],
        "plain_step_over_none": round(float(np.median(mine.cpu) / np.median(base.cpu)), 3),
        "choice_cpu_ms": round(1e3 * max(mine.cpu), 2),
        "first_token_cpu_s": round(mine.first, 3),
        "first_token_over_none": round(mine.first / base.first, 3),
        "bytes_most": mine.most,
    }
    if mine.keep is not None:
        row, keep = mine.runner.row_bytes, Keep.parse(mine.keep)
        wide = 1.5 if keep.policy.moves else 1.0  # unrotated keys too
        infos, size = mine.runner.layers, mine.runner.dtype.itemsize
        page = bytes_at(keep, infos, n, size) + round(EVERY * row * wide)
        found |= {"bytes_budget_and_page": page, "over_page": round(mine.most / page, 4)}
    return found


# ---- matrix


class Placed(Exam):
    """An exam whose notes rest on a tier, coded, before they are woven."""

    def __init__(self, runner: Runner, home: str, tier: str, codec: str) -> None:
        super().__init__(runner, evidence=False)
        self.home, self.tier, self.codec = home, tier, codec

    def engine(self, base: bool, evict: bool = False) -> Engine:
        """Return the one engine; it has a disk."""
        if (base, evict) not in self._engines:
            self._engines[base, evict] = Engine(
                self.runner, base=self.words.system, repair="none", share=0.0, denoise="never",
                home=self.home, tiers=("disk",),
            )  # fmt: skip
        return self._engines[base, evict]

    def context(self, engine: Engine, method: Method, evict: bool = False) -> Context:
        """Open a context; the notes have been put."""
        engine.place("note/*", self.tier, codec=self.codec)  # type: ignore[arg-type]
        return super().context(engine, method, evict)

    def _ask(
        self, engine: Engine, context: Context, questions: Sequence[Question]
    ) -> Iterator[tuple[Any, Heard]]:
        """As in the suite, but rows may close up, so that the last of them is asked again."""
        twins = []
        for question in questions:
            twins.append(engine.fork(context, f"exam-{next(self._n)}"))
            twins[-1].append(question.asked)
        answers = engine.generate_many(twins, max_tokens=1)
        engine.check_integrity()
        runs = [
            (twin, twin.session.state.rows.n - 1, question.asked[-1:])
            for twin, question in zip(twins, questions, strict=True)
        ]
        yield from zip([a.plan for a in answers], self.replies(runs, questions), strict=True)
        for twin in twins:
            engine.close_context(twin.name)


FLOOR = 1e-3  # nats; below that no cell loses
CODECS = ("raw", "fp8", "int8", "int4", "step", "cachegen")
MIXED = ("P1", "P2")  # of the matrix: P2 needs repair


def matrix(n: int, share: str, repairs: Sequence[float], tier: str) -> dict[str, Any]:
    """Weave coded notes at other places under each policy; what fails is written down."""
    runner, made = Runner.load(str(MODEL), device="cpu"), []
    cells = [("none", codec) for codec in CODECS]
    cells += [(name, codec) for codec in CODECS for name in (*NAMES, *DIVIDED)]
    with progress("matrix", len(cells)) as step, tempfile.TemporaryDirectory() as home:
        for codec in CODECS:
            exam = Placed(runner, f"{home}/{codec}", tier, codec)
            papers = [(p, list(world(exam, p, n))) for p in MIXED]
            truths = {id(x): exam.truth(x) for _, each in papers for x in each}
            for (name, _), repair in itertools.product([c for c in cells if c[1] == codec], repairs):  # fmt: skip
                keep = () if name == "none" else (("keep", spec(name, share)),)
                method = Method("auto", repair, settings=keep, modes=("forget",))
                right: list[list[float]] = []
                kl: list[list[float]] = []
                error = ""
                try:
                    for _, each in papers:
                        for paper in each:
                            trials = list(exam.under(paper, method, truths[id(paper)]))
                            right.append([t.right for t in trials])
                            kl.append([t.kl for t in trials])
                            exam.clear()
                except Exception as failed:
                    error = f"{type(failed).__name__}: {failed}"
                    traceback.print_exc()
                    exam.close()
                    exam._engines.clear()
                made.append({
                    "policy": name, "codec": codec, "repair": repair, "error": error,
                    "right": stats.mean(right).to_list() if right else None,
                    "kl": stats.mean(kl).to_list() if kl else None, "n": sum(map(len, right)),
                })  # fmt: skip
                step(f"{name} {codec}")
            exam.close()
    for row in made:  # against the same policy and repair with raw chunks
        plain = next(r for r in made if (r["policy"], r["codec"], r["repair"]) == (row["policy"], "raw", row["repair"]))  # fmt: skip
        if row["kl"] and plain["kl"]:
            worse = row["kl"][1] > plain["kl"][2] + FLOOR
            row["loses"] = bool(worse or row["right"][2] < plain["right"][1])
    setup = {"protocols": MIXED, "cases": n, "budget": share, "tier": tier, "options": OPTIONS}
    return {"setup": setup, "rows": made}


# ---- figure and output


def draw(found: dict[str, Any], path: Path) -> bool:
    """Draw quality against budget; return False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = found["rows"]
    shown = [("world", "right", "accuracy")]
    shown += [(name, "kl", f"KL, {name}") for name in PROSE if name in found["full"]]
    figure = Figure(figsize=(3.6 * len(shown) + 0.6, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(shown), squeeze=False, sharey="col")
    colours = (
        "#0072B2",
        "#009E73",
        "#E69F00",
        "#CC79A7",
        "#56B4E9",
        "#D55E00",
        "#000000",
        "#8B5A2B",
    )
    for (i, mode), (j, (on, key, title)) in itertools.product(
        enumerate((ONCE, OF_ONE)), enumerate(shown)
    ):
        axes = panels[i][j]
        for k, name in enumerate([*NAMES, *VARIANTS]):
            mine = [r for r in rows if (r["on"], r["mode"], r["policy"]) == (on, mode, name)]
            mine.sort(key=lambda r: r["share"])
            x, y = [100 * r["share"] for r in mine], [max(1e-4, r[key][0]) for r in mine]
            plain = name == "random"
            axes.plot(x, y, color="#999999" if plain else colours[k % 8], marker="osD^vPX*"[k % 8],
                      markersize=3.5, linewidth=2 if plain else 1.1,
                      linestyle="-" if plain or k < 8 else "--", label=name)  # fmt: skip
        if key == "kl":
            axes.set_yscale("log")
        else:
            axes.axhline(
                found["full"][on]["right"][0], color="#777777", linestyle=":", linewidth=0.8
            )
        axes.set_title(f"{title}, {mode}", fontsize=9)
        axes.set_xticks([100 * s for s in SHARES])
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=8)
    figure.supxlabel("rows kept (%)", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    return True


def show(found: dict[str, Any]) -> None:
    """Print what there is."""
    console = Console(width=None if Console().is_terminal else 160)
    if "quality" in found:
        rows = found["quality"]["rows"]
        for on, key in (("world", "right"), *((name, "kl") for name in PROSE)):
            body = []
            for name in dict.fromkeys(r["policy"] for r in rows):
                mine = {
                    (r["mode"], r["share"]): r for r in rows if (r["policy"], r["on"]) == (name, on)
                }
                if mine:
                    body.append(
                        [name, *(mine[m, s][key][0] for m in (ONCE, OF_ONE) for s in SHARES)]
                    )
            head = [key, *(f"{m[6:]} {s:.0%}" for m in (ONCE, OF_ONE) for s in SHARES)]
            console.print(table(on, head, body))
    if "overhead" in found:
        body = [
            [r["policy"], r["budget"], r["rows"], r["ms_per_token"], r["cpu_ms_per_token"],
             r["cpu_over_none"][0], r["plain_step_over_none"], r["choice_cpu_ms"],
             r["first_token_over_none"], r.get("over_page", "")]
            for r in found["overhead"]["rows"]
        ]  # fmt: skip
        head = ["policy", "budget", "rows", "ms", "cpu ms", "over none", "no choice", "choice ms",
                "first token", "bytes over budget + page"]  # fmt: skip
        console.print(table("overhead", head, body))
    if "matrix" in found:
        body = [[r["policy"], r["codec"], r["repair"], *(x[0] if x else "" for x in (r["right"], r["kl"])), "loses" if r.get("loses") else "", r["error"][:60]] for r in found["matrix"]["rows"]]  # fmt: skip
        console.print(
            table("matrix", ["policy", "codec", "repair", "right", "KL", "", "error"], body)
        )


def main() -> None:
    """Read the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--overhead", action="store_true")
    made.add_argument("--matrix", action="store_true")
    made.add_argument("--n", type=int, default=8, help="cases of a protocol, five questions each")
    made.add_argument("--prose", type=int, default=16, help="documents of a prose model")
    made.add_argument("--minutes", type=float, default=math.inf, help="begin no case after that")
    made.add_argument(
        "--policies", default="", help="measure these alone, and --add some to what is there"
    )
    made.add_argument("--add", default="", help="those of --policies that are put into the table")
    made.add_argument("--context", type=int, default=4096)
    made.add_argument("--new", type=int, default=256, help="tokens decoded")
    made.add_argument("--cases", type=int, default=2, help="of the matrix")
    made.add_argument("--cache", type=Path, default=CACHE)
    made.add_argument("--out", type=Path, default=RESULTS / "policies_tokens.json")
    options = made.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    here = machine(torch.device("cpu"))
    found["machine"] = found.get("machine", here)  # of the quality; the others name their own
    found["setup"] = {"options": OPTIONS, "shares": SHARES, "asked": ASKED}
    if options.overhead:
        shape = Shape(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1408)
        budgets = (str(options.context - 96), "0.3")
        found["overhead"] = overhead(options.context, options.new, shape, budgets)
        found["overhead"]["machine"] = here
    if options.matrix:
        found["matrix"] = matrix(options.cases, "0.3", (0.15,), "disk") | {"machine": here}
    if not (options.overhead or options.matrix):
        names = options.policies.split(",") if options.policies else [*NAMES, *VARIANTS]
        made_now = quality(measure(options.n, options.prose, options.cache, options.minutes, names))
        if options.policies:
            some = [n for n in names if n in options.add.split(",")]
            found["quality"] = joined(found["quality"], made_now, some)
            found["quality"]["besides"]["machine"] = here
        else:
            found["machine"], found["quality"] = here, made_now
        draw(
            found["quality"],
            FIGURE if options.out.parent == RESULTS else options.out.with_suffix(".png"),
        )
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()

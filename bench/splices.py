"""What real splices of a long text cost on models of prose: KL to a full prefill against the share repaired.

Held-out documentation and source stand behind a system message in chunks of 128 tokens, all exact.
Then one thing is done, and the text goes on: 16 tokens are asked, 48 predicted::

    [system][c0] ... [c7] ... [cN]  16 asked, 48 predicted
                    `- deleted        a chunk in the middle goes
            [c4..c7] <-> [c8..c11]    swapped: the second and the third quarter change places
    `- another one                    system

Every method begins from a copy of the same rows and repairs its share of those that are not exact now.
Each document is a case; of one the splices and methods are paired.
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
from models.prose import texts
from models.worlds import BOS
from regret import WEIGHTS
from rich.table import Table

from kvweave import Context, Engine
from kvweave.run.model import Runner
from kvweave.suite import plot, stats
from kvweave.suite.exam import Exam, judge
from kvweave.suite.words import Question

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "splices.png"
MODELS = ("llama-prose", "qwen3-bytes")
SIZES, DOCUMENTS = (512, 2048, 7808), 24  # tokens behind the system message
CHUNK, SYSTEM, GIVEN, TOLD = 128, 96, 16, 48  # tokens
METHODS: tuple[tuple[str, float], ...] = (
    ("none", 0.0), ("first_k", 0.05), ("query", 0.05), ("auto", 0.02), ("auto", 0.05), ("auto", 0.1),
    ("auto", 0.15), ("auto", 0.3),
)  # fmt: skip
SPLICES = ("deleted", "swapped", "system")
Tokens = tuple[int, ...]


def documents(
    exam: Exam, n_tokens: int, n: int
) -> Iterator[tuple[Tokens, Tokens, list[Tokens], Question]]:
    """Yield two system messages, the chunks and the question of ``n`` documents, each of another text;
    fewer where there are not so many that long."""
    maker, size = exam.words.maker, n_tokens + 2 * SYSTEM + GIVEN + TOLD
    found = 0
    for text in texts(True):
        if found == n:
            return
        if len(text) < size:  # a token is a character at least
            continue
        tokens = maker.tokens(text[: 12 * size])
        if len(tokens) < size:
            continue
        found += 1
        start = (len(tokens) - size) // 2
        cut = [tuple(tokens[start + a : start + b]) for a, b in ((0, SYSTEM), (SYSTEM, 2 * SYSTEM))]
        begin = start + 2 * SYSTEM
        chunks = [tuple(tokens[i : i + CHUNK]) for i in range(begin, begin + n_tokens, CHUNK)]
        end = begin + n_tokens
        asked = Question("prose", tuple(tokens[end : end + GIVEN]), tuple(tokens[end + GIVEN : end + GIVEN + TOLD]))  # fmt: skip
        yield cut[0], cut[1], chunks, asked


def spliced(how: str, system: Tokens, other: Tokens, chunks: Sequence[Tokens]) -> list[Tokens]:
    """Return what stands there after a splice: reckoned here, so that the engine's edits are compared with it."""
    n = len(chunks)
    quarter, half = n // 4, n // 2
    if how == "deleted":
        return [system, *chunks[:half], *chunks[half + 1 :]]
    if how == "swapped":
        second, third = chunks[quarter:half], chunks[half : 2 * half - quarter]
        return [system, *chunks[:quarter], *third, *second, *chunks[2 * half - quarter :]]
    return [other, *chunks]


def splice(context: Context, how: str, other: Tokens, n: int) -> None:
    """Do that to a context of a system message and ``n`` chunks."""
    quarter, half = n // 4, n // 2
    if how == "deleted":
        context.drop(1 + half)
    elif how == "swapped":
        order = [*range(quarter), *range(half, 2 * half - quarter), *range(quarter, half), *range(2 * half - quarter, n)]  # fmt: skip
        context.reorder([0, *(1 + i for i in order)])
    else:
        context.replace(0, other, kind="system")


def of_document(engine: Engine, exam: Exam, system: Tokens, other: Tokens, chunks: Sequence[Tokens],
                asked: Question) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the trials of one document."""
    whole = engine.context("whole", repair="full")
    whole.append(system, kind="system")
    for i, chunk in enumerate(chunks):
        engine.put(f"text/{i}", chunk)
        whole.append_chunk(f"text/{i}")
    whole.weave()
    for how in SPLICES:
        flat = [t for part in spliced(how, system, other, chunks) for t in part]
        truth = exam.oracle(flat, [asked])[0]
        for name, share in METHODS:
            twin = engine.fork(whole, "twin")
            splice(twin, how, other, len(chunks))
            twin.append(asked.asked)
            plan = twin.weave(repair=name, share=share)
            if [int(t) for t in twin.tokens()] != [*flat, *asked.asked]:
                raise AssertionError(f"{how}: another text stands there")
            reply = exam.replies([(twin, twin.n_tokens - 1, asked.asked[-1:])], [asked])[0]
            right, kl, nll = judge(asked, truth, reply)
            yield {
                "splice": how, "method": name, "share": share, "kl": kl, "right": right, "nll": nll,
                "full_nll": judge(asked, truth, truth)[2], "rows": plan.repaired / len(flat),
            }  # fmt: skip
            engine.close_context("twin")
    engine.close_context("whole")
    engine.files.rm("text/*")


def of_model(name: str, sizes: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the trials of one model."""
    runner = Runner.load(str(WEIGHTS / name), dtype="float32", device="cpu")  # rounding is no drift
    exam = Exam(runner, BOS, evidence=False)
    with Engine(runner, base="", denoise="never") as engine:
        for size, n in sizes.items():
            for case, document in enumerate(documents(exam, size, n)):
                about = {"model": name, "size": size, "case": case}
                yield from (about | trial for trial in of_document(engine, exam, *document))
    exam.close()


def summed(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a model, size, splice and method: KL with its interval, and how much of what was lost
    without repair is left."""
    keys = ("model", "size", "splice", "method", "share")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for t in trials:
        groups.setdefault(tuple(t[key] for key in keys), []).append(t)
    made = []
    for group, mine in groups.items():
        kl = [[t["kl"]] for t in mine]
        none = [[t["kl"]] for t in groups[*group[:3], "none", 0.0]]
        made.append(dict(zip(keys, group, strict=True)) | {
            "n": len(mine), "kl": stats.mean(kl).to_list(), "left": stats.ratio(kl, none).to_list(),
            **{key: float(np.mean([t[key] for t in mine])) for key in ("right", "nll", "full_nll", "rows")},
        })  # fmt: skip
    return made


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table a model."""
    head = ("size", "splice", "method", "n", "KL", "from", "to", "left of none", "rows")
    return [
        table(model, head, [
            [r["size"], r["splice"], f"{r['method']} {r['share']:.0%}", r["n"], *r["kl"], r["left"][0], f"{r['rows']:.1%}"]
            for r in rows if r["model"] == model
        ])
        for model in dict.fromkeys(r["model"] for r in rows)
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw KL against the share, a panel a model and size; return False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    models, sizes = (list(dict.fromkeys(r[key] for r in rows)) for key in ("model", "size"))
    figure = Figure(figsize=(3 * len(sizes) + 1, 2.6 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(sizes), squeeze=False, sharex=True)
    for (i, model), (j, size) in itertools.product(enumerate(models), enumerate(sizes)):
        axes = panels[i, j]
        for k, how in enumerate(SPLICES):
            mine = [r for r in rows if (r["model"], r["size"], r["splice"]) == (model, size, how)]
            ours = sorted((r["share"], *r["kl"]) for r in mine if r["method"] in ("none", "auto"))
            share, kl, low, high = (np.array(column) for column in zip(*ours, strict=True))
            look = {"color": plot.COLOURS[k], "marker": plot.MARKERS[k], "markersize": 3}
            axes.errorbar(100 * share + 0.3 * (k - 1), kl, [kl - low, high - kl], label=how, capsize=2, linewidth=1, **look)  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_title(f"{model}, {size:,} tokens", fontsize=9)
        axes.tick_params(labelsize=7)
    figure.supxlabel("repaired by auto, of the rows that are not exact (%)", fontsize=9)
    figure.supylabel("KL to a full prefill (nats)", fontsize=9)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(SPLICES), fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=110)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=list(SIZES), help="tokens of a text"
    )
    parser.add_argument("--n", type=int, default=DOCUMENTS, help="documents of each size")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, here = time.perf_counter(), machine(torch.device("cpu"))
    sizes = dict.fromkeys(options.sizes, options.n)
    trials: list[dict[str, Any]] = []
    of_one = len(SPLICES) * len(METHODS)
    with progress("documents", len(options.models) * sum(sizes.values())) as advance:
        for name in options.models:
            for trial in of_model(name, sizes):
                trials.append(trial)
                if len(trials) % of_one == 0:
                    advance(f"{name}, {trial['size']} tokens")
    rows = summed(trials)
    result = {"rows": rows, "seconds": round(time.perf_counter() - started, 1), "machine": here}
    report(result, tables(rows), options, "splices")
    draw(rows, FIGURE if options.out is None else options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

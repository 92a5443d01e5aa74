"""Is the audited bound of the drift kept in every cell, is a shift seen, and what do audits cost?

On the bundled model. Each question of the fidelity suite's protocols is asked in a context of its
notes, one of which was dropped, and every answer is audited. Then promises are made and held against
the drifts, one after the other: in random orders, as a server samples its answers, and in the order
they were asked, in which all questions of a case follow one another. A bound counts where it was
promised before its audit was seen::

    cells     strategy x codec of the chunks at rest x what was done with the dropped note
    shifts    the drifts of one cell, in many orders, then those of other text (prose, or questions
              behind prose), or of another revision of the model over KV of the old one
    cost      answers with audits for 1 % of the time, beside answers without, once nothing is new: before, up to
              `shadow.EARLY` audits are made whenever there is rest, at the price of one
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import RESULTS, machine, median, progress, report, table
from rich.table import Table

from kvweave import Engine
from kvweave.run.mapped import SharedWeights
from kvweave.run.model import Runner
from kvweave.run.sampling import Sampling
from kvweave.suite.exam import Exam
from kvweave.suite.prose import papers
from kvweave.suite.protocols import cases
from kvweave.suite.words import Paper
from kvweave.weave import shadow
from kvweave.weave.audit import AuditedCell, Auditor

MODEL = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
STRATEGIES = (("none", 0.0), ("query", 0.05), ("auto", 0.05))
CODECS = ("raw", "int4")
POLICIES = ("forget", "evict")
PROTOCOLS = ("P1", "P3", "P5")
TOKENS = 8  # of an answer
ORDERS = 200  # of the drifts before and after a shift
NOISE = 0.2  # of a weight's standard deviation, added to make another revision
SEED = "audit"


def world(exam: Exam, n: int) -> list[Paper]:
    """Return cases of several protocols, in one random order."""
    each = -(-n // len(PROTOCOLS))
    made = [
        exam.words.paper(case, i)
        for name in PROTOCOLS
        for i, case in enumerate(itertools.islice(cases(name, SEED), each))
    ]
    random.Random(SEED).shuffle(made)
    return made[:n]


def answers(
    engine: Engine, runs: Sequence[Paper], policy: str, codec: str, longest: int = TOKENS
) -> Iterator[tuple[Any, float]]:
    """Ask every question of these cases; yield each answer and its seconds."""
    for number, paper in enumerate(runs):
        names = [f"{number}/{name}" for name, _ in paper.notes]
        engine.put_many(zip(names, (tokens for _, tokens in paper.notes), strict=True))
        if codec != "raw":
            engine.place(f"{number}/**", "disk", codec=codec)
        context = engine.context(f"case/{number}", prune=policy)
        with context.edit():
            for name in names:
                context.append_chunk(name)
        context.weave()
        gone = len(context.parts) - len(names) + (paper.dropped or len(names) // 2)
        context.drop(gone)
        for i, question in enumerate(paper.questions):
            twin = engine.fork(context, f"case/{number}/{i}")
            twin.append(list(question.asked))
            started = time.perf_counter()
            answer = twin.begin(Sampling(max_tokens=longest, ignore_eos=True)).run()
            yield answer, time.perf_counter() - started
            engine.close_context(twin.name)
        engine.close_context(context.name)
        engine.files.rm(f"{number}/**")


def opened(runner: Runner, exam: Exam, strategy: tuple[str, float], **options: Any) -> Engine:
    """Open an engine whose base is the suite's system message."""
    name, share = strategy
    base = exam.words.system
    return Engine(
        runner, base=base, repair=name, share=share, denoise="never", **({"audit": 1.0} | options)
    )


def cell(
    runner: Runner, exam: Exam, runs: Sequence[Paper], how: tuple[tuple[str, float], str, str]
) -> list[float]:
    """Return the drifts of all answers of one cell."""
    strategy, codec, policy = how
    with (
        tempfile.TemporaryDirectory() as home,
        opened(runner, exam, strategy, home=home if codec != "raw" else None) as engine,
    ):
        found: list[float] = []
        for _ in answers(engine, runs, policy, codec):
            found += [audit.drift for audit in engine.audit()]
            assert engine.shadow.auditor.n_failed == 0
            engine.shadow.auditor = Auditor()  # no alarm: what is asked is what is answered
        return found


def replay(drifts: Sequence[float]) -> tuple[int, int, int, float | None]:
    """Promise and audit in this order; return promises, misses, alarms and the last bound."""
    known = AuditedCell()
    for drift in drifts:
        known.saw(float(drift), known.bound())
    return known.n_promised, known.n_missed, known.n_alarms, known.bound()


def rounded(drifts: Sequence[float]) -> list[float]:
    """Return them with three digits: other rules can be tried on them without asking again."""
    return [float(f"{drift:.3g}") for drift in drifts]


def kept(drifts: Sequence[float]) -> dict[str, Any]:
    """Return how often what was promised was kept."""
    runs = [replay(np.random.default_rng(i).permutation(drifts)) for i in range(ORDERS)]
    coverage = [1 - missed / n for n, missed, *_ in runs if n]
    n, missed, alarms, bound = replay(drifts)
    return {
        "audits": len(drifts),
        "promised": float(np.mean([n for n, *_ in runs])),
        "coverage": float(np.mean(coverage)),
        "coverage_5th": float(np.quantile(coverage, 0.05)),
        "alarms": float(np.mean([each[2] for each in runs])),
        "drift": median(drifts),
        "drift_95": float(np.quantile(drifts, 0.95)),
        "bound": median([each[3] for each in runs if each[3] is not None]),
        "as_asked": {
            "promised": n,
            "coverage": 1 - missed / n if n else None,
            "alarms": alarms,
            "bound": bound,
            "drifts": rounded(drifts),
        },
    }


def shift(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return when an alarm comes after a shift, over many orders: audits, and how often in 20."""
    late, early, times = 0, 0, []
    under: list[float] = []
    for i in range(ORDERS):
        order, known = np.random.default_rng(i), AuditedCell()
        for drift in order.permutation(before):
            known.saw(float(drift), known.bound())
        early += known.n_alarms > 0
        n, bound = known.n_alarms, known.bound()
        under += [] if bound is None else [float(np.mean(np.array(after) <= bound))]
        for at, drift in enumerate(order.permutation(after)[:20], 1):
            known.saw(float(drift), known.bound())
            if known.n_alarms > n:
                times.append(at)
                break
        else:
            late += 1
    return {
        "orders": ORDERS,
        "within_20": 1 - late / ORDERS,
        "audits_to_alarm": median(times) if times else None,
        "most": max(times, default=None),
        "before": early / ORDERS,
        "under_old_bound": float(np.mean(under)) if under else None,
        "drift_before": median(before),
        "drift_after": median(after),
        "drifts_after": rounded(after),
    }


def noisy(runner: Runner, amount: float) -> None:
    """Change the weights a little: another revision behind the same fingerprint. An engine notices that (`mapped`),
    so what would is made anew."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            if parameter.dim() > 1:
                parameter += (
                    amount * parameter.std() * torch.randn(parameter.shape, generator=generator)
                )
    runner._weights = SharedWeights(runner.model, str(MODEL))


def revised(exam: Exam, runs: Sequence[Paper], strategy: tuple[str, float]) -> list[float]:
    """Return drifts of answers over KV that the revision before has stored."""
    runner = Runner.load(str(MODEL))
    with opened(runner, exam, strategy) as engine:
        stored: dict[int, Any] = {}
        for number, paper in enumerate(runs):
            for name, tokens in paper.notes:
                engine.put(f"{number}/{name}", tokens)
        noisy(runner, NOISE)
        for number, paper in enumerate(runs):
            context = engine.context(f"case/{number}")
            with context.edit():
                for name, _ in paper.notes:
                    context.append_chunk(f"{number}/{name}")
            context.append(list(paper.questions[0].asked))
            context.generate(TOKENS, ignore_eos=True)
            stored[number] = engine.audit()
            engine.close_context(context.name)
        return [audit.drift for audits in stored.values() for audit in audits]


@mock.patch.object(shadow, "EARLY", 0)
def cost(runner: Runner, exam: Exam, runs: Sequence[Paper]) -> dict[str, Any]:
    """Return what audits for 1 % of the time cost, beside a server that makes none."""
    took: dict[float, list[float]] = {0.0: [], 0.01: []}
    engines = {share: opened(runner, exam, ("auto", 0.05), audit=share) for share in took}
    n_audits = 0
    streams = {s: answers(e, runs, "forget", "raw", 24) for s, e in engines.items()}
    for pair in zip(
        *streams.values(), strict=True
    ):  # one after the other, so that both see the same
        for share, (_, seconds) in zip(took, pair, strict=True):
            took[share].append(seconds)
        engine = engines[0.01]
        while engine.shadow.is_due(engine.loop):
            n_audits += len(engine.audit())
    loop = engines[0.01].loop
    made = {
        "answers": len(took[0.0]),
        "audits": n_audits,
        "share": loop.seconds["audit"] / loop.seconds[""],
        "answers_an_audit": loop.seconds["audit"] / n_audits / (loop.seconds[""] / len(took[0.0])),
        "seconds": {str(s): median(t) for s, t in took.items()},
        "p99": {str(s): float(np.quantile(t, 0.99)) for s, t in took.items()},
    }
    for engine in engines.values():
        engine.close()
    return made


def run(n: int, workers: Sequence[tuple[tuple[str, float], str, str]]) -> dict[str, Any]:
    """Return all figures, of ``n`` cases a cell."""
    runner = Runner.load(str(MODEL))
    exam = Exam(runner)
    runs = world(exam, n)
    prose = list(papers(exam.words.maker, 2 * n))
    cells: list[dict[str, Any]] = []
    drifts: dict[tuple[tuple[str, float], str, str], list[float]] = {}
    with progress("cells", len(workers) + 3) as advance:
        for how in workers:
            strategy, codec, policy = how
            drifts[how] = cell(runner, exam, runs, how)
            name = f"{strategy[0]} {strategy[1]:.0%}"
            cells.append({"strategy": name, "codec": codec, "policy": policy} | kept(drifts[how]))
            advance("shifts")
        first = (STRATEGIES[1], "raw", "forget")
        usual = drifts.get(first) or cell(runner, exam, runs, first)
        other = cell(runner, exam, prose, first)
        advance("shifts")
        changed = revised(exam, runs[: max(20, n // 2)], first[0])
        advance("cost")
        found = {
            "cells": cells,
            "shifts": {
                "world to prose": shift(usual, other),
                "prose to world": shift(other, usual),
                "another revision": shift(usual, changed),
            },
            "cost": cost(runner, exam, world(exam, 3 * n)),
        }
        advance("")
    exam.close()
    return found


def again(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with promises and alarms as they would be now, for the same drifts."""
    told = [(cell, cell["as_asked"]["drifts"]) for cell in result["cells"]]
    names = ("strategy", "codec", "policy")
    cells = [{name: cell[name] for name in names} | kept(drifts) for cell, drifts in told]
    first = ("query 5%", "raw", "forget")
    usual = next(drifts for cell, drifts in told if tuple(cell[n] for n in names) == first)
    after = {name: each["drifts_after"] for name, each in result["shifts"].items()}
    before = {"prose to world": after["world to prose"]}
    shifts = {name: shift(before.get(name, usual), drifts) for name, drifts in after.items()}
    return result | {"cells": cells, "shifts": shifts}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the figures as tables."""
    head = (
        "strategy",
        "codec",
        "policy",
        "audits",
        "promised",
        "coverage",
        "as asked",
        "drift",
        "bound",
    )
    cells = [
        [
            *(c[key] for key in head[:5]),
            f"{c['coverage']:.1%}",
            f"{c['as_asked']['coverage'] or 0:.1%}",
            c["drift"],
            c["bound"],
        ]
        for c in found["cells"]
    ]
    shifts = [
        [
            name,
            f"{s['within_20']:.1%}",
            s["audits_to_alarm"],
            s["most"],
            f"{s['before']:.1%}",
            f"{s['under_old_bound'] or 0:.1%}",
        ]
        for name, s in found["shifts"].items()
    ]
    cost = found["cost"]
    return [
        table("cells", head, cells),
        table("shifts", ("shift", "alarm in 20", "median", "most", "before", "under old bound"), shifts),
        table("cost", ("share of the time", "answers", "audits", "answers that an audit takes as long as"), [
            [f"{cost['share']:.2%}", cost["answers"], cost["audits"], f"{cost['answers_an_audit']:.1f}"]
        ]),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=60, help="cases of a cell, four questions each")
    parser.add_argument("--again", action="store_true", help="the last drifts, by today's rules")
    parser.add_argument(
        "--quick", action="store_true", help="one cell of few cases, for a smoke test"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    here = machine(torch.device("cpu"))
    every = list(itertools.product(STRATEGIES, CODECS, POLICIES))
    if options.again:
        known = json.loads((options.out or RESULTS / "audit.json").read_text())
        result = again(known)
        report(result, tables(result), options, "audit")
        return
    started = time.perf_counter()
    found = run(8, every[4:5]) if options.quick else run(options.n, every)
    result = found | {
        "setup": {"cases": 8 if options.quick else options.n, "tokens": TOKENS, "orders": ORDERS},
        "seconds": round(time.perf_counter() - started, 1),
        "machine": here,
    }
    report(result, tables(result), options, "audit")


if __name__ == "__main__":
    main()

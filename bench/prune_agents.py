"""What do agents' edits of their own histories cost, and what is lost by not computing all anew?

Runs of agents are replayed under the editing rules of real ones. ``count``: what no reuse, a prefix cache
and kvweave compute, over all runs. ``time``: seconds to the first token after edits, with KV of a random
model. ``ahead``: these of a request that brings an edit to a server that knew the rule.
``learned``: to one that had to learn it. ``drift``: KL and first choices against a full prefill of the edited prompt, on models that can
be asked. Public runs are fetched and converted first (`pruning/convert.py`); without ``--traces``
generated ones stand in, which have no text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, model_pair, parser, progress, report, shape_of, table
from models.worlds import BOS
from pruning import ahead, count, drift, figure, foresight, learned, timed, tokens, trace
from pruning.rules import RULES
from rich.table import Table

from kvweave.run.model import Runner
from kvweave.suite.exam import Exam

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "src" / "kvweave" / "demo" / "model"
PARTS = ("count", "time", "ahead", "learned", "drift")
LATER = ("auto", "again", "rested", "ahead")  # the request that edits, and what comes behind it
PROSE = "llama-prose"
FRONT = 5700  # tokens of tools and rules that opencode sends in front of all


def counts(options: argparse.Namespace, runs: list[trace.AgentRun]) -> dict[str, Any]:
    """Count over all runs, as they are and with an agent's tools in front."""
    found = foresight.learned(runs)
    fronts = {"as they are": 0, "with tools": FRONT}
    return {how: count.counted(runs, found, front) for how, front in fronts.items()}


def times(options: argparse.Namespace, runs: list[trace.AgentRun]) -> dict[str, Any]:
    """Measure some events of each rule, interleaved: the first of every rule, then the second."""
    pair = model_pair(shape_of(options), options.dtype, options.device, 8 * options.context)
    bench = timed.TimedEvents(pair, options.context)
    by_rule = [timed.chosen(runs, options.rounds, [name]) for name in list(RULES)[1:]]
    events = [e for some in zip(*by_rule, strict=True) for e in some]
    found = []
    with progress("time", len(events)) as step:
        bench.of(events[0])  # warms up
        for event in events:
            found.append(bench.of(event))
            step(event.rule)
    load = [round(x, 2) for x in os.getloadavg()]
    return {
        "context": options.context,
        "events": found,
        "rules": timed.summed(found),
        "load_at_end": load,
    }


def foreseen(options: argparse.Namespace, runs: list[trace.AgentRun]) -> dict[str, Any]:
    """Measure requests of a server whose edits were made ahead."""
    shape = shape_of(options)
    shape = replace(shape, vocab=max(shape.vocab, len(ahead.words_and_marks())))
    pair = model_pair(shape, options.dtype, options.device, 8 * options.context)
    with progress("ahead", options.rounds) as step:
        found = ahead.measured(pair, options.context, options.rounds, step)
    return found | {"load_at_end": [round(x, 2) for x in os.getloadavg()]}


def unasked(options: argparse.Namespace, runs: list[trace.AgentRun]) -> dict[str, Any]:
    """Measure requests of a server that learned the rule by which its client edits."""
    shape = shape_of(options)
    shape = replace(shape, vocab=max(shape.vocab, len(ahead.words_and_marks())))
    pair = model_pair(shape, options.dtype, options.device, 8 * options.context)
    with progress("learned", options.rounds * len(learned.EDITS)) as step:
        found = learned.measured_learned(pair, options.context, options.rounds, step)
    return found | {"load_at_end": [round(x, 2) for x in os.getloadavg()]}


def drifts(options: argparse.Namespace, runs: list[trace.AgentRun]) -> dict[str, Any]:
    """Ask the bundled model about runs of its world, and a model of prose about text of the runs."""
    n, steps = options.runs, options.steps
    texts = [r for r in runs if all(m.text for m in r.messages) and len(r.asked) >= steps]
    some = texts[:: max(1, len(texts) // n)][:n]
    found: dict[str, Any] = {}
    with progress("drift", (n + len(some)) * len(RULES)) as step:
        exam = asking(BUNDLED)
        made = list(tokens.made_runs(exam, n, 0, steps))
        found["world"] = asked(exam, made, steps, step)
        if some:
            exam = asking(HERE / "models" / "weights" / PROSE, BOS)
            made = list(tokens.text_runs(exam, some, steps, options.text))
            found["text"] = asked(exam, made, drift.MEASURED, step)
    return found


def asking(path: Path, system: str | None = None) -> Exam:
    """Return what asks a model, in float32: half of it is as coarse as some KLs are."""
    runner = Runner.load(str(path), device="cpu", dtype="float32")
    return Exam(runner, system, evidence=False)


def asked(
    exam: Exam, runs: list[tokens.AskedRun], most: int, step: Callable[[str], None]
) -> dict[str, Any]:
    """Return what came of some runs, of each of which at most so many requests are measured."""
    start = time.process_time()
    rows = drift.summed(drift.drifts(exam, runs, step, most))
    exam.close()
    return {
        "tokens": [sum(map(len, run.said)) for run in runs], "requests": [len(run.questions) for run in runs],
        "cpu_seconds": round(time.process_time() - start), "rows": rows,
    }  # fmt: skip


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    made = []
    for setup, found in result.get("count", {}).items():
        rows = [
            (rule, f["sent"], *f["computed"].values(), f["price"]["prefix"], f["price"]["auto"], f["dearer_runs"]["auto"])
            for rule, f in found["rules"].items()
        ]  # fmt: skip
        head = ("rule", "sent", "no reuse", "prefix", "none", "auto", "15 %", "less", "rested", "learned", "price prefix", "price auto", "dearer")  # fmt: skip
        made.append(table(f"computed, of no edits with a prefix cache; {setup}", head, rows))
    if "time" in result:
        rows = [
            (rule, f["n"], *(f["cpu_of_full"][w] for w in ("prefix", "none", "auto")), *(f["cpu_of_unedited"][w] for w in LATER))
            for rule, f in result["time"]["rules"].items()
        ]  # fmt: skip
        made.append(table("CPU seconds to the first token, of a full prefill; auto of no edit", ("rule", "n", "prefix", "none", "auto", *(f"{w} / unedited" for w in LATER)), rows))  # fmt: skip
    if "ahead" in result:
        rows = [(way, *found, *result["ahead"]["seconds_of_unedited"][way]) for way, found in result["ahead"]["cpu_of_unedited"].items()]  # fmt: skip
        head = ("way", "CPU", "from", "to", "clock", "from", "to")
        made.append(table("seconds to the first token, of not editing, by a server", head, rows))
    if "learned" in result:
        rows = [
            (rule, f"{f['foreseen']}/{f['n']}", *f["cpu_of_unedited"]["asked"], *f["cpu_of_unedited"]["learned"])
            for rule, f in result["learned"]["rules"].items()
        ]  # fmt: skip
        head = ("rule", "foreseen", "asked", "from", "to", "learned", "from", "to")
        made.append(table("CPU seconds to the first token, of not editing, by a server that learns", head, rows))  # fmt: skip
    for world, found in result.get("drift", {}).items():
        rows = [(r["rule"], r["way"], r["n"], r["moved"][0], *r["kl"], r["top1"][0], r["lost"][0], r["late"] and r["late"][0], r["right"], r["full"]) for r in found["rows"]]  # fmt: skip
        head = ("rule", "way", "n", "edit", "KL", "from", "to", "top 1", "lost", "late", "right", "full")  # fmt: skip
        made.append(table(world, head, rows))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for, keep the others, and write the result."""
    options_of = parser(__doc__, threads=1, context=2560)
    options_of.add_argument("--traces", type=Path, help="a folder of JSONL")
    options_of.add_argument("--limit", type=int, help="so many runs at most")
    options_of.add_argument("--parts", default=",".join(PARTS))
    options_of.add_argument("--runs", type=int, default=6, help="of each kind, for drift")
    options_of.add_argument("--steps", type=int, default=28, help="requests of these")
    options_of.add_argument("--text", type=int, default=2000, help="tokens of text of these")
    options = options_of.parse_args(argv)
    torch.set_num_threads(options.threads)
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        options_of.error(f"--parts: {', '.join(PARTS)}")
    if options.traces is None:
        runs = list(trace.generated(options.limit or 40))
    else:
        runs = list(trace.read(options.traces, options.limit))
    out = options.out or RESULTS / "prune_agents.json"
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    measures = {
        "count": counts,
        "time": times,
        "ahead": foreseen,
        "learned": unasked,
        "drift": drifts,
    }
    for part in parts:
        here = machine(torch.device(options.device))
        result = {"machine": here} | result | {part: measures[part](options, runs)}
        here["traces"] = "generated" if options.traces is None else "public"
        result.setdefault("machines", {})[part] = here
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    if "count" in parts:
        drawn = out.with_suffix(".png") if options.out else HERE.parent / "docs" / "prune-bench.png"
        figure.draw(result, drawn)
    report(result, tables(result), options, "prune_agents")


if __name__ == "__main__":
    main()

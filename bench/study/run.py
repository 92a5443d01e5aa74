"""The study: how chains of thought use their KV, asked of models whose every step's needs are known.

cd bench; python -m study.run                   # an hour on two cores; the same command resumes traces
python -m study.run --parts predict --traces 2  # one part again, beside what the others found
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine, progress

from kvweave.engine import Engine
from kvweave.keep.tokens.signals import Weights
from kvweave.probe import Eviction, PageTrace, ablate, recall
from kvweave.probe.cost import miss_cost
from kvweave.probe.findings import find
from kvweave.probe.heads import rank_overlap, stability
from kvweave.probe.milestone import Milestone
from kvweave.probe.tiers import Setting, SlowTier, play
from study import learn
from study.record import record_all, where
from study.score import ONLY, WORDS, models, opened, score
from study.tasks import FAMILIES

SIMPLE = ("newest", "recent", "cumulative", "ema", "recurrence", "stability", "random", "oracle")
WEIGHED = ("newest", "recent", "cumulative", "ema", "random", "oracle")
MARKED = ("program", "search", "verify")  # chains that have milestones
AT = (0.4, 0.6)  # where pages are taken away
TIER = SlowTier("slow", 0.5e9, 20e-6)  # a page of a head in the time of a step, about
SETTING = Setting(page_bytes=8 * 2 * 64 * 4, decode=2e-3, ahead=True)
QUANTILES = ("0.5", "0.9", "0.99")  # of stack distances
Tick = Callable[[str], None]


def each(n: int) -> list[tuple[str, str, int]]:
    """Return (model, family, number) of all traces."""
    return [(m, f, i) for m in models() for f in FAMILIES for i in range(n)]


def scores(n: int, tick: Tick) -> dict[str, Any]:
    """Return how right each model is by itself."""
    found: dict[str, Any] = {}
    for model in models():
        with opened(model) as engine:
            found[model] = {}
            for family in FAMILIES:
                found[model][family] = score(engine, family, n)
                tick(f"{model} {family}")
    return found


def traces(n: int, tick: Tick) -> list[dict[str, Any]]:
    """Return what each trace says, KU1 to KU4."""
    rows = []
    for model, family, i in each(n):
        trace = PageTrace(where(model, family, i))
        said = find(trace)
        wanted = np.array(trace.notes["wanted"])
        row = {"model": model, "family": family, "i": i, **said.as_json()}
        row["right"] = round(float((np.array(trace.notes["tokens"]) == wanted).mean()), 4)
        cdf = said.distances.cdf()
        row["reuse_distance"] = {q: int(np.searchsorted(cdf, float(q))) for q in QUANTILES}
        row["stability"] = said.stability.round(4).tolist()
        for table in ("recall", "recall_by_decile"):
            del row[table]["milestone"]  # the shipped one was taught by these: see `predict`
        if family == "verify":
            half = trace.n_steps * 6 // 8  # lines of six words, then two words for each
            whole = trace.whole()
            row["phases"] = rank_overlap(stability(whole, 0, half), stability(whole, half))
        rows.append(row)
        tick(f"{model} {family} {i}")
    return rows


def heads_between(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how alike the order of heads by stability is between two families of a model."""
    found = []
    for model in sorted({row["model"] for row in rows}):
        mean = {
            f: np.mean(
                [r["stability"] for r in rows if (r["model"], r["family"]) == (model, f)], axis=0
            )
            for f in FAMILIES
        }
        for a, b in combinations(FAMILIES, 2):
            top, rank = rank_overlap(mean[a], mean[b])
            found.append({"model": model, "a": a, "b": b, "top": top, "spearman": round(rank, 4)})
    return found


def predict(n: int, tick: Tick) -> list[dict[str, Any]]:
    """Return the recall of the predictor on a family and a model of which it saw nothing."""
    taught = {}
    for model, family, i in each(n):
        taught[model, family, i] = learn.lessons(PageTrace(where(model, family, i)))
        tick(f"lessons {model} {family} {i}")
    rows = []
    for model, family in {(m, f): 0 for m, f, _ in each(n)}:
        others = [
            x for (m, f, _), some in taught.items() if m != model and f != family for x in some
        ]
        rows += held_out(model, family, n, learn.learn(others))
        tick(f"asked {model} {family}")
    (RESULTS.parents[1] / "src" / "kvweave" / "keep" / "tokens" / "milestone.json").write_text(
        json.dumps({"of": "bench/study, all families and models", **learn.learn([x for s in taught.values() for x in s])}) + "\n"
    )  # fmt: skip
    return rows


def held_out(model: str, family: str, n: int, weights: Weights) -> list[dict[str, Any]]:
    """Return what the predictor and the others recall, and what misses cost."""
    rows = []
    for i in range(n):
        trace = PageTrace(where(model, family, i))
        size = len(trace.header.heads), trace.n_pages
        found = recall(trace, names=SIMPLE, beside={"milestone": Milestone(*size, weights)})
        names = [*SIMPLE, "milestone"]
        plays = {
            name: play(
                trace,
                name,
                TIER,
                SETTING,
                Milestone(*size, weights) if name == "milestone" else None,
            )
            for name in ("recent", "cumulative", "milestone", "oracle")
        }
        rows.append({
            "model": model, "family": family, "i": i,
            "recall": {name: round(found.mean(name), 4) for name in names},
            "reads": {name: round(found.mean(name, "reads"), 4) for name in names},
            "stall_ms": {name: round(p.stall * 1e3, 4) for name, p in plays.items()},
            "bytes_a_step": {name: round(float(p.fetched.mean())) for name, p in plays.items()},
        })  # fmt: skip
    return rows


def taken_up(
    families: Sequence[str], n: int, tick: Tick
) -> Iterator[tuple[Engine, PageTrace, dict[str, Any]]]:
    """Yield the engine, the trace and what names it, of all models."""
    for model in models():
        with opened(model) as engine:
            for family in families:
                for i in range(n):
                    key = {"model": model, "family": family, "i": i}
                    yield engine, PageTrace(where(**key)), key
                    tick(f"{model} {family} {i}")


def ablated(n: int, tick: Tick) -> list[dict[str, Any]]:
    """Return how right the rest of a chain is when pages of a class are taken away (KU5)."""
    rows = []
    for engine, trace, key in taken_up(MARKED, n, tick):
        for at in AT:
            found = ablate(engine, trace, how=Eviction(at)).as_json()
            for each in found["results"]:
                del each["tokens"]
            rows.append({**key, "at": at, **found})
    return rows


def costs(n: int, tick: Tick) -> list[dict[str, Any]]:
    """Return how far outputs of heads are off without what rankings would have missed (KU2)."""
    rows = []
    for engine, trace, key in taken_up(FAMILIES, n, tick):
        found = miss_cost(engine, trace, WEIGHED)
        told = {
            name: {w: round(found.mean(name, w), 4) for w in ("missed", "error")}
            for name in WEIGHED
        }
        rows.append({**key, "costs": told})
    return rows


def beside(old: Any, new: Any) -> Any:
    """Return what was found now beside what was found of other models."""
    if isinstance(new, dict):
        return {**(old or {}), **new}
    return sorted(
        [r for r in old or [] if r["model"] not in models()] + new, key=lambda r: r["model"]
    )


PARTS = ("scores", "record", "traces", "predict", "ablate", "cost")


def main() -> None:
    """Run the parts that are named, and keep what the others found."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    made.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    made.add_argument("--models", help="some of them; what was found of others stays")
    made.add_argument("--traces", type=int, default=3, help="of a model and family")
    made.add_argument("--chains", type=int, default=8, help="that a model is scored on, a family")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--out", type=Path, default=RESULTS / "study.json")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.models and "predict" in options.parts.split(","):
        made.error("predict holds models out, and so needs all: leave out --models, or that part")
    ONLY.update(options.models.split(",") if options.models else ())
    n, cells = options.traces, len(models()) * len(FAMILIES)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    marked = len(models()) * len(MARKED) * n
    jobs: dict[str, tuple[int, Callable[[Tick], Any]]] = {
        "scores": (cells, lambda tick: scores(options.chains, tick)),
        "record": (cells * n, lambda tick: record_all(n, WORDS, lambda: tick(""))),
        "traces": (cells * n, lambda tick: traces(n, tick)),
        "predict": (cells * (n + 1), lambda tick: predict(n, tick)),
        "ablate": (marked, lambda tick: ablated(n, tick)),
        "cost": (cells * n, lambda tick: costs(n, tick)),
    }
    for part in options.parts.split(","):
        total, job = jobs[part]
        with progress(part, total) as tick:
            made_now = job(tick)
        if made_now is not None:
            found[part] = beside(found.get(part), made_now)
        if part == "traces":
            found["heads"] = heads_between(found["traces"])
        here = machine(torch.device("cpu"))
        if part == "traces" or "machine" not in found:
            found["machine"] = here
        found.setdefault("machines", {})[part] = here
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

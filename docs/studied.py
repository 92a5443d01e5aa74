"""The numbers of docs/study.md: how chains of thought use their KV. `study_figure.py` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tables import table

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench" / "results" / "study.json"
FAMILIES = ("program", "walk", "search", "sum", "verify", "list")
CONTROL = "list"
RULES = ("newest", "recent", "cumulative", "ema", "recurrence", "stability", "milestone", "oracle")
CLASSES = (
    "none",
    "random",
    "milestone",
    "other",
    "early",
    "late",
    "scattered",
    "high",
    "low",
    "stable",
    "unstable",
)
DRAWS = 2000
Row = dict[str, Any]


def studied(found: dict[str, Any] | None) -> str:
    """Return the page's numbers as Markdown; nothing while there is no result."""
    if found is None:
        return ""
    machine, n = found["machine"], len(found["traces"])
    lines = [
        f"{n} traces of {len(found['scores'])} models and {len(FAMILIES)} families, pages of {found['traces'][0]['page']} "
        f"rows, made on {machine['cpu']}, commit {machine['commit'][:7]}: `make study-models`, then `make study`. In brackets: "
        "95 % intervals by bootstrap over traces, two of a model and family. Lines of families pool the models, which differ, and so are wide.",
        "",
        *_verdicts(found),
        *_scores(found["scores"]),
        *_reuse(found["traces"]),
        *_recency(found["predict"], found["traces"]),
        *_costs(found.get("cost", []), found.get("machines", {}).get("cost", machine)),
        *_heads(found["traces"], found["heads"]),
        *_milestones(found["traces"]),
        *_cascade(found["ablate"]),
        *_stalls(found["predict"]),
    ]
    return "\n".join(lines)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of a mean, by bootstrap."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.percentile(np.asarray(values)[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def interval(values: Iterable[float | None], digits: int = 2) -> str:
    """Return a mean and its interval."""
    some = [v for v in values if v is not None and not np.isnan(v)]
    if not some:
        return "-"
    low, high = bounds(some)
    return f"{np.mean(some):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def by(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Return the rows that have these values."""
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def _claims(found: Row) -> dict[str, Callable[[str], list[float]]]:
    """Return by hypothesis what is over 0 where it holds: of a model, a value a trace."""
    traces, predicted, gone = found["traces"], found["predict"], found["ablate"]

    def further(model: str) -> list[float]:
        own = by(traces, model=model)
        plain = np.mean([r["reuse_distance"]["0.9"] for r in by(own, family=CONTROL)])
        return [r["reuse_distance"]["0.9"] - plain for r in own if r["family"] != CONTROL]

    def fades(model: str) -> list[float]:
        parts = [
            r["recall_by_decile"]["recent"]
            for r in by(traces, model=model)
            if r["family"] != CONTROL
        ]
        return [float(np.nanmean(p[1:4]) - np.nanmean(p[7:])) for p in np.array(parts, float)]

    def same(model: str) -> list[float]:
        return [
            p["spearman"] - 0.5
            for p in by(found["heads"], model=model)
            if CONTROL not in (p["a"], p["b"])
        ]

    def known(model: str) -> list[float]:
        return [
            r["milestones"]["recall"] - r["milestones"]["chance"]
            for r in by(traces, model=model)
            if r["milestones"]
        ]

    def costs(model: str) -> list[float]:
        of = [{c["class"]: c["free"] for c in r["results"]} for r in by(gone, model=model)]
        return [c["other"] - c["milestone"] for c in of if "milestone" in c and "other" in c]

    def beats(model: str) -> list[float]:
        own = [r["recall"] for r in by(predicted, model=model) if r["family"] != CONTROL]
        return [r["milestone"] - max(r["recent"], r["cumulative"]) for r in own]

    return {
        "KU1: thinking reads pages again from further than the control (ninth decile of stack distances, pages)": further,
        "KU2: what recency would have held falls from the second to the last third of a chain": fades,
        "KU3: the order of heads by stability is one for all families (rank correlation over .5)": same,
        "KU4: pages with milestones have more attention than others (share over chance)": known,
        "KU5: to lose pages with milestones costs more right words than to lose others": costs,
        "CB3: the predictor holds more than recency and than attention summed up, of families and models it never saw": beats,
    }  # fmt: skip


def _verdicts(found: Row) -> list[str]:
    models, rows = list(found["scores"]), []
    for claim, value in _claims(found).items():
        cells, signs, n = [], [], 0
        for model in models:
            some = value(model)
            n += len(some)
            cells.append(interval(some))
            low, high = bounds(some)
            signs.append(1 if low > 0 else -1 if high < 0 else 0)
        said = {1: "holds", -1: "**fails**"}.get(
            signs[0] if len(set(signs)) == 1 else 0,
            "differs by model" if {1, -1} <= set(signs) else "undecided",
        )
        rows.append([claim, *cells, str(n), said])
    return [
        "## In one table",
        "",
        "Each hypothesis was written down before the first trace was made; a number over 0 speaks for it, and it holds where "
        "the interval of every model is over 0.",
        "",
        *table(["hypothesis", *(f"`{m}`" for m in models), "n", ""], rows),
        "",
    ]


def _scores(scores: Row) -> list[str]:
    rows = [
        [f"`{model}`", *(f"{of[f]['right']:.1%} ({of[f]['whole']:.0%})" for f in FAMILIES)]
        for model, of in scores.items()
    ]
    some = next(iter(scores.values()))
    words = ", ".join(f"{some[f]['words']:,}" for f in FAMILIES)
    return [
        "## The models think right",
        "",
        f"Words that are right when the model decodes by itself, one after the other ({words} words; "
        f"{some['program']['n']} chains a cell that were not trained on), and in brackets chains without a wrong one.",
        "",
        *table(["model", *FAMILIES], rows),
        "",
    ]


def _per(
    rows: Sequence[Row], value: Callable[[Row], float | None], digits: int = 2
) -> list[list[str]]:
    """Return a line a model: each family's interval."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    return [
        [
            f"`{m}`",
            *(interval((value(r) for r in by(rows, model=m, family=f)), digits) for f in FAMILIES),
        ]
        for m in models
    ]


def _reuse(traces: Sequence[Row]) -> list[str]:
    head = ["model", *FAMILIES]
    return [
        "## KU1: how soon pages are read again",
        "",
        "Stack distance that nine of ten reads do not pass (other pages that the head read since the page was read last):",
        "",
        *table(head, _per(traces, lambda r: r["reuse_distance"]["0.9"], 1)),
        "",
        "Share of the attention of the top fifth of pages, sinks and the newest two apart:",
        "",
        *table(head, _per(traces, lambda r: r["top"][0])),
        "",
    ]


def _recency(predicted: Sequence[Row], traces: Sequence[Row]) -> list[str]:
    def mean(rows: Sequence[Row], name: str) -> str:
        return interval(r["recall"][name] for r in rows)

    rows = [[f, *(mean(by(predicted, family=f), name) for name in RULES)] for f in FAMILIES]
    models = list(dict.fromkeys(r["model"] for r in predicted))
    rows += [
        [
            f"`{m}`",
            *(
                mean([r for r in by(predicted, model=m) if r["family"] != CONTROL], name)
                for name in RULES
            ),
        ]
        for m in models
    ]
    ends = [
        [
            f,
            *(
                interval(r["recall_by_decile"]["recent"][d] for r in by(traces, family=f))
                for d in (1, 4, 9)
            ),
        ]
        for f in FAMILIES
    ]
    return [
        "## KU2 and CB3: which pages are read next",
        "",
        "Share of the attention (sinks and the newest two apart) that a fifth of the pages would have held, chosen by each "
        "rule before the step. `milestone` is the predictor, taught on traces of *other families and other models* only; "
        "lines of models leave the control out.",
        "",
        *table(["", *RULES], rows),
        "",
        "`recent` by tenth of the decode:",
        "",
        *table(["family", "second tenth", "fifth", "last"], ends),
        "",
    ]


def _costs(rows: Sequence[Row], machine: Row) -> list[str]:
    """Return what missed attention is worth, by ranking."""
    if not rows:
        return []
    names, models = list(rows[0]["costs"]), sorted({r["model"] for r in rows})
    body = []
    for name in names:
        cells = [
            interval([r["costs"][name][which] for r in by(rows, model=model)])
            for model in models
            for which in ("missed", "error")
        ]
        body.append([name, *cells])
    head = ["ranking", *(f"`{m}`, {w}" for m in models for w in ("missed", "off by"))]
    return [
        f"What misses cost: the share of a head's attention that is missed with a fifth of the pages, and how far its output is off by it "
        f"(the others' attention renormalised, norm of the difference over the norm), the mean over heads and steps of {len(rows)} traces, the control's too (commit {machine['commit'][:7]}):",
        "",
        *table(head, body),
        "",
    ]


def _heads(traces: Sequence[Row], pairs: Sequence[Row]) -> list[str]:
    models = list(dict.fromkeys(r["model"] for r in traces))
    thinking = [p for p in pairs if CONTROL not in (p["a"], p["b"])]
    rows = [
        [
            f"`{m}`",
            interval(r["halves"][1] for r in by(traces, model=m)),
            interval(p["spearman"] for p in by(thinking, model=m)),
            interval(p["spearman"] for p in by(pairs, model=m) if p not in thinking),
            interval(r["phases"][1] for r in by(traces, model=m, family="verify")),
        ]
        for m in models
    ]
    head = [
        "model",
        "both halves of a chain",
        "two families of thinking",
        "thinking and control",
        "`verify`: thinking, checking",
    ]
    return [
        "## KU3: do heads stay what they are?",
        "",
        "Rank correlation of heads by stability (how alike the pages are that a head reads in one step and the next):",
        "",
        *table(head, rows),
        "",
    ]


def _milestones(traces: Sequence[Row]) -> list[str]:
    some = [r for r in traces if r["milestones"]]
    families = [f for f in FAMILIES if by(some, family=f)]
    models = list(dict.fromkeys(r["model"] for r in some))
    rows = [
        [f"`{m}`", f, *(interval(r["milestones"][k] for r in by(some, model=m, family=f)) for k in ("recall", "chance", "precision"))]
        for m in models
        for f in families
    ]  # fmt: skip
    head = [
        "model",
        "family",
        "milestones among the top fifth",
        "by chance",
        "of the top fifth a milestone",
    ]
    return [
        "## KU4: does attention know milestones?",
        "",
        "A milestone is a value that is needed 48 rows later or more. Of pages of decoded rows, by attention a step:",
        "",
        *table(head, rows, 2),
        "",
    ]


def _cascade(rows: Sequence[Row]) -> list[str]:
    def of(some: Sequence[Row], name: str, key: str) -> list[float]:
        return [
            c[key] for r in some for c in r["results"] if c["class"] == name and c[key] is not None
        ]

    models = list(dict.fromkeys(r["model"] for r in rows))
    body = []
    for name in CLASSES:
        first = of(rows, name, "first_wrong")
        n = sum(c["class"] == name for r in rows for c in r["results"])
        body.append([
            f"`{name}`", interval(of(rows, name, "forced"), 3), interval(of(rows, name, "free"), 3),
            f"{len(first)} of {n}", f"{np.median(first):.0f}" if first else "-",
            *(interval(of(by(rows, model=m), name, "free")) for m in models),
        ])  # fmt: skip
    head = [
        "class",
        "forced",
        "free",
        "went wrong",
        "first wrong word, median",
        *(f"free, `{m}`" for m in models),
    ]
    pages = np.mean([r["pages"] / r["candidates"] for r in rows])
    return [
        "## KU5: what follows when pages go",
        "",
        f"At .4 and .6 of a chain {pages:.0%} of the decoded pages of each head go, as many bytes for every class, and the model "
        "goes on. *Forced*: words that come first behind the true ones; *free*: words of its own chain that are still right; what is "
        "between them is the cascade. Compare `milestone`, `early` and `late` with `random` (the same pages in all heads), the others with `scattered`.",
        "",
        *table(head, body),
        "",
    ]


def _stalls(rows: Sequence[Row]) -> list[str]:
    names = list(rows[0]["stall_ms"])
    thinking = [r for r in rows if r["family"] != CONTROL]
    body = [
        [f"`{name}`", interval((r["stall_ms"][name] for r in thinking), 3), interval((r["bytes_a_step"][name] / 1e3 for r in thinking), 1),
         interval((r["stall_ms"][name] for r in by(rows, family=CONTROL)), 3)]
        for name in names
    ]  # fmt: skip
    return [
        "## Tiers: what a prefetcher gains",
        "",
        "A fifth of the pages in the fast tier, wanted pages brought while the step before runs (2 ms), 0.5 GB/s and 20 us below; "
        "a model of tiers, the traces are real:",
        "",
        *table(["ranking", "stall a step, ms", "kB a step", "control, ms"], body),
        "",
    ]

"""Write the measured numbers of README.md and of codecs, fidelity, memory, probe, prune-bench, repair, simulate, splices, study and vllm in docs/ from ``bench/results/*.json``.

``python docs/measured.py`` rewrites them between their markers; ``--check`` only compares. Of the
suite's results nothing is written while there are none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from at_rest import learned, rare
from in_vllm import in_vllm
from on_gpu import on_gpu
from probed import probed
from pruned import pruned
from regrets import equal, regrets
from remembered import remembered
from rested import codec_page, rested
from simulated import simulated
from spliced import spliced
from studied import studied
from tables import table
from wasted import wasted

ROOT = Path(__file__).parents[1]
README, FIDELITY = ROOT / "README.md", ROOT / "docs" / "fidelity.md"
CODECS = ROOT / "docs" / "codecs.md"
SIMULATE = ROOT / "docs" / "simulate.md"
REPAIR = ROOT / "docs" / "repair.md"
SPLICED = ROOT / "docs" / "splices.md"
MEMORY = ROOT / "docs" / "memory.md"
VLLM = ROOT / "docs" / "vllm.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
PRUNE = ROOT / "docs" / "prune-bench.md"
STUDY = ROOT / "docs" / "study.md"
PROBE = ROOT / "docs" / "probe.md"
FIGURE = ROOT / "docs" / "fidelity.png"
Row = dict[str, Any]
SHOWN = (  # in the README: strategy and share
    ("none", 0.0),
    ("random", 0.15),
    ("deviation:v@1", 0.15),
    ("query", 0.15),
    ("rollout:2@0", 0.15),
    ("auto", 0.05),
    ("auto", 0.15),
)
FOUND = {"prefix-16": "prefix of 16", "fixed-256": "any offset of 256", "undeclared": "kvweave, undeclared", "names + find": "kvweave, named"}  # fmt: skip
WAYS = {"all": "kvweave, `auto`", "all, no repair": "kvweave, no repair", "prefix": "prefix only", "off": "none"}  # fmt: skip
MAX_DRIFT = 0.1  # nats; of the gate's line there
BEGIN, END = "<!-- numbers -->\n", "<!-- /numbers -->"
CASES = {
    "prune/none": "kvweave, no repair",
    "prune/auto": "kvweave, `auto` repair of 5 %",
    "prune/first_k": "kvweave, `first_k` repair of 15 %",
    "prune/random": "kvweave, `random` repair of 15 %",
}
WITHOUT = {
    "passes": "kvweave, full prefill",
    "full": "plain transformers, full prefill",
    "prefix": "plain transformers, prefix caching",
}


def load(name: str) -> dict[str, Any]:
    """Return one bench's result."""
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return found


def find(name: str) -> dict[str, Any] | None:
    """Return one bench's result, if there is one."""
    return load(name) if (ROOT / "bench" / "results" / f"{name}.json").exists() else None


def prune_table() -> list[str]:
    """Return the table of the first token after a prune."""
    prune = load("prune")
    rows = [
        "| | first token | against full prefill | in our own passes | against prefix caching |",
        "|---|---|---|---|---|",
    ]
    for case, title in CASES.items():
        c = prune["cases"][case]
        full, own, prefix = (c[f"over_{way}"]["median"] for way in ("full", "passes", "prefix"))
        rows.append(
            f"| {title} | {c['seconds']:.2f} s | {full:.1f}x | **{own:.1f}x** | {prefix:.1f}x |"
        )
    for way, title in WITHOUT.items():
        rows.append(f"| {title} | {prune['baselines'][f'prune/{way}']['seconds']:.1f} s | | | |")
    return rows


def render() -> str:
    """Return the README's numbers as Markdown."""
    prune, decode, memory, index = (load(n) for n in ("prune", "decode", "memory", "index"))
    half = load("prune_bf16")["cases"]
    demo, machine = load("demo"), prune["machine"]
    ways = demo["summary"]["ways"]
    score = json.loads((ROOT / "src/kvweave/demo/model/score.json").read_text())["kinds"]
    peaks = {step["step"]: step["peak_over_rows"] for step in memory["steps"]}
    at = decode["lengths"]["1024"]["clock"]
    lines = [
        "## Measured",
        "",
        f"Minus one turn, plus one: {prune['setup']['context']:,} tokens, 24 turns, a random Llama of "
        f"0.2 B parameters in {prune['setup']['dtype']}, {machine['cores']} CPU cores "
        f"({machine['cpu']}), medians of {prune['setup']['rounds']} interleaved rounds "
        f"([bench/prune.py](bench/prune.py), commit {machine['commit'][:7]}).",
        "",
        *prune_table(),
        "",
        "Time to first token, with planning, placing, repair and the new turn's prefill. The canonical KV "
        "of a new turn is computed after its answer, once. Transformers computes a suffix behind a cache "
        "with a mask, which is slower than a causal prefill: take the ratio to the full prefill. On processors "
        "that are not Intel's our passes multiply faster than torch does by itself "
        "([bench/products.py](bench/products.py)): what reuse alone saves is the ratio to a full prefill in our own passes.",
        "",
        f"- In bfloat16 (one round): {half['prune/none']['over_full']['median']:.1f}x a full prefill without "
        f"repair, {half['prune/first_k']['over_full']['median']:.1f}x with `first_k` 15 %.",
        f"- `make demo`, {demo['summary']['turns']} pruned turns of {demo['summary']['n_tokens']:,} tokens "
        f"with the bundled model of {demo['model']['parameters'] / 1e6:.1f} M parameters: right "
        f"{ways['kvweave']['right']}/{ways['kvweave']['asked']} (full prefill "
        f"{ways['full']['right']}/{ways['full']['asked']}), first token "
        f"{ways['kvweave']['speedup']:.1f}x as fast, {ways['reuse']['speedup']:.1f}x without repair.",
        f"- Placing and planning cost {100 * prune['overhead_none']['share_of_pass']:.0f} % of the new "
        "turn's pass.",
        f"- Decoding at 1k: {at['over_generate']['median']:.2f}x `model.generate`; eight contexts together "
        f"{at['together_over_one']['median']:.1f}x one.",
        f"- Memory beyond the canonical store, at the peak: {peaks['weave, first token']:.2f}x the context's "
        f"KV rows for a weave, {peaks['minus one plus one']:.2f}x for a prune.",
        f"- Index of {index['n']:,} chunks: load {index['load_s']:.1f} s, `stat` "
        f"{index['stat_us']['median']:.0f} us, `rm` {index['rm_us']['median']:.0f} us, "
        f"{index['bytes_per_entry']:.0f} B of memory an entry.",
        f"- The bundled model recalls one fact among 27 turns {100 * score['recall']['exact_match']:.1f} % of the time, an "
        f"overridden one {100 * score['override']['exact_match']:.1f} %.",
        "",
    ]
    lines += on_gpu(find("gpu"))
    fidelity = find("fidelity")
    lines += summary(fidelity, "docs/fidelity.png") if fidelity else []
    serves = [found for name in ("serve", "serve_large") if (found := find(name)) is not None]
    lines += served(find("hit_rate"), serves)
    return "\n".join([*lines, *rested(find("tiers"), find("disk"), find("kv_codecs"))])


def served(found: dict[str, Any] | None, serves: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a server's clients get: how much is found again, and how soon they are answered."""
    lines = []
    if found:
        rates = found["hit_rate"]["random tokens"]
        body = [
            [
                title[1:].strip(),
                *(f"{100 * rates[title][way]['of_ceiling'][0]:.1f}" for way in FOUND),
            ]
            for title in rates
        ]
        times = {text: by["times"] for text, by in found["speed"].items()}
        cost = times["random tokens"]["all of it known, shuffled"]["cpu"]
        text = [by["cpu"]["find"] for by in times["like text"].values()]
        lines += [
            f"Of a changed prompt, the part not prefilled, in % of what could be found ({found['trials']} trials of "
            "random tokens; blocks of 16 chained as in vLLM, a grid of 256 probed at any offset as in LMCache; "
            "[bench/hit_rate.py](bench/hit_rate.py)):",
            "",
            *table(["", *FOUND.values()], body),
            "",
            f"Finding costs {cost['hash'] + cost['look up']:.1f} ms per 131,072 tokens for hashing and looking up, "
            f"{cost['find']:.1f} ms with every match compared, in a store of a million tokens; on text with much "
            f"boilerplate {min(text):.1f} to {max(text):.1f} ms.",
            "",
        ]
    return [*lines, *(waiting(serves) if serves else [])]


def waiting(serves: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of the server's time to first token."""
    body = []
    for serve in serves:
        size = f"{serve['parameters'] / 1e6:.0f} M"
        for clients, figures in serve["clients"].items():
            for way, title in WAYS.items():
                mine, over = figures["ways"][way], figures["times_as_fast"].get(way, {})
                ratio = f"**{over['prefix']['median']:.1f}x**" if over else ""
                times = [f"{mine[key]:.2f} s" for key in ("ttft_p50_s", "ttft_p99_s")]
                body.append([size, clients, title, *times, ratio])
    return [
        f"`kvweave serve`, pruned chats of {serves[0]['setup']['context']:,} tokens, random models, all ways "
        "interleaved ([bench/serve.py](bench/serve.py)):",
        "",
        *table(
            ["parameters", "clients", "reuse", "first token p50", "p99", "p50 against prefix"],
            body,
            3,
        ),
        "",
    ]


def shown(interval: Sequence[float] | None) -> str:
    """Return ``0.93 [0.91, 0.95]``."""
    if interval is None:
        return ""
    value, low, high = (f"{x:.3g}" for x in interval)
    return f"{value} [{low}, {high}]"


def kept(row: Row) -> bool:
    """Whether a row is of a reused context as it usually is: with a base, pruned by forget."""
    return bool(row["base"]) and row["mode"] in ("", "forget")


def summary(found: dict[str, Any], figure: str) -> list[str]:
    """Return what the suite found in a few lines: relative accuracy, and the gate."""
    rows = [r for r in found["rows"] if kept(r) and r["line"] in ("", "retained")]
    names = [n for n in dict.fromkeys(r["protocol"] for r in rows) if n != "prose"]
    at = {(r["strategy"], r["share"], r["protocol"]): r for r in rows}
    full = {r["protocol"]: r for r in rows}
    poor = [n for n in names if not full[n]["counts"]]
    body = []
    for strategy, share in SHOWN:
        cells = [at.get((strategy, share, n)) for n in names]
        if any(cells):
            values = ["-" if c is None else f"{c['relative'][0]:.3f}" for c in cells]
            body.append([f"`{strategy}`", f"{share:.0%}", *values])
    lines = [
        f"Replies right, relative to a full prefill's, by strategy and share of the reused rows "
        f"repaired ({found['setup']['n']} questions a protocol; [docs/fidelity.md](docs/fidelity.md) has all "
        "strategies, shares and intervals):",
        "",
        *table(["", "repaired", *(f"{n} *" if n in poor else n for n in names)], body),
        "",
    ]
    if poor:
        scores = ", ".join(f"{n} {full[n]['full']:.1%}" for n in poor)
        lines += [f"\\* does not count, a full prefill itself is under 95 %: {scores}.", ""]
    bounded = [g for g in found.get("gate", []) if g["max_drift"] == MAX_DRIFT]
    if bounded:
        each = "; ".join(
            f"on {', '.join(g['tested_on'])}, {g['under']:.1%} of the questions under the predicted "
            f"bound, {g['within']:.1%} within `max_drift`, {g['repaired']:.0%} of the rows repaired"
            for g in bounded
        )
        lines += [f"The gate at `max_drift={MAX_DRIFT}` nats, fitted on the other half of the protocols: {each}.", ""]  # fmt: skip
    return [*lines, *drawing(figure)]


def drawing(where: str) -> list[str]:
    """Return the figure, if it was drawn."""
    about = "Accuracy relative to full prefill, and KL, against repaired rows, a panel a protocol"
    return [f"![{about}]({where})", ""] if FIGURE.exists() else []


def page() -> str:
    """Return the tables of docs/fidelity.md."""
    found, mask = find("fidelity"), find("mask")
    lines: list[str] = []
    if found:
        lines += drawing("fidelity.png")
        lines += [*origin(found), *quality(found["rows"]), *gate(found.get("gate", []))]
    if mask:
        lines += masks(mask)
    return "\n".join(lines)


def origin(found: dict[str, Any]) -> list[str]:
    """Return what was measured where."""
    setup, machine = found["setup"], found["machine"]
    return [
        f"Measured with {setup['n']} questions a protocol, {setup['prunes']} prunes a stream, on "
        f"{machine['cpu']}, commit {machine['commit'][:7]} "
        "([bench/fidelity.py](../bench/fidelity.py))." + "".join(_again(found)),
        "",
    ]


def _again(found: dict[str, Any]) -> Iterator[str]:
    """Yield which rows are of a later run."""
    for name, machine in found.get("again", {}).items():
        yield (
            f" `{name}` and its gate, but not on prose, whose text comes with Python, were measured again on {machine['cpu']} "
            f"({machine['cores']} cores), commit {machine['commit'][:7]}."
        )


def quality(rows: Sequence[Row]) -> list[str]:
    """Return a table for each protocol and line: strategies down, shares across."""
    titles = dict.fromkeys((r["protocol"], r["line"]) for r in rows)
    lines = ["## Quality by strategy and share", "", legend(), ""]
    for protocol, line in titles:
        mine = [r for r in rows if (r["protocol"], r["line"]) == (protocol, line)]
        full = next((r for r in mine if r["strategy"] == "full prefill"), None)
        others = [r for r in mine if r["strategy"] != "full prefill" and wanted(r)]
        shares = sorted({r["share"] for r in others})
        cells: dict[str, dict[float, str]] = {}
        for r in others:
            cells.setdefault(called(r), {})[r["share"]] = cell(r)
        body = [[name, *(by.get(s, "") for s in shares)] for name, by in cells.items()]
        lines += [f"### {protocol} {line}".rstrip(), ""]
        if full is not None:
            note = "" if full["counts"] else " **Does not count:** that is under 95 %."
            lines += [f"Full prefill: {shown(full['accuracy'])}, n = {full['n']}.{note}", ""]
        lines += [*table(["", *(f"{s:.0%}" for s in shares)], body), ""]
        lines += slopes(others)
    return lines


def legend() -> str:
    """Return what stands in a cell."""
    return (
        "In a cell: accuracy relative to full prefill with its interval, then the mean KL (nats). "
        "Of leaks: the share of replies that name the removed value, then how many more than where "
        "it never was. Of prose: perplexity, then KL. The share is the one asked for."
    )


def wanted(row: Row) -> bool:
    """Whether a row has a place in its table: contexts that never had a chunk only for leaks."""
    return row["mode"] != "never" or row["relative"] is None


def called(row: Row) -> str:
    """Return the name of a row's line."""
    mode = row["mode"] if row["mode"] not in ("", "forget") else ""
    words = [f"`{row['strategy']}`", "" if row["base"] else "no base", mode]
    return ", ".join(filter(None, words))


def cell(row: Row) -> str:
    """Return what `legend` says."""
    if row["relative"] is None:
        return "; ".join(filter(None, [shown(row["accuracy"]), shown(row.get("over_never"))]))
    first = row["perplexity"] if "perplexity" in row else row["relative"]
    return f"{shown(first)}; {row['kl'][0]:.2g}"


def slopes(rows: Sequence[Row]) -> list[str]:
    """Return the table of how KL grows with prunes, where that was measured."""
    body = [
        [called(r), f"{r['share']:.0%}", shown(r["kl_per_prune"])]
        for r in rows
        if "kl_per_prune" in r
    ]
    return [*table(["", "share", "KL a prune (nats)"], body), ""] if body else []


def gate(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of what the predicted bounds are worth."""
    if not found:
        return []
    head = ("fitted on", "tested on", "max_drift", "n", "KL under the bound", "KL within max_drift",
            "rows repaired", "wholly repaired", "accuracy", "accuracy without")  # fmt: skip
    body = [
        [
            " ".join(g["fit_on"]),
            " ".join(g["tested_on"]),
            "none" if g["max_drift"] is None else f"{g['max_drift']:g}",
            str(g["n"]),
            f"{g['under']:.1%}",
            "" if g["within"] is None else f"{g['within']:.1%}",
            *(f"{g[key]:.1%}" for key in ("repaired", "full", "right", "share_right")),
        ]
        for g in found
    ]
    about = (
        "Bounds fitted on the evidence of one half of the protocols, tested on the other. *Wholly "
        "repaired*: questions for which no share's bound was low enough. *Accuracy without*: at the "
        "first share, without a bound."
    )
    return ["## The gate", "", about, "", *table(head, body, 2), ""]


def masks(found: dict[str, Any]) -> list[str]:
    """Return the table of the mask study."""
    at: dict[tuple[str, str], dict[str, Row]] = {}
    for r in found["rows"]:
        if kept(r) and r["strategy"] != "full prefill" and r["relative"] is not None:
            title = f"{r['protocol']} {r['line']}".rstrip()
            at.setdefault((title, r["method"]), {})[r["mask"]] = r
    body = []
    for (title, method), by in at.items():
        pair = [by.get("exact"), by.get("bottom-right")]
        texts = ["" if r is None else shown(r["relative"]) for r in pair]
        kls = ["" if r is None else f"{r['kl'][0]:.2g}" for r in pair]
        body.append([title, f"`{method}`", *texts, *kls])
    head = ("", "", "exact", "bottom-right", "KL exact", "KL bottom-right")
    about = (
        "Reference implementations gather the rows to repair and use a causal mask aligned to the "
        "bottom right, which is right for a contiguous suffix only: a scattered row sees rows behind "
        "it. The same rows under both masks, accuracy relative to full prefill and KL (nats), "
        f"{found['setup']['n']} questions a protocol ([bench/mask.py](../bench/mask.py))."
    )
    return ["## The wrong mask", "", about, "", *table(head, body, 2), ""]


def repair_page() -> str:
    """Return the numbers of docs/repair.md."""
    at_rest = learned(find("learned")) + rare(find("rare"))
    return regrets(find("models")) + at_rest + equal(find("equal"))


def main() -> int:
    """Rewrite or check; return the exit status."""
    status = 0
    for file, made in (
        (README, render()),
        (FIDELITY, page()),
        (CODECS, codec_page(find("kv_codecs"))),
        (SIMULATE, simulated(find("policies"))),
        (REPAIR, repair_page()),
        (SPLICED, spliced(find("splices"))),
        (MEMORY, remembered(find("memory_loop"))),
        (VLLM, in_vllm(find("vllm"))),
        (CONCEPTS, wasted(find("waste"))),
        (PRUNE, pruned(find("prune_agents"), find("amend"))),
        (STUDY, studied(find("study"))),
        (PROBE, probed(find("record"), find("stalls"))),
    ):
        text = file.read_text()
        head, rest = text.split(BEGIN)
        whole = head + BEGIN + made + END + rest.split(END)[1]
        if "--check" not in sys.argv:
            file.write_text(whole)
        status |= int(whole != text)
    return status if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())

"""What docs/prune-bench.md says of agents' edits, and of an erratum instead of a replacement."""

from __future__ import annotations

from typing import Any

from tables import table

KINDS = {
    "corrected": "the fact itself",
    "taken over": "taken over from it",
    "other": "another fact",
}
GOAL = 0.25  # of a full prefill, to the first token after an edit
SETUPS = {"as they are": "As they are sent", "with tools": "With tools in front"}
WORLDS = {
    "world": "Runs of the bundled model's world",
    "text": "Text of the public runs, continued by `llama-prose`",
}


def pruned(found: dict[str, Any] | None, amended: dict[str, Any] | None) -> str:
    """Return the measured part of the page; nothing where nothing was measured."""
    lines = [] if found is None else counted(found)
    if found is not None and "time" in found:
        lines = [*goals(found), *lines, *timed(found)]
    if found is not None and "drift" in found:
        lines += drifted(found)
    return "\n".join(["", *lines, *(errata(amended) if amended else []), ""])


def goals(found: dict[str, Any]) -> list[str]:
    """Return what was wanted, and whether it was reached."""
    times = found["time"]["rules"]
    within = [f["cpu_of_full"]["auto"] for f in times.values()]
    reached = sum(x <= GOAL for x in within)
    rules = edited(found["count"]["as they are"])
    prices = {name: f["price"]["auto"] for name, f in rules.items()}
    dear = [name for name, price in prices.items() if price > 1]
    runs = [f["dearer_runs"]["auto"] for f in rules.values()]
    alone = [f["dearer_runs"]["none"] for f in rules.values()]
    slower = [f["cpu_of_unedited"]["auto"] for f in times.values()]
    bare = [f["cpu_of_unedited"]["none"] for f in times.values()]
    counted = [f["after_edit"]["within_quarter"] for f in rules.values()]
    return [
        "## What was wanted, and what came of it",
        "",
        f"- *After every edit the next first token within {GOAL}x of a full prefill, with the default repair.* By time {reached} of {len(within)} rules "
        f"(medians {min(within):.2f}x to {max(within):.2f}x, CPU seconds); by tokens computed {min(counted):.0%} to {max(counted):.0%} of a rule's edits: not every one. "
        "What misses are edits of short prompts, and those whose new output is much of the prompt.",
        f"- *No edit dearer than not editing.* **Missed with the default repair.** The first token after an edit takes {min(slower):.1f} to {max(slower):.1f} times what it takes "
        f"without the edit ({min(bare):.2f} to {max(bare):.2f} times without repair). Over whole runs the price falls to {min(prices.values()):.2f} to {max(prices.values()):.2f} of no edits, "
        f"since less is read; above 1: {listed(dear)}. {min(runs):.0%} to {max(runs):.0%} of a rule's runs get dearer, "
        f"{min(alone):.0%} to {max(alone):.0%} without repair.",
        "",
    ]


def listed(names: list[str]) -> str:
    """Return names in a sentence."""
    return "; ".join(names) if names else "none"


def edited(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the rules that edit."""
    return {name: f for name, f in setup["rules"].items() if f["edits"]}


def counted(found: dict[str, Any]) -> list[str]:
    """Return the tables of what is computed, and the figure."""
    lines = ["## What is computed", ""]
    for setup, title in SETUPS.items():
        mine = found["count"][setup]
        front = f", {mine['front']:,} tokens of tools and rules before all" if mine["front"] else ""
        lines += [
            f"{title}: {mine['runs']} runs, {mine['requests']:,} requests of {mine['sent_per_request']:,} tokens in the mean, {mine['new_per_request']:,} of them new{front}. "
            "*Computed* and *price* are multiples of a prefix cache's without edits.",
            "",
        ]
        head = ["rule", "sent", "no reuse", "prefix", "no repair", "`auto` 5 %", "`auto` 15 %", "price, prefix", "price, no repair", "price, `auto` 5 %", "runs dearer, `auto`", "edits a run"]  # fmt: skip
        body = [
            [
                name, f"{f['sent']:.2f}", f"{f['computed']['no reuse']:.1f}",
                *(f"{f['computed'][way]:.2f}" for way in ("prefix", "none", "auto", "15 %")),
                *(f"{f['price'][way]:.2f}" for way in ("prefix", "none", "auto")),
                f"{f['dearer_runs']['auto']:.0%}", f"{f['edits'] / mine['runs']:.1f}",
            ]
            for name, f in mine["rules"].items()
        ]  # fmt: skip
        lines += [*table(head, body), ""]
    lines += less(edited(found["count"]["as they are"]))
    machine = found["machines"]["count"]
    lines += [
        "![Tokens computed and price of each rule, engine by engine](prune-bench.png)", "",
        f"Counted at commit {machine['commit'][:7]} ([bench/prune_agents.py](../bench/prune_agents.py)). Not in it: canonical KV of each new text, which kvweave computes "
        "once more while nobody waits, as many tokens again as are new.",
        "",
    ]  # fmt: skip
    return lines


def less(rules: dict[str, Any]) -> list[str]:
    """Return what a repair would cost that does less for what an earlier request had met."""
    spans = {
        key: [f[key]["less"] for f in rules.values()]
        for key in ("computed", "price", "dearer_runs")
    }
    low, high = ({key: end(values) for key, values in spans.items()} for end in (min, max))
    return [
        f"*Not the default, nor offered*: a repair that does a tenth of the share (16 rows at least) of what an earlier request had met would compute {low['computed']:.2f} to "
        f"{high['computed']:.2f} at a price of {low['price']:.2f} to {high['price']:.2f}, with {low['dearer_runs']:.0%} to {high['dearer_runs']:.0%} of a rule's runs dearer. On prose it is "
        "further from a full prefill, beyond noise ([bench/asked_again.py](../bench/asked_again.py), [LOG](LOG.md)).",
        "",
    ]  # fmt: skip


def timed(found: dict[str, Any]) -> list[str]:
    """Return the table of seconds to the first token."""
    times, machine = found["time"], found["machines"]["time"]
    head = ["rule", "full, s", "prefix", "no repair", "`auto` 5 %", "clock: prefix", "clock: `auto`", "`auto` / not editing"]  # fmt: skip
    body = [
        [
            name, f"{f['seconds']['full']:.1f}",
            *(f"{f['cpu_of_full'][way]:.3f}" for way in ("prefix", "none", "auto")),
            *(f"{f['seconds_of_full'][way]:.3f}" for way in ("prefix", "auto")),
            f"{f['cpu_of_unedited']['auto']:.1f}",
        ]
        for name, f in times["rules"].items()
    ]  # fmt: skip
    n = next(iter(times["rules"].values()))["n"]
    return [
        "## Seconds to the first token after an edit", "",
        f"A random model of 0.2 B parameters, prompts scaled to {times['context']:,} tokens, {n} events a rule, medians of ratios to a full prefill in the same event; CPU seconds "
        f"of {machine['threads']} thread, and the clock's, on {machine['cpu']} shared with other work (load {machine['load_average']} at the start, {times['load_at_end'][0]} at the end); "
        f"commit {machine['commit'][:7]}. All that stood there was placed from canonical KV, so `auto` had the whole context to repair: its dearest case.",
        "", *table(head, body), "",
    ]  # fmt: skip


def drifted(found: dict[str, Any]) -> list[str]:
    """Return the tables of drift."""
    machine = found["machines"]["drift"]
    lines = [
        "## What is lost", "",
        "KL (nats, mean over the answer's tokens) and share of equal first choices against a full prefill of the edited prompt, at every request from the first edit on, in a context "
        f"that lives through the whole run. Commit {machine['commit'][:7]}.", "",
    ]  # fmt: skip
    for world, title in WORLDS.items():
        if world not in found["drift"]:
            continue
        mine = found["drift"][world]
        rows = {(r["rule"], r["way"]): r for r in mine["rows"]}
        body = []
        for rule in dict.fromkeys(rule for rule, _ in rows):
            cells = [rows[rule, way] for way in ("none", "auto", "auto 15 %")]
            body.append([rule, str(cells[0]["n"]), *(f"{c['kl'][0]:.2g}, {c['top1']:.1%}" for c in cells), *right(world, cells)])  # fmt: skip
        head = ["rule", "requests", "no repair", "`auto` 5 %", "`auto` 15 %"]
        head += ["right, `auto` 5 %", "right, full prefill"] if world == "world" else []
        tokens = mine["tokens"]
        lines += [f"{title}, {len(tokens)} runs of {min(tokens):,} to {max(tokens):,} tokens:", "", *table(head, body), ""]  # fmt: skip
    return lines


def right(world: str, cells: list[dict[str, Any]]) -> list[str]:
    """Return how many answers are right, where the model is asked for facts that still stand there."""
    return [f"{cells[1]['right']:.1%}", f"{cells[1]['full']:.1%}"] if world == "world" else []


def errata(found: dict[str, Any]) -> list[str]:
    """Return the table of errata and replacements."""
    at = {(r["way"], r["kind"]): r for r in found["rows"]}
    ways = dict.fromkeys(way for way, _ in at)
    body = []
    for way in ways:
        cells = [f"{at[way, k]['right'][0]:.1%}, {at[way, k]['kl'][0]:.1g}" for k in KINDS]
        body.append([way, *cells, f"{at[way, 'corrected']['computed']:.0f}"])
    one = found["rows"][0]
    about = (
        f"{one['n']} contexts of about {one['tokens']:.0f} tokens, one fact of each put right; replies right of three questions, and the mean KL (nats) "
        f"to a full prefill of the edited truth, which is right {min(r['full'] for r in found['rows']):.0%} of the time. *Computed*: tokens for the edit, "
        f"repaired ones included, the question not. The bundled model; {found['machine']['cpu']}, commit {found['machine']['commit'][:7]} "
        "([bench/amend.py](../bench/amend.py))."
    )
    head = ["what was done", *KINDS.values(), "computed"]
    return ["## An erratum or a replacement", "", about, "", *table(head, body), ""]

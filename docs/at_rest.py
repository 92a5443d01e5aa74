"""The tables of docs/repair.md on what is learned while nobody asks."""

from __future__ import annotations

from math import exp, log
from statistics import fmean
from typing import Any

from tables import table


def learned(found: dict[str, Any] | None) -> str:
    """Return regrets after so many answers."""
    if found is None:
        return ""
    rows, machine, setup = found["rows"], found["machine"], found["setup"]
    counts, shares = setup["answers"], list(dict.fromkeys(r["share"] for r in rows))
    at = {(r["model"], r["share"], r["answers"]): r for r in rows}
    last = counts[-1]
    body = []
    for model in dict.fromkeys(r["model"] for r in rows):
        cells = [
            f"{at[model, s, 0]['regret']:.2f}, {at[model, s, counts[1]]['regret']:.2f}, **{at[model, s, last]['regret']:.2f}** "
            f"[{at[model, s, last]['between'][0]:.2g}, {at[model, s, last]['between'][1]:.2g}]"
            for s in shares
        ]
        body.append([model, *cells])
    sums = []
    for n in counts:
        mine = [r for r in rows if r["answers"] == n]
        over = [r for r in mine if r["regret"] > 1.2]
        least = sum(r["between"][0] > 1.2 for r in mine)
        worst = max(mine, key=lambda r: float(r["regret"]))
        mean = exp(fmean(log(r["regret"]) for r in mine))
        sums.append([
            str(n), f"{len(over)} of {len(mine)}", str(least),
            f"{worst['regret']:.2f}, {worst['model']} {100 * worst['share']:.0f} %", f"{mean:.2f}",
        ])  # fmt: skip
    lines = [
        "",
        "Learned while nobody asks: regret of `auto` after no answer, after "
        f"{counts[1]}, and **after {last}**, geometric means of {setup['draws']} draws (in brackets what nine of ten draws are "
        f"between); on {machine['cpu']}, commit {machine['commit'][:7]} ([bench/learned.py](../bench/learned.py)).",
        "",
        *table(["model", *(f"{100 * s:.0f} %" for s in shares)], body),
        "",
        *table(["answers", "above 1.2", "nine of ten draws, too", "worst", "geometric mean"], sums),
        "",
    ]
    return "\n".join(lines)


def rare(found: dict[str, Any] | None) -> str:
    """Return what learning costs questions that are seldom asked."""
    if found is None:
        return ""
    machine, setup = found["machine"], found["setup"]
    at = {(r["references"], r["earned"] is None): r for r in found["rows"]}
    body = []
    for often in dict.fromkeys(r["references"] for r in found["rows"]):
        told = [at[often, False], at[often, True]]
        right = ["-" if r["right"] is None else f"{r['right']:.2f}" for r in told]
        times = [f"{r['kl'] / r['usual_kl']:.2g}" for r in told]
        body.append([f"{100 * often:g} %", right[0], times[0], right[1], times[1]])
    head = ["references", "right, ways earned", "KL over the usual way's", "right, nearest taken", "KL over the usual way's"]  # fmt: skip
    usual, once = (
        fmean(found["right"][name][way] for name in ("P2", "P7")) for way in ("2@1@2", "2@1@1")
    )
    about = (
        "What learning costs questions that are seldom asked: the bundled model without its calibration, at "
        f"{100 * setup['share']:g} %, {setup['streams']} streams of {setup['answers']} audited answers, of which some are references (of these the usual way "
        f"has {usual:.2f} right, one round of it {once:.2f}), where a way has to earn it and where it is taken as soon "
        f"as it comes nearer; on {machine['cpu']}, commit {machine['commit'][:7]} ([bench/rare.py](../bench/rare.py))."
    )
    return "\n".join(["", about, "", *table(head, body), ""])

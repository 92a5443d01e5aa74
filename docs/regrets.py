"""The tables of docs/repair.md: regrets over the bench of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import table

Row = dict[str, Any]
FIGURE = Path(__file__).parent / "repair.png"
ABOUT = "KL to a full prefill against what a repair computes, a panel a model"
KEEPS = {
    "gemma3-slide": "rows, in windows", "deepseek-last": "latents",
    "qwen3next-one": "states and rows",
}  # fmt: skip
CHOSEN = "auto chosen"
WORD = {0.02: "2 %", 0.05: "5 %", 0.10: "10 %", 0.15: "15 %", 0.30: "30 %"}


def regrets(found: dict[str, Any] | None) -> str:
    """Return the numbers of docs/repair.md."""
    if found is None:
        return ""
    rows, setup, machine = found["rows"], found["setup"], found["machine"]
    lines = [
        f"Measured with {setup['n']} documents a model, {setup['asked']} questions each, on {machine['cpu']}, commit "
        f"{machine['commit'][:7]} ([bench/regret.py](../bench/regret.py)).",
        *(
            f"`{name}`: on {m['cpu']}, commit {m['commit'][:7]}."
            for name, m in sorted(found.get("later", {}).items())
        ),
        "",
        *([f"![{ABOUT}](repair.png)", ""] if FIGURE.exists() else []),
        *drift(rows),
        *worst(rows),
        *itself(rows),
        *each(found["left_out"]),
    ]
    return "\n".join(lines)


def drift(rows: Sequence[Row]) -> list[str]:
    """Return the table of how far each model is from a full prefill, by what its layers keep."""
    at = {(r["model"], r["strategy"], r["share"]): r for r in rows}
    body = []
    for name in sorted(
        {r["model"] for r in rows}, key=lambda name: (KEEPS.get(name, "rows"), name)
    ):
        cells = [at[name, each, share] for each in ("query", "auto") for share in (0.05, 0.15)]
        best = cells[-1]
        body.append([
            name, KEEPS.get(name, "rows"), f"{best['none_kl']:.2g}", *(f"{r['kl'][0]:.2g}" for r in cells),
            f"{best['right'][0]:.2f}", f"{best['full']:.2f}",
        ])  # fmt: skip
    head = ("model", "keeps", "KL unrepaired", "`query` 5 %", "`query` 15 %", "`auto` 5 %", "`auto` 15 %",
            "right with it", "full prefill right")  # fmt: skip
    return [*table(head, body, 2), ""]


def worst(rows: Sequence[Row]) -> list[str]:
    """Return the table of strategies, the worst case of each."""
    body = []
    for name in dict.fromkeys(r["strategy"] for r in rows):
        mine = sorted((r for r in rows if r["strategy"] == name), key=lambda r: -float(r["regret"]))
        middle = mine[len(mine) // 2]["regret"]
        over = sum(r["regret"] > 1.2 for r in mine)
        at = f"{mine[0]['model']}, {WORD[mine[0]['share']]}"
        body.append([f"`{name}`", f"{mine[0]['regret']:.2f}", at, f"{middle:.2f}", f"{over} of {len(mine)}"])  # fmt: skip
    body.sort(key=lambda cells: float(cells[1]))
    return [*table(["strategy", "worst", "on", "median", "above 1.2"], body), ""]


def itself(rows: Sequence[Row]) -> list[str]:
    """Return the table of regrets of `auto`, and with the options that other documents of a model chose."""
    at = {(r["model"], r["strategy"], r["share"]): r for r in rows}
    names = sorted({model for model, strategy, _ in at if strategy == CHOSEN})
    body = [
        [
            name,
            *(f"{at[name, 'auto', s]['regret']:.2f}, {between(at[name, CHOSEN, s])}" for s in WORD),
        ]
        for name in names
    ]
    if not body:
        return []
    title = "Regret of `auto` by share, and **with the options that other documents of the model chose**:"
    return [title, "", *table(["model", *WORD.values()], body), ""]


def between(row: Row) -> str:
    """Return a regret and its interval."""
    low, high = row["between"]
    return f"**{row['regret']:.2f}** [{low:.2g}, {high:.2g}]"


def each(rows: Sequence[Row]) -> list[str]:
    """Return the table of models left out, worst first."""
    body = [
        [
            r["left_out"], f"`{r['chosen']}`", WORD[r["share"]], f"{r['cost']:.1%}", f"{r['none_kl']:.2g}",
            f"{r['kl'][0]:.2g} [{r['kl'][1]:.2g}, {r['kl'][2]:.2g}]", f"{r['best_kl']:.2g}", f"`{r['best']}`",
            between(r), f"{r['right'][0]:.2f}", f"{r['full']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip
    head = ("model left out", "chosen", "share", "cost", "KL unrepaired", "KL", "KL of the best", "the best",
            "regret", "right", "full prefill right")  # fmt: skip
    return [*table(head, body, 2), ""]


def equal(found: dict[str, Any] | None) -> str:
    """Return what a first token takes where `auto` and `query` come as near."""
    if found is None:
        return ""
    machine, shares = found["machine"], found["shares"]
    near = ", ".join(
        f"`{model}` {'beyond 30' if share is None else round(100 * share)} %"
        for model, share in shares.items()
    )
    cases = list(found["sizes"][0]["cpu"])
    body = [
        [
            f"{each['size']:,}",
            *(f"{each['cpu'][case]:.1f} ({each['cpu'][case] / each['cpu']['auto 5%']:.2f})" for case in cases),
        ]
        for each in found["sizes"]
    ]  # fmt: skip
    lines = [
        "",
        f"As near as `auto` at 5 % is `query` at: {near}. What a first token takes then, in CPU seconds (and over `auto` 5 %), "
        f"one turn of 24 gone and a new message behind them, 0.2 B, {found['setup']['dtype']}, medians of {found['setup']['rounds']} rounds; on "
        f"{machine['cpu']}, commit {machine['commit'][:7]} ([bench/equal.py](../bench/equal.py)).",
        "",
        *table(["tokens", *(case.replace("%", " %") for case in cases)], body),
        "",
    ]
    return "\n".join(lines)

"""The table of docs/repair.md on splices of prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import table

FIGURE = Path(__file__).parent / "splices.png"
ABOUT = "KL to a full prefill against the share that auto repairs, by model, length and splice"
SHOWN = (("first_k", 0.05), ("query", 0.05), ("auto", 0.02), ("auto", 0.05), ("auto", 0.1),
         ("auto", 0.15), ("auto", 0.3))  # fmt: skip


def spliced(found: dict[str, Any] | None) -> str:
    """Return what splices of prose cost."""
    if found is None:
        return ""
    at = {(r["model"], r["size"], r["splice"], r["method"], r["share"]): r for r in found["rows"]}
    body = []
    for model, size, how in dict.fromkeys(key[:3] for key in at):
        none, some = at[model, size, how, "none", 0.0], at[model, size, how, "auto", 0.05]
        low, high = some["left"][1:]
        body.append([
            model, f"{size:,}", how, str(none["n"]),
            f"{none['kl'][0]:.2g} [{none['kl'][1]:.2g}, {none['kl'][2]:.2g}]",
            *(f"{at[model, size, how, *each]['kl'][0]:.2g}" for each in SHOWN),
            f"{some['left'][0]:.2f} [{low:.2f}, {high:.2f}]",
        ])  # fmt: skip
    head = ("model", "tokens", "splice", "documents", "nothing repaired",
            *(f"`{name}` {share:.0%}".replace("%", " %") for name, share in SHOWN), "left by `auto` 5 %")  # fmt: skip
    machine = found["machine"]
    lines = [
        f"On {machine['cpu']}, commit {machine['commit'][:7]} ([bench/splices.py](../bench/splices.py)).",
        "",
        *([f"![{ABOUT}](splices.png)", ""] if FIGURE.exists() else []),
        *table(head, body, 3),
        "",
    ]
    return "\n".join(lines)

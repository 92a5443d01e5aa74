"""The README's numbers of a GPU, from ``bench/results/gpu.json``; see measured.py."""

from __future__ import annotations

from typing import Any

from tables import table

WAYS = {
    "none/total": "kvweave, no repair",
    "random 5 %/total": "kvweave, `random` repair of 5 %",
    "random 15 %/total": "kvweave, `random` repair of 15 %",
    "auto 5 %/total": "kvweave, `auto` repair of 5 %",
    "full prefill": "plain transformers, full prefill",
}


def on_gpu(found: dict[str, Any] | None) -> list[str]:
    """Return the first token of an 8 B model's shape, and how many tokens a second follow."""
    if found is None:
        return []
    contexts, machine = found["contexts"], found["machine"]
    body = []
    for way, title in WAYS.items():
        row = [title]
        for each in contexts.values():
            ratio = each["full prefill"] / each[way]
            row += [f"{1000 * each[way]:.0f} ms", "" if ratio == 1 else f"**{ratio:.1f}x**"]
        body.append(row)
    columns = [""]
    for n in contexts:
        columns += [f"{int(n):,} tokens", "against full prefill"]
    ((n, decode),) = found["decode"].items()
    most = found["limits"]
    rates = []
    for count, each in decode.items():
        if count.isdigit():
            ours, theirs = (each["tokens_per_s"][way] for way in ("kvweave", "generate"))
            read = most["weights_read_bytes"] + int(count) * int(n) * most["row_bytes"]
            share = ours * read / int(count) / most["copy_gb_per_s"] / 1e9
            rates.append(f"{ours:.0f} for {count} ({ours / theirs:.1f}x, {100 * share:.0f} %)")
    return [
        f"One {machine['device']}, an 8 B model's shape in {found['setup']['dtype']}, random weights: first token when all "
        f"chunks have moved and 64 tokens are new ([bench/gpu.py](bench/gpu.py), commit {machine['commit'][:7]}; `auto` drafts nothing "
        "here, since random weights are sure of nothing: else two steps of decoding more):",
        "",
        *table(columns, body),
        "",
        f"Decoding at {int(n):,} tokens, contexts together, against `model.generate` with as many, and of what reading weights and "
        f"rows once at the speed of a copy ({most['copy_gb_per_s'] / 1000:.1f} TB/s) allows: {', '.join(rates)} tokens a second.",
        "",
    ]

"""The numbers of docs/vllm.md: ``bench/results/vllm.json`` as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tables import table


def in_vllm(found: dict[str, Any] | None) -> str:
    """Return what the page says of the bench; nothing where it was not run."""
    if found is None:
        return ""
    rows = []
    for kind, at in found["edits"].items():
        for case, seconds in at["seconds"].items():
            over = at["x_prefix"][case]
            rows.append(
                [
                    kind,
                    case,
                    f"{seconds:.2f}",
                    f"{at['x_full'][case]['median']:.1f}",
                    f"{over['median']:.1f} [{over['min']:.1f}, {over['max']:.1f}]",
                ]
            )
    head = ["edit", "way", "first token (CPU s)", "times full", "times prefix caching"]
    machine, options = found["machine"], found["options"]
    about = (
        f"{options['context']} tokens, {options['rounds']} rounds, {options['dtype']}, a random Llama of 0.2 B on "
        f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, load {machine['load_average']} at the end, commit `{machine['commit'][:7]}`. "
        "Medians, and the range round by round. `embedded`: kvweave without vLLM, in the same process."
    )
    lines = [*table(head, rows, left=2), "", about]
    edits = list(found["edits"].values())
    over = ", ".join(f"{at['first']['prefix'] / at['first']['auto 5 %']:.1f}" for at in edits)
    lines += ["", _first_edits(edits, over)]
    plain = found.get("plain")
    if plain is not None:
        same = "bit-equal" if plain["bit_equal"] else "NOT bit-equal"
        hits = "the same hits" if plain["hits_equal"] else "OTHER hits"
        ratio = plain["with_over_without"]
        lines += [
            "",
            f"Plain requests with the connector and without, 24 at once: {same}, {hits}, "
            f"{ratio['median']:.2f} of the time [{ratio['min']:.2f}, {ratio['max']:.2f}].",
        ]
    return "\n".join(lines) + "\n"


def _first_edits(edits: Iterable[dict[str, Any]], over: str) -> str:
    """Return what is said of each conversation's first edit, and of what was made ahead of it."""
    told = "Each kind of edit has a conversation of its own, which was computed as it grew."
    ahead = [at["ahead"]["auto 5 %"] for at in edits if at.get("ahead")]
    if not ahead:
        return (
            f"{told} Its first edit also makes the canonical KV of the chunks behind it: {over} times prefix caching "
            "with `auto` 5 %. The table is of those that follow."
        )
    grown, later = [each[0] for each in ahead], [s for each in ahead for s in each[1:]]
    refined = [at["ahead"].get("auto 5 % refined", []) for at in edits]
    rests = [s for each in refined for s in each[1:2]]
    also = (
        f" Where it also prefilled what was woven ([refine](#refine)): {max(rests):.1f} behind the edit."
        if rests
        else ""
    )
    return (
        f"{told} While nobody asked, vLLM made canonical KV ([ahead](#ahead)), which is in none of these figures: of a whole conversation in "
        f"{min(grown):.1f} to {max(grown):.1f} CPU seconds, of what an edit brought in {min(later):.1f} to {max(later):.1f}. "
        f"The first edits, which are not in the table: {over} times prefix caching with `auto` 5 %.{also}"
    )

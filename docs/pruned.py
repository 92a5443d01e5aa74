"""What docs/prune-bench.md says of agents' edits, and of an erratum instead of a replacement."""

from __future__ import annotations

from typing import Any

from tables import table

KINDS = {
    "corrected": "the fact itself",
    "taken over": "taken over from it",
    "other": "another fact",
}


def pruned(amended: dict[str, Any] | None) -> str:
    """Return the measured part of the page; nothing where nothing was measured."""
    return "\n".join(["", *(errata(amended) if amended else []), ""])


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

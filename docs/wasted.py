"""What docs/concepts.md says of memory that no later token sees."""

from __future__ import annotations

from typing import Any

from tables import table

HOW = {
    "uniform": "pages of one size",
    "slabs": "slabs of unequal pages",
    "edits": "rows here",
    "full": '`keep="full"`',
    "pooled": "the same, pooled",
}


def wasted(found: dict[str, Any] | None) -> str:
    """Return the table; nothing where it was not measured."""
    if found is None:
        return ""
    rows = [
        [name, *(f"{100 * at[how]['waste']:.1f} %" if how in at else "-" for how in HOW)]
        for name, at in found["mixes"].items()
    ]
    machine = found["machine"]
    about = (
        f"Means over {found['contexts']} contexts of the trace `{found['trace']}`, {found['alive']} alive at a time, with widths divided "
        f"so that they fit; commit `{machine['commit'][:7]}`. The first two are modelled, the others are this engine's rows."
    )
    return "\n".join(["", *table(["mix of layers", *HOW.values()], rows), "", about, "", ""])

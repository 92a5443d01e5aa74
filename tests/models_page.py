"""Writes docs/models.md: what kvweave makes of every model type of `tests/zoo.py`.

``make models`` runs all of them, in about a minute. `tests/test_models.py` compares the page with
what the battery says now.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import battery
import torch
import transformers
import zoo
from battery import Found
from layer_kinds import CLASSES, UNBUILT

FILE = Path(__file__).parents[1] / "docs" / "models.md"
NOTE = "<!-- made by tests/models_page.py: run `make models` -->"
VERSION = re.compile(r"transformers (\d+\.\d+\.\d+)")
ROW = re.compile(r"^\| `([\w.-]+)` \|.*\|$", re.M)
MEANS = {
    "exact": "the logits are those of a full prefill by transformers itself, wherever rows come from",
    "fixed": "exact likewise, but rows contain their position: a chunk that would stand elsewhere than where it was computed"
    ' is computed there again, and `engine.can("move")` is no',
    "refused": "`put` and `context` raise `CannotRun` with the cause; nothing is computed",
    "not tried": "there is no tiny model of it, for the reason that its line says",
    "WRONG": "a mistake: results differ from a full prefill and nothing says so",
    "crash": "a mistake: something else is raised than an error of kvweave",
}
HEAD = """\
{note}
# Models

Every causal language model type of transformers {version}, as a tiny random model. Weights are drawn wide, layers of all
kinds that a type has are mixed, and windows are shorter than the text, so that a mistake shows.

{counts}

Held against a copy of the model that kvweave never saw, as transformers runs it alone without a cache, in float32, relative
to the largest logit: less than {tolerance:.0e} is *exact*. The checks are a prefill of {length} tokens; the same over a
prefix that another context left; decoding; stored chunks composed in another order and repaired in full; rows computed again
among others after theirs were spoilt; positions from {far} on; and a chunk placed there as it was stored (to {turned:.0e}, as
angles are rounded there, and not where queries are scaled by their position, a norm comes behind the rotation, or rows are pooled by position). Of *fixed* models instead of the last: stored chunks composed in another order, and edits that
shift what stands behind them, are exact without a repair. The model that is given must stay as it is. In bfloat16 the same must be learned of it.

*Attention of its own*: ours cannot follow it, so the model's own is handed all rows of a context: one context a pass, no `keep`, and no
fused kernel ([concepts.md](concepts.md#attention-of-the-models-own)).

A real model of a type may still be refused: each is looked at and verified when it is loaded, with its own configuration
([concepts.md](concepts.md)).
"""


def line(model_type: str, found: Found) -> str:
    """Return a type's line of the page."""
    verdict = "not tried" if found.verdict == "unbuilt" else found.verdict
    why = found.why.replace("|", "/") or " "
    return f"| `{model_type}` | {verdict} | {found.layers or '-'} | {why} |".replace("|   |", "| |")


def page(everything: Mapping[str, Found]) -> str:
    """Return the text of docs/models.md."""
    verdicts = Counter(
        "not tried" if f.verdict == "unbuilt" else f.verdict for f in everything.values()
    )
    counts = ["| | | |", "|---|---:|---|"]
    counts += [
        f"| {name} | {verdicts[name]} | {means} |"
        for name, means in MEANS.items()
        if verdicts[name]
    ]
    parts = [
        HEAD.format(
            note=NOTE,
            version=transformers.__version__,
            counts="\n".join(counts),
            tolerance=battery.TOLERANCE,
            turned=battery.TURNED,
            length=battery.LENGTH,
            far=battery.FAR,
        )
    ]
    for name in CLASSES:
        mine = {k: f for k, f in everything.items() if (f.kind or UNBUILT) == name}
        rows = [line(model_type, found) for model_type, found in sorted(mine.items())]
        if rows:
            n, fixed = (
                sum(found.verdict == each for found in mine.values()) for each in ("exact", "fixed")
            )
            exact = f"{n} of {len(mine)} exact" + (f", {fixed} fixed." if fixed else ".")
            exact = f"{len(mine)} types." if name == UNBUILT else exact
            head = ["| model type | | layers | cause |", "|---|---|---|---|"]
            parts.append("\n".join([f"## {name}", "", exact, "", *head, *rows, ""]))
    return "\n".join(parts)


def lines(text: str) -> dict[str, str]:
    """Return a page's line of each model type."""
    return {found[1]: found[0] for found in ROW.finditer(text)}


def version(text: str) -> str:
    """Return the version of transformers that a page is about."""
    found = VERSION.search(text)
    assert found is not None, "the page names no version"
    return found[1]


def main() -> None:
    """Examine all types and write the page; say where a line changed."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    was = lines(FILE.read_text()) if FILE.exists() else {}
    everything = {model_type: battery.examine(model_type) for model_type in zoo.TYPES}
    for model_type, found in everything.items():
        if was.get(model_type) != line(model_type, found):
            print(line(model_type, found))
    FILE.write_text(page(everything))
    bad = [k for k, found in everything.items() if found.verdict in ("WRONG", "crash")]
    sys.exit(f"mistakes: {', '.join(bad)}" if bad else None)


if __name__ == "__main__":
    main()

"""The measured tables of docs/memory.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables import table

TITLES = {
    "memory": "memory",
    "summaries": "summaries, no recall",
    "window": "sliding window",
    "everything": "everything kept",
    "attention": "memory, recall by attention",
    "by model": "memory, summaries by the model",
}


def remembered(found: dict[str, Any] | None) -> str:
    """Return the page's tables as Markdown; nothing while there is no result."""
    if found is None:
        return ""
    setup, machine = found["setup"], found["machine"]
    lines = [
        f"The bundled model, {setup['turns']:,} turns, each with a fact of its own, on {machine['cpu']}, one thread "
        f"([bench/memory_loop.py](../bench/memory_loop.py), commit {machine['commit'][:7]}); share of right answers with "
        "95 % intervals and n:",
        "",
        *_asked(found["ways"], setup["ages"]),
        "",
        *_ends(found["ways"]),
        "*Last / first*: median time to the first token of the last tenth of the turns, over that of the first fifth "
        "(the first tenth asks nothing). Memory holds the context's rows and canonical KV.",
        "",
        f"The same over {setup['beside']} turns, of the ways that take longer:",
        "",
        *_asked(found["beside"], setup["beside_ages"]),
        "",
        *_kept({**found["ways"], **found["beside"]}),
        "",
        "Which of the items is the one that tells a fact, asked in the fact's words:",
        "",
        *table(
            ["", "first", "among the first eight"],
            [
                [name, _rate(by["first"]), _rate(by["of_eight"])]
                for name, by in found["rankings"].items()
            ],
        ),
        "",
    ]
    return "\n".join(lines)


def _asked(ways: dict[str, Any], ages: Sequence[int]) -> list[str]:
    head = ["", *(f"after {age} turns" for age in ages), "in memory", "first token", "last / first"]
    rows = [
        [
            TITLES[name],
            *(_rate(by["recall"].get(str(age))) for age in ages),
            f"{by['bytes_last'] / 2**20:.0f} MiB",
            f"{1e3 * by['first_token_s']:.0f} ms",
            "" if by["ratio"] is None else f"{by['ratio']:.2f}",
        ]
        for name, by in ways.items()
    ]
    return table(head, rows)


def _ends(ways: dict[str, Any]) -> list[str]:
    return [
        f"*{TITLES[name].capitalize()}* ends at turn {by['ended']}: {by['tokens_most']:,} tokens, the model takes no more."
        for name, by in ways.items()
        if by["ended"] is not None
    ]


def _kept(ways: dict[str, Any]) -> list[str]:
    """Return how many facts the summaries kept of those they were given."""
    return [
        f"- {TITLES[name]}: summaries kept {by['summaries']['facts_kept']} of {by['summaries']['facts_given']} facts "
        f"they were given, {by['summaries']['empty']} were empty."
        for name, by in ways.items()
        if "summaries" in by
    ]


def _rate(found: Sequence[float] | None) -> str:
    if found is None:
        return "-"
    return f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}], {found[3]:.0f}"

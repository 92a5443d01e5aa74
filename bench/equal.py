"""Time to first token at equal quality: `auto` at 5 %, and `query` at the shares that come as near.

How near `query` has to repair is read off the bench of models (``results/models.json``): for each model the share at
which it is as near a full prefill as `auto` at 5 %. What that takes is timed on the random model of
bench/prune.py: one turn of 24 goes, a new message of 64 tokens comes, the first token is waited for.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from math import log
from statistics import median
from typing import Any

import torch
from common import (
    RESULTS,
    compare,
    full_prefill,
    machine,
    model_pair,
    parser,
    progress,
    report,
    shape_of,
    table,
    took,
)
from prune import N_TURNS, World, first_token, of_turns, stocked

CASES = (("none", 0.0), ("auto", 0.05), ("query", 0.05), ("query", 0.15), ("query", 0.3))
SIZES = (4096, 16384)


def equal_shares(rows: Sequence[dict[str, Any]], share: float = 0.05) -> dict[str, float | None]:
    """Return for each model the share at which `query` is as near as `auto` at ``share``, between two measured ones
    the logarithm of the KL taken to be straight; None: at none that was measured."""
    at = {(r["model"], r["strategy"], r["share"]): r for r in rows}
    found: dict[str, float | None] = {}
    for model in dict.fromkeys(r["model"] for r in rows):
        aim = at[model, "auto", share]
        points = [(0.0, aim["none_kl"])]
        points += sorted(
            (s, r["kl"][0]) for (m, how, s), r in at.items() if (m, how) == (model, "query")
        )
        found[model] = None
        for (x, before), (x_next, after) in pairwise(points):
            if after <= aim["kl"][0] <= before and after < before:
                part = (log(before) - log(aim["kl"][0])) / (log(before) - log(after))
                found[model] = round(x + part * (x_next - x), 3)
                break
    return found


def make_world(options: Namespace, size: int) -> World:
    """Put 24 turns, and weave a context for each case."""
    pair = model_pair(shape_of(options), options.dtype, options.device, size + 2048)
    world = stocked(pair, size)
    for name, share in CASES:
        context = of_turns(world, f"{name}-{share:g}", name, share)
        world.contexts[f"{name} {share:.0%}"] = context
        first_token(world, context, lambda c: None, world.suffix())  # rows get their memory
    return world


def measure(options: Namespace, size: int) -> dict[str, Any]:
    """Return medians of each case, and the ratio of each `query` to `auto`, round by round."""
    world = make_world(options, size)
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with progress(f"{size} tokens", options.rounds * (len(CASES) + 1)) as step:
        for i in range(options.rounds):
            spare = world.put(f"new/{i}", len(world.turns[f"turn/{i}"]))
            suffix = world.suffix()
            order = list(world.contexts.items())
            for name, context in order[:: 1 if i % 2 else -1]:
                split = first_token(world, context, lambda c: c.drop(c.oldest()), suffix)
                context.append_chunk(spare)
                clock.setdefault(name, []).append(split["total"])
                cpu.setdefault(name, []).append(split["cpu"])
                step(name)
            names = [f"turn/{j}" for j in range(i + 1, N_TURNS)]
            whole = torch.cat(
                [world.ids(names), torch.tensor([suffix], device=world.pair.device)], 1
            )
            pace = took(lambda x=whole: full_prefill(world.pair, x), world.pair.device)
            clock.setdefault("full prefill", []).append(pace[0])
            cpu.setdefault("full prefill", []).append(pace[1])
            step("full prefill")
    world.engine.close()
    return {
        "size": size,
        "seconds": {name: round(median(times), 3) for name, times in clock.items()},
        "cpu": {name: round(median(times), 3) for name, times in cpu.items()},
        "over_auto": {name: compare(times, clock["auto 5%"]) for name, times in clock.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    made = parser(__doc__)
    made.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options = made.parse_args(argv)
    torch.set_num_threads(options.threads)
    shares = equal_shares(json.loads((RESULTS / "models.json").read_text())["rows"])
    found = [measure(options, size) for size in options.sizes]
    told = [
        (f"{each['size']:,}", name, each["seconds"][name], each["cpu"][name], each["over_auto"][name]["median"])
        for each in found
        for name in each["seconds"]
    ]  # fmt: skip
    about = {"rounds": options.rounds, "threads": options.threads, "dtype": options.dtype}
    report(
        {"machine": machine(torch.device(options.device)), "setup": about, "shares": shares, "sizes": found},
        [
            table("first token", ["tokens", "case", "s", "CPU s", "over auto 5 %"], told),
            table("as near as auto 5 %", ["model", "query at"], [(m, "beyond 30 %" if s is None else f"{s:.0%}") for m, s in shares.items()]),
        ],
        options,
        "equal",
    )  # fmt: skip


if __name__ == "__main__":
    main()

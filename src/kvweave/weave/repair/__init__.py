"""Which rows of placed chunks to recompute against the woven context.

One small class a strategy, one file an idea, found by name in `STRATEGIES`. A strategy only
chooses; the recompute always uses the exact mask ``key_position <= query_position``. `random` is
the baseline that any other has to beat.
"""

from __future__ import annotations

from kvweave.errors import InvalidArgument
from kvweave.weave.repair.auto import Auto
from kvweave.weave.repair.base import Strategy, Verdict, View, Wish
from kvweave.weave.repair.baseline import Full, NoRepair, Random
from kvweave.weave.repair.boundary import Boundary
from kvweave.weave.repair.deps import Deps
from kvweave.weave.repair.deviation import Deviation
from kvweave.weave.repair.first_k import FirstK
from kvweave.weave.repair.options import made
from kvweave.weave.repair.patch import PatchRepair
from kvweave.weave.repair.query import Query
from kvweave.weave.repair.rollout import Rollout

STRATEGIES: dict[str, type[Strategy]] = {
    s.name: s
    for s in (
        Auto,
        NoRepair,
        FirstK,
        Boundary,
        Deviation,
        Query,
        Rollout,
        Deps,
        PatchRepair,
        Random,
        Full,
    )
}


def strategy(which: str | Strategy) -> Strategy:
    """Return a strategy by name, or as given.

    Options stand behind the name: ``first_k:16``, ``patch:8``, ``deviation:k@2``, ``rollout:2@0``.
    Raises InvalidArgument for an unknown name or option.
    """
    if not isinstance(which, str):
        return which
    name, colon, options = which.partition(":")
    if name not in STRATEGIES:
        raise InvalidArgument("repair", f"no strategy {name!r}", f"one of {', '.join(STRATEGIES)}")
    return made(STRATEGIES[name], options.split("@") if colon else [])


__all__ = [
    "STRATEGIES",
    "Auto",
    "Boundary",
    "Deps",
    "Deviation",
    "FirstK",
    "Full",
    "NoRepair",
    "PatchRepair",
    "Query",
    "Random",
    "Rollout",
    "Strategy",
    "Verdict",
    "View",
    "Wish",
    "strategy",
]

"""Which rows of placed chunks to recompute against the woven context.

One small class a strategy, one file an idea, found by name in `STRATEGIES`. A strategy only
chooses; the recompute always uses the exact mask ``key_position <= query_position``. `random` is
the baseline that any other has to beat.
"""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import InvalidArgument
from kvweave.weave.repair.base import Strategy, View
from kvweave.weave.repair.baseline import Full, NoRepair, Random
from kvweave.weave.repair.deviation import Deviation
from kvweave.weave.repair.first_k import FirstK
from kvweave.weave.repair.query import Query

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    s.name: s for s in (NoRepair, FirstK, Deviation, Query, Random, Full)
}


def strategy(which: str | Strategy) -> Strategy:
    """Return a strategy by name, or as given. Raises InvalidArgument for an unknown name."""
    if not isinstance(which, str):
        return which
    if which not in STRATEGIES:
        raise InvalidArgument("repair", f"no strategy {which!r}", f"one of {', '.join(STRATEGIES)}")
    return STRATEGIES[which]()


__all__ = [
    "STRATEGIES",
    "Deviation",
    "FirstK",
    "Full",
    "NoRepair",
    "Query",
    "Random",
    "Strategy",
    "View",
    "strategy",
]

"""The ends of the scale, and chance: no row, every row, any row."""

from __future__ import annotations

from kvweave.run.base import Ints, Steps
from kvweave.weave.passes import Passes, union
from kvweave.weave.repair.base import Strategy, Verdict, View, Wish, best


class NoRepair(Strategy):
    """Reuse the rows as they are."""

    name = "none"

    def choose(self, view: View) -> Ints:
        """Return no slots."""
        return view.candidates[:0]


class Full(Strategy):
    """Recompute every row: equals a full prefill. With ``records`` it also records what the rows
    read of other chunks, for `deps`."""

    name = "full"

    def __init__(self, records: bool = False) -> None:
        self.records = records

    def choose(self, view: View) -> Ints:
        """Return all candidates."""
        return view.candidates

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Choose all rows, also those of a part that was refined halfway: it is right as a whole then."""
        yield from ()
        spans = [p for p in passes.placed if p.repairable]
        return Verdict(union(passes.slots(spans), passes.early))


class Random(Strategy):
    """Uniformly drawn rows: the baseline."""

    name = "random"

    def choose(self, view: View) -> Ints:
        """Return ``budget`` rows drawn without replacement."""
        return best(view, view.random.random(len(view.candidates)))

"""Rows the question needs, and the rows those need in turn."""

from __future__ import annotations

import numpy as np

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Steps
from kvweave.weave.passes import Floats
from kvweave.weave.repair.base import Strategy, View
from kvweave.weave.repair.first_k import FirstK

LOOKAHEAD = 2


class Rollout(Strategy):
    """Rows the question and the first tokens of a drafted reply attend to; then those that these
    attend to once they are recomputed, weighted by the attention that they got (attention rollout,
    arXiv 2005.00928, section 3.2, over the rows that count); and so on.

    A value that a chunk took over from another one may take several rows to arrive: the one the
    question finds read it from its neighbour, which had looked it up. `query` repairs the first and
    leaves the second. The first layer does not count, since its rows are right anywhere. Every round
    takes a third of what is left of the budget, the last one all (a half, a quarter and a tenth kept
    less on P2 and P7).

    The draft (``lookahead`` tokens, greedy, over the unrepaired context; for the eviction of KV:
    Lookahead Q-Cache, arXiv 2505.20334) shows where the reply will look: a question that ends in a
    header does not yet look up the value, the token in front of it does, right or wrong.

    Costs a pass of the question, one a drafted token, and one of the rows found so far for each
    round but the last; without a question, see `FirstK`.
    """

    name = "rollout"

    def __init__(self, rounds: int = 2, lookahead: int = LOOKAHEAD) -> None:
        if rounds < 1:
            raise InvalidArgument("rounds", f"{rounds} is below 1")
        if lookahead < 0:
            raise InvalidArgument("lookahead", f"{lookahead} is below 0")
        self.rounds, self.draft = rounds, lookahead

    def choose(self, view: View) -> Steps[Ints]:
        """Return ``budget`` rows."""
        mass = yield from view.needs(self.draft)
        if not mass.any():
            return FirstK().choose(view)
        return (yield from follow(view, mass, self.rounds))


def follow(view: View, mass: Floats, rounds: int) -> Steps[Ints]:
    """Return ``budget`` slots, from those with most ``mass`` [candidate] on."""
    mass, chosen = mass.copy(), np.zeros(len(mass), bool)
    budget = min(view.budget, len(mass))
    for left in range(rounds, 0, -1):
        n = budget - int(chosen.sum())
        take = n if left == 1 else -(-n // 3)
        top = np.argsort(np.where(chosen, 1.0, -mass), kind="stable")[:take]
        new = np.sort(top[mass[top] > 0] if left > 1 else top)
        chosen[new] = True
        if left > 1 and len(new):
            weights = mass[new] / mass[new].sum() * mass.sum()
            mass += yield from view.reads(view.candidates[new], weights)
    return view.candidates[chosen]

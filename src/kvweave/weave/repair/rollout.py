"""Rows the question needs, and the rows those need in turn."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Steps
from kvweave.weave.calibration import DRAFT
from kvweave.weave.passes import Floats
from kvweave.weave.repair.base import Strategy, View
from kvweave.weave.repair.first_k import FirstK

LOOKAHEAD = DRAFT
ANY = 1.0  # of the mean need, for each row: what the rest of the reply will look at is not known
HOP = 0.3  # what reaches the question over a row that read it, beside what reaches it at once
ROUND = 6  # rows that a round but the last takes at most: each is computed once more


class Rollout(Strategy):
    """Rows the question and the first tokens of a drafted reply need; then those that these read
    once they are recomputed, each reader counting what it is needed; and so on: attention rollout
    (arXiv 2005.00928, section 3.2) over the rows that count, and with squares (`Mass`). Rows whose
    values a repair hardly changes count less (`View.change`).

    A value that a chunk took over from another one may take several rows to arrive: the one the
    question finds read it from its neighbour, which had looked it up. `query` repairs the first and
    leaves the second. The first layer does not count, since its rows are right anywhere. A round
    takes a third of the budget, but few rows, the last one what is left (docs/LOG.md, 2026-11-25).

    The draft (``lookahead`` tokens, greedy, over the unrepaired context; for the eviction of KV:
    Lookahead Q-Cache, arXiv 2505.20334) shows where the reply will look: a question that ends in a
    header does not yet look up the value, the token in front of it does, right or wrong.

    Costs a pass of the question, one a drafted token, and one of the rows found so far for each
    round but the last; without a question, see `FirstK`.
    """

    name = "rollout"
    looks = True

    def __init__(self, rounds: int = 2, lookahead: int = LOOKAHEAD) -> None:
        if rounds < 1:
            raise InvalidArgument("rounds", f"{rounds} is below 1")
        if lookahead < 0:
            raise InvalidArgument("lookahead", f"{lookahead} is below 0")
        self.rounds, self.draft = rounds, lookahead

    def choose(self, view: View) -> Steps[Ints]:
        """Return ``budget`` rows."""
        need = yield from view.needs(self.draft)
        if not need.any():
            return FirstK().choose(view)
        return (yield from follow(view, need, self.rounds))


def follow(
    view: View, need: Floats, rounds: int, taken: NDArray[np.bool_] | None = None
) -> Steps[Ints]:
    """Return ``budget`` slots, from those with most ``need`` [candidate], known or not, times change
    on; those of ``taken`` [candidate] are among them."""
    need, change = view.pooled(need).copy(), view.change()
    chosen = np.zeros(len(need), bool) if taken is None else taken.copy()
    budget = min(view.budget, len(need))
    for left in range(rounds, 0, -1):
        room, worth = max(0, budget - int(chosen.sum())), (need + ANY * need.mean()) * change
        order = np.argsort(np.where(chosen, 1.0, -worth), kind="stable")
        if left == 1:
            chosen[order[:room]] = True
            break
        new = order[: min(room, ceil(budget / 3), ROUND)]
        new = np.sort(new[need[new] > 0])
        chosen[new] = True
        if len(new) and chosen.sum() < budget:
            read = yield from view.reads(view.candidates[new], need[new])
            need += HOP * view.pooled(read)
    return view.candidates[chosen]

"""The gate: repair the rows that matter, see what that changed, repair more where it is too little.

::

    look          the first rows of chunks, and the question's over them: attention, predictions
    repair        the rows that these need, and a few random ones; all are recomputed
    evidence      what that changed: predictions of the question, values of the random rows
    bound         the model's calibration turns evidence into an upper bound of the drift
    again         over ``max_drift``: the smallest share whose bound is under it, at last all rows

Evidence is taken where something is made of it: a calibration, or who asks for it (`auto:evidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.run.base import NO_SLOTS, Ints, Steps
from kvweave.weave.calibration import CHOICE, RANKED, STRATEGY, Evidence
from kvweave.weave.parts import Placement
from kvweave.weave.passes import Passes, union
from kvweave.weave.recipes import ROUNDS, THIRDS
from kvweave.weave.repair.base import Strategy, Verdict, View, Wish, best
from kvweave.weave.repair.boundary import Boundary
from kvweave.weave.repair.first_k import firsts
from kvweave.weave.repair.options import made
from kvweave.weave.repair.query import Query
from kvweave.weave.repair.rollout import LOOKAHEAD, ROUND, follow

ROWS_A_PASS = 17  # more, for which one row alone takes as long (19 M, 4,200 rows, CPU): see `PASS`
RANKINGS: dict[str, Callable[[], Strategy]] = dict(zip(RANKED, (Query, Boundary), strict=True))
PROBES = 2  # of the rows repaired, drawn at random: an unbiased sample of how stale the rest is


class Auto(Strategy):
    """A hedge: a third of the budget goes to the first rows of every chunk, the rest to rows that the
    question and a drafted reply need, and those they need (`rollout`). Without a question: rows
    that read most of other chunks when they were made; where that was not recorded, the first rows.

    Rows of new text that stand before the question's last ones are computed once, by the look; a
    repair may choose them like placed ones.

    ``lookahead`` tokens are drafted, ``thirds`` of the budget hedged, in ``rounds`` of `rollout`. With all
    three thirds nobody looks, unless evidence is taken: what a look would compute goes to first rows too,
    but in 0 rounds. ``ranked`` as "query" or "boundary": rows are chosen as that strategy does, where there is
    a question.
    Without options a model takes those that it was measured with (`kvweave calibrate`): no single
    set is right for all.
    """

    name = "auto"
    looks = True
    weighs = True  # whether looking is worth it: a bench of the choice asks for it all the same
    hedge, rounds = THIRDS / 3, ROUNDS

    def __init__(
        self,
        lookahead: int = LOOKAHEAD,
        thirds: int | None = None,
        rounds: int | None = None,
        evidence: bool = False,
        ranked: str = "",
    ) -> None:
        if ranked and (ranked not in RANKINGS or (thirds, rounds) != (None, None)):
            raise InvalidArgument(
                "ranked", f"{ranked!r} is none of {', '.join(RANKINGS)}, or has thirds or rounds"
            )
        if lookahead < 0:
            raise InvalidArgument("lookahead", f"{lookahead} is below 0")
        if thirds is not None and not 0 <= thirds <= 3:
            raise InvalidArgument("thirds", f"{thirds} is not from 0 to 3")
        if rounds is not None and rounds < (thirds != 3):
            raise InvalidArgument("rounds", f"{rounds} is below {int(thirds != 3)}")
        self.draft, self.evidence = lookahead, evidence
        if thirds is not None:
            self.hedge = thirds / 3
        if rounds is not None:
            self.rounds = rounds
        self.ranking = RANKINGS[ranked]() if ranked else None
        if ranked:
            self.hedge = 0.0

    @property
    def measured_as(self) -> str:
        """The gate, unless somebody chose its options."""
        return "" if {"hedge", "rounds"} & set(vars(self)) else f"auto:{self.draft}:{CHOICE}"

    def choose(self, view: View) -> Steps[Ints]:
        """Return ``budget`` rows."""
        passes = view.passes
        if passes.looked is not None and passes.looked.mass[view.candidates].any():
            need = passes.looked.mass[view.candidates]
            ahead = np.isin(view.candidates, passes.ahead)
            hedged = ahead | firsts(view, round(self.hedge * view.budget))
            # a round costs a replay of all states, and does not pay (docs/LOG.md, 2026-11-24)
            rounds = 1 if passes.replays else max(1, self.rounds)
            chosen = yield from follow(view, need, rounds, hedged)
            return np.setdiff1d(chosen, passes.ahead)
        read = view.dependence()
        if self.hedge == 1 and len(passes.unready):
            return best(
                view, np.where(view.depth() < inf, 1 / (1 + view.depth()), read - view.passes.n)
            )
        return best(view, read if read.any() else -view.depth())

    def select(
        self, passes: Passes, spans: Sequence[Placement], candidates: Ints, share: float
    ) -> Steps[Ints]:
        """As the strategy by which rows are ranked, if there is one and a question."""
        chooses = self.ranking.select if self.ranking and len(passes.unready) else super().select
        return (yield from chooses(passes, spans, candidates, share))

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Repair ``wish.share`` of the rows that are not exact, or as many as a bound takes.

        Without a question nothing tells what matters: a bound then takes all rows. So does a
        context of which most is new: looking at it would compute the new rows once more, which
        costs more.
        """
        if wish.recipe is None:
            return (yield from self._repair(passes, wish))
        mine = made(Auto, wish.recipe.split("@"))
        mine.evidence = self.evidence
        return (yield from mine._repair(passes, wish))

    def _repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        stale = [p for p in passes.placed if p.ready and not p.exact and not p.part.virtual]
        spans = [p for p in stale if not p.patched]
        candidates = passes.candidates(spans)
        if not len(passes.unready) or not len(candidates):
            if wish.max_drift is None or not spans:
                new = [p for p in spans if p.due or p.source != "kept"]  # else it was chosen before
                return Verdict(
                    (yield from self.select(passes, new, passes.candidates(new), wish.share))
                )
            return (yield from self._everything(passes, stale, None))
        if not (wish.share or self.evidence or wish.max_drift is not None):  # nothing is wanted
            return Verdict(NO_SLOTS)
        if len(passes.slots(stale)) <= len(passes.unready):
            return Verdict(passes.slots(stale), 0.0)
        if self.weighs and self._is_dear(passes, len(candidates), wish):
            return Verdict(passes.slots(stale), 0.0)
        known = None if passes.lossy else wish.calibration
        passes.compares = bool(known or self.evidence or wish.max_drift is not None)
        budget = round(wish.share * len(candidates))
        if self.hedge == 1 and not passes.compares:
            saved = len(passes.question) + LOOKAHEAD + ROUND if self.rounds else 0
            share = min(1.0, (budget + saved) / len(candidates))
            return Verdict((yield from self.select(passes, spans, candidates, share)))
        looks = self.ranking is None and budget < len(
            candidates
        )  # what is repaired whole needs none
        if passes.compares or looks:
            if not (passes.again or passes.replays):
                view = View(passes, spans, candidates, budget, np.random.default_rng(0))
                passes.ahead = candidates[firsts(view, round(self.hedge * budget))]
            yield from passes.look(self.draft)
            candidates = union(candidates, passes.early)
        if not passes.compares:
            return Verdict((yield from self.select(passes, spans, candidates, wish.share)))
        evidence, chosen, end = yield from self._try(passes, spans, candidates, wish.share)
        bounds = {} if known is None else known.bounds(evidence)
        if wish.max_drift is None:
            bound = bounds.get(wish.share, inf)
            return Verdict(chosen, bound if bound < inf else None, evidence, True, end)
        for wider, bound in bounds.items():
            if bound <= wish.max_drift:
                if wider > wish.share:
                    more = yield from self.select(passes, spans, candidates, wider)
                    chosen = union(chosen, more)
                    end = _last(passes, (yield from passes.recompute(chosen)))
                return Verdict(chosen, bound, evidence, True, end)
        return (yield from self._everything(passes, stale, evidence))

    def _is_dear(self, passes: Passes, n: int, wish: Wish) -> bool:
        """Tell whether to look, draft and follow takes as long as to repair all ``n`` rows, which is exact."""
        named = wish.recipe is None and self.measured_as != STRATEGY
        if named or self.evidence:  # somebody asks for just this way
            return False
        more = len(passes.question) + LOOKAHEAD + ROUND + ROWS_A_PASS * (LOOKAHEAD + ROUNDS)
        return n <= round(wish.share * n) + more

    def _everything(
        self, passes: Passes, stale: Sequence[Placement], evidence: Evidence | None
    ) -> Steps[Verdict]:
        slots = union(passes.slots(stale), passes.early)
        end = _last(passes, (yield from passes.recompute(slots)))
        return Verdict(slots, 0.0, evidence, True, end)

    def _try(
        self, passes: Passes, spans: Sequence[Placement], candidates: Ints, share: float
    ) -> Steps[tuple[Evidence, Ints, torch.Tensor | None]]:
        """Recompute the chosen and a few random rows; return what that showed, and all of them."""
        look = yield from passes.look(self.draft)
        budget = round(share * len(candidates))
        n_probes = min(PROBES, budget // 8) if budget < len(candidates) else 0
        share_left = (budget - n_probes) / len(candidates)
        chosen = yield from self.select(passes, spans, candidates, share_left)
        rest = np.setdiff1d(candidates, union(chosen, passes.ahead))
        order = np.random.default_rng(len(candidates)).permutation(len(rest))
        probes = np.sort(rest[order[:n_probes]])
        todo = union(chosen, probes)
        old = passes.placed_values(todo)
        logits = yield from passes.recompute(todo)
        after, was = logits.float().log_softmax(-1), look.logits.float().log_softmax(-1)
        kl = (after.exp() * (after - was)).sum(-1).clamp_min(0)
        changes = torch.zeros(len(todo), device=kl.device)
        for layer, before in enumerate(old):
            new = passes.rows.read(layer, todo)[1]
            far = (new - before).float().flatten(1).norm(dim=1)
            changes += far / new.float().flatten(1).norm(dim=1).clamp_min(1e-30) / len(old)
        seen = torch.cat([kl.mean()[None], kl.max()[None], changes]).double().cpu().numpy()
        changed, whole = seen[2:], max(float(look.mass.sum()), 1e-30)
        paid, right = look.mass[todo], union(todo, passes.ahead)
        evidence = Evidence(
            share=share,
            moved=float(seen[0]),
            moved_max=float(seen[1]),
            stale=float(changed[np.isin(todo, probes)].mean()) if len(probes) else 0.0,
            left=max(0.0, float(look.mass[candidates].sum() - look.mass[right].sum())) / whole,
            changed=float((changed * paid).sum()) / whole,
        )
        return evidence, todo, _last(passes, logits)


def _last(passes: Passes, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of the context's last row, if it is one of the question's."""
    n_draft = 0 if passes.looked is None else len(passes.looked.draft)
    ends = len(passes.unready) and int(passes.unready[-1]) == passes.n - 1
    return logits[len(logits) - 1 - n_draft] if ends else None

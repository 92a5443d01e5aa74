"""Calibrations from outcomes with a known law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvweave.chunk.identity import ModelFingerprint
from kvweave.suite.calibrate import SHARES, Kept, fit, gather, halves
from kvweave.suite.exam import Trial

MINE = ModelFingerprint("m", "w", "t", "float32", "r")


def outcomes(n, seed=0):
    """The KL is ten times what the repair moved, times noise; wider repairs leave a tenth."""
    rng, found = np.random.default_rng(seed), []
    for i in range(n):
        moved = 10 ** rng.uniform(-5, 0)
        for share in SHARES:
            kl = 10 * moved * 10 ** rng.normal(0, 0.1) * (0.1 if share > 0.05 else 1)
            evidence = {"share": share, "moved": moved, "moved_max": moved, "stale": 0.1}
            evidence |= {"left": 0.2, "changed": 0.1}
            found.append(
                Trial("P1", i, 0, "recall", "", f"auto {share:.0%}", float(kl < 0.1), kl, 0.0,
                        candidates=100, repaired=round(100 * share), evidence=evidence)
            )  # fmt: skip
    return found


def test_only_questions_with_evidence_at_every_share_are_taken():
    found = outcomes(3)
    assert [len(s.kl) for s in gather(found)] == [3, 3, 3]
    assert len(gather(found[1:])) == 2
    assert gather([o for o in found if o.method == "auto 5%"]) == []


def test_a_bound_covers_and_is_not_far_off():
    made = fit(gather(outcomes(2000)), MINE)
    fresh = gather(outcomes(2000, seed=1))
    kept = Kept.of(made, fresh, None, 0.05)
    assert kept.under > 0.96 and kept.repaired == pytest.approx(0.05) and kept.full == 0
    ratio = [made.bounds(s.evidence[0.05])[0.05] / s.kl[0.05] for s in fresh]
    assert 1 < np.median(ratio) < 5


def test_a_tighter_bound_repairs_more_and_is_kept():
    made = fit(gather(outcomes(2000)), MINE)
    fresh = gather(outcomes(2000, seed=1))
    loose, tight = (Kept.of(made, fresh, bound, 0.05) for bound in (1.0, 0.01))
    assert 0.05 < loose.repaired < tight.repaired < 1 and loose.full < tight.full
    assert loose.within > 0.96 and tight.within > 0.96 and tight.right >= loose.right


def test_too_few_questions_are_refused():
    with pytest.raises(ValueError, match="too few"):
        fit(gather(outcomes(20)), MINE)


def test_each_half_is_tested_by_the_other():
    found = [replace(o, protocol=f"P{i}") for i in (1, 2, 3) for o in outcomes(300, seed=i)]
    made = halves(gather(found), MINE, [None, 0.1])
    assert [(m["fit_on"], m["tested_on"], m["max_drift"]) for m in made] == [
        (["P1", "P3"], ["P2"], None), (["P1", "P3"], ["P2"], 0.1),
        (["P2"], ["P1", "P3"], None), (["P2"], ["P1", "P3"], 0.1),
    ]  # fmt: skip
    assert [m["n"] for m in made] == [300, 300, 600, 600]
    assert all(m["under"] > 0.95 for m in made)
    with pytest.raises(ValueError, match="too few"):
        halves(gather(found[:900]), MINE, [None])  # of one protocol: no other half


def test_of_evidence_outside_what_was_seen_nothing_is_known():
    seen = gather(outcomes(400))
    made = fit(seen, MINE)
    assert all(b < float("inf") for s in seen for b in made.bounds(s.evidence[0.05]).values())
    strange = replace(seen[0].evidence[0.05], stale=0.0)  # no random row was looked at
    assert set(made.bounds(strange).values()) == {float("inf")}

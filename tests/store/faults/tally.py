"""Counts what was done to the store and what came of it; one table at the end of a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from store.faults.verbs import Verdict

LOG = os.environ.get("KVWEAVE_FAULT_LOG", "")
FAULTS = ("wrong", "lost", "hintless", "late")


class Tally:
    """Of one test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []

    def did(self, what: str, n: int = 1) -> None:
        self.counts[what] += n

    def judge(self, verdict: Verdict, where: str, *, but: Iterable[str] = ()) -> None:
        """Take note of what a look found at ``where``; ``but`` names what may be lost there."""
        may = set(but)
        if verdict.refused:
            self.did("refused with a hint" if not verdict.hintless else "refused without one")
        for kind, found in verdict.faults.items():
            for each in found:
                if kind == "lost" and each.split(":")[0] in may:
                    continue
                self.fault(kind, f"{where}: {each}")

    def fault(self, kind: str, what: str) -> None:
        self.did(kind)
        self.found.append(f"{kind}: {what}")
        if LOG:  # long runs can be watched
            with Path(LOG).open("a") as file:
                file.write(f"{kind}: {what}\n")

    def settle(self) -> None:
        """Fail with all that was found."""
        shown = "\n".join(self.found[:40])
        assert not self.found, f"{len(self.found)} faults: {dict(self.counts)}\n{shown}"


def table(counts: Iterable[dict[str, int]]) -> list[str]:
    """Return the lines of the table that ends a run."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    if not total:
        return []
    total.update(dict.fromkeys(FAULTS, 0))
    kinds = [k for k in total if k not in FAULTS]
    return [
        *(f"{total[kind]:8,} {kind}" for kind in sorted(kinds)),
        *(f"{total[kind]:8,} {kind}" for kind in FAULTS),
    ]

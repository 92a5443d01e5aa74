"""What the rows of one context hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvweave.run.base import Ints, Rows
from kvweave.run.upload import up
from kvweave.store.kv import KV, joined
from kvweave.weave.parts import Placement


@dataclass(slots=True)
class State:
    """The rows of a context and where each came from, as the last weave left them.

    While a weave is under way nothing counts as ``woven``, so that an error leaves nothing half
    done.
    """

    name: str  # unique among the contexts of all namespaces
    rows: Rows
    keeps: bool = False  # survivors of a prune keep what they saw: their raw KV is kept too
    tenant: str = ""
    woven: list[Placement] = field(default_factory=list)
    own: dict[int, KV] = field(default_factory=dict)  # uid -> raw KV computed in this context
    redone: dict[int, tuple[Ints, KV]] = field(default_factory=dict)  # uid -> repaired rows, raw
    before: dict[int, Placement] = field(default_factory=dict)  # uid -> as it was last woven
    known: set[int] = field(default_factory=set)  # uids that were woven here before
    lossy: set[int] = field(default_factory=set)  # uids whose rows went through something lossy
    repaired: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # [slot]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the KV that is kept beside the rows."""
        redone = (kv for _, kv in self.redone.values())
        return sum(kv.n_bytes for kv in (*self.own.values(), *redone))

    def repaired_until(self, keep: int, n: int) -> NDArray[np.bool_]:
        """Return which of ``n`` slots were repaired, as far as slots up to ``keep`` still hold."""
        found = np.zeros(n, bool)
        found[: min(keep, len(self.repaired))] = self.repaired[:keep]
        return found

    def inherit(self, placed: Sequence[Placement]) -> None:
        """Give the raw KV of kept rows to the parts that stand there now."""
        for old, p in zip(self.woven, placed, strict=False):
            if p.source != "kept":
                return
            if old.part.uid == p.part.uid and old.part.n == p.part.n:
                continue
            if old.part.uid in self.own:
                self.own[p.part.uid] = self.own[old.part.uid].rows(0, p.ready).clone()
            if old.part.uid in self.redone:
                offsets, kv = self.redone[old.part.uid]
                n = int(np.searchsorted(offsets, p.part.n))
                self.redone[p.part.uid] = offsets[:n], kv.rows(0, n).clone()

    def redone_of(self, p: Placement) -> tuple[Ints, KV] | None:
        """Return the recomputed rows that an evict froze with a part, offsets and raw KV."""
        was = self.before.get(p.part.uid)
        if was is None or not p.part.frozen or (p.source, p.seen) != (was.origin, was.seen):
            return None
        return self.redone.get(p.part.uid)

    def redo(self, uid: int, offsets: Ints, kv: KV) -> None:
        """Keep repaired rows of a part, beside those kept before; the newest of a row counts."""
        if uid in self.redone:
            old, before = self.redone[uid]
            both, kv = np.concatenate([offsets, old]), joined([kv, before])
            offsets, first = np.unique(both, return_index=True)
            at = up(first, kv.k[0].device)
            kv = KV([t[at] for t in kv.k], [t[at] for t in kv.v], kv.lossy)
        else:
            kv = kv.clone()
        self.redone[uid] = offsets, kv

    def remember(self) -> None:
        """Note what the parts are now, and let go of what belongs to parts that are not there."""
        self.before = {p.part.uid: p for p in self.woven}
        uids = set(self.before)
        self.known |= uids
        self.own = {uid: kv for uid, kv in self.own.items() if uid in uids}
        self.redone = {uid: kept for uid, kept in self.redone.items() if uid in uids}
        self.lossy &= uids

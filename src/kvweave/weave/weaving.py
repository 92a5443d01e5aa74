"""A weave under way, between `Weaver.prepare` and `Weaver.commit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvweave.run.base import NO_SLOTS, Ints
from kvweave.run.loop import Request
from kvweave.run.sampling import Sampling
from kvweave.store.kv import KV
from kvweave.weave.audit import AuditCell
from kvweave.weave.deps import Reads
from kvweave.weave.parts import Part, Placement
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Strategy, Wish
from kvweave.weave.state import KeptRows


@dataclass(slots=True)
class Weaving:
    """A weave under way: rows are placed, ``request`` computes the rest, `Weaver.commit` ends it."""

    parts: Sequence[Part]
    strategy: Strategy
    wish: Wish
    sampling: Sampling | None
    n_closing: int = 0  # tokens behind an answer
    plan: Plan | None = None  # once the strategy has chosen
    request: Request = field(init=False)
    placed: list[Placement] = field(default_factory=list)
    tiers: dict[int, str] = field(default_factory=dict)  # chunk -> where its KV was
    computed: Ints = field(default_factory=lambda: NO_SLOTS)  # slots, over all that was repaired
    early: Ints = field(default_factory=lambda: NO_SLOTS)  # slots, over what was not
    ahead: Ints = field(default_factory=lambda: NO_SLOTS)  # of them, those that were placed
    kept: KeptRows = field(default_factory=KeptRows)  # what the context keeps once this is complete
    raw: KV | None = None  # of the computed rows, then of generated ones
    reads: Reads | None = None  # of the same
    cell: AuditCell | None = None  # of the answer, where its rows are not exact
    thinned: bool = False  # chunks are placed of which some rows are gone
    alarm: bool = False  # it is repaired since a promise was not kept
    due: bool = False  # nobody waits: repairs are left to who asks next

    def leaves(self, p: Placement) -> bool:
        """Tell whether the repair of a part's rows is left to who asks next."""
        return self.due and (p.due or p.source != "kept" or p.ready < p.part.n)

    def let_go(self) -> None:
        """It is over: leave no rows to who still knows it."""
        self.raw = self.reads = self.request.raw = self.request.observer = None
        self.kept = KeptRows()

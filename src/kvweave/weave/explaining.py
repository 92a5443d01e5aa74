"""What a weave will do, or did, as a plan: pure bookkeeping over placements."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import itemgetter

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.table import Table
from kvweave.run.base import NO_SLOTS, Ints
from kvweave.store.shelf import Shelf
from kvweave.weave.approximate import of_rows, reasons
from kvweave.weave.parts import Placement, check_placement, spans_of
from kvweave.weave.plan import How, Plan, Span
from kvweave.weave.repair import Verdict
from kvweave.weave.state import State, Went
from kvweave.weave.thinning import said_by
from kvweave.weave.weaving import Weaving


class Explainer:
    """Makes plans of contexts of one engine, whose rows rest as ``codec`` says."""

    def __init__(self, shelf: Shelf, table: Table, row_bytes: int, codec: str) -> None:
        self._shelf, self._table = shelf, table
        self._row_bytes, self._codec = row_bytes, codec

    def plan(
        self,
        state: State,
        placed: list[Placement],
        counts: list[int],
        how: tuple[str, dict[int, str]],
        verdict: Verdict | None = None,
        early: Ints = NO_SLOTS,
        n_new: int = 0,
    ) -> Plan:
        """Return the plan of ``placed`` with ``counts`` rows repaired, by (strategy, tiers).

        ``n_new`` tokens may be decoded behind. Before a strategy has spoken only `full` is sure of its rows. Rows computed ``early`` are
        exact where all before them was so already.
        """
        strategy, tiers = how
        n_rows = n_new + (placed[-1].slots[1] if placed else 0)
        spans, was = [], not (state.rows.lossy or state.sheds(n_rows))
        exact, sure = was, verdict is not None or strategy == "full"
        looked, base = spans_of(placed, early), placed[0].part.id if placed else None
        all_rows = of_rows(state, self._codec, n_rows)
        starts = bool(placed) and placed[0].position == 0  # behind a gap angles differ by rounding
        for p, n_repaired, saw, (first, last) in zip(
            placed, counts, still_seen(placed), looked, strict=True
        ):
            check_placement(p)
            n, n_prefilled = p.part.n, p.part.n - p.ready
            is_placed = p.source not in ("kept", "none")
            was = was and (p.exact or p.ready == 0)
            whole = n_repaired + n_prefilled == n and (sure or p.ready == 0)
            if p.source == "canonical" and self._shelf.thinned(int(p.kv)):
                whole = False  # the rows that are gone cannot be computed in place
            whole = whole or (
                p.source == "exact" and starts
            )  # it was right, as all before it is now
            exact = exact and (p.exact or whole) and (was or first == last)
            way: How = "prefill" if p.ready == 0 else ("repair" if n_repaired else "reuse")
            way = "prefix" if p.exact and p.ready and exact else way
            tier = "-" if p.ready == 0 else self._shelf.memory
            tier = tiers[int(p.part.id)] if p.source == "canonical" else tier
            n_bytes = p.ready * self._row_bytes if is_placed else 0
            why = () if exact else self._why(state, p, base, whole, all_rows)
            spans.append(
                Span(
                    p.part.name, int(p.part.id), n, way, tier, n_bytes, p.position, p.moved,
                    n_repaired, n_prefilled, exact, is_placed, saw, p.patched, p.part.start, why,
                    None if p.part.amends is None else int(p.part.amends),
                )
            )  # fmt: skip
        found = Verdict(NO_SLOTS) if verdict is None else verdict
        said = None if found.evidence is None else asdict(found.evidence)
        named = tuple(spans) if exact else _named(spans)
        return Plan(named, strategy, found.drift or None, said).settled(exact)

    def bare(self, state: State, weaving: Weaving) -> Plan:
        """Return the plan of what a weave placed, before any repair."""
        how = weaving.strategy.name, weaving.tiers
        return self.plan(state, weaving.placed, [0] * len(weaving.placed), how)

    def went(self, id: ChunkId) -> Went:
        """Return what the canonical KV of a chunk went through, as it is now."""
        thinned = str(said_by(self._table.get(id).digest)) if self._shelf.thinned(id) else ""
        return self._shelf.codec(id), thinned

    def _why(
        self, state: State, p: Placement, base: int | None, renewed: bool, all_rows: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return what makes a part that is not exact approximate."""
        codec, thinned = "raw", ""
        if p.source == "kept":
            codec, thinned = state.kept.lossy.get(p.part.uid, (codec, thinned))
        elif p.source == "canonical":
            codec, thinned = self.went(p.kv)
        other = p.lender is None and self._table.get(p.kv).base not in (None, base)
        return reasons(
            p, renewed=renewed, codec=codec, thinned=thinned, other_base=other, everywhere=all_rows
        )


def _named(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans of a plan that is not exact, with a reason where none has one: they were
    computed while other rows of the context were not what they were, which are gone since."""
    if any(span.approximate for span in spans):
        return tuple(spans)
    return tuple(s if s.exact else replace(s, approximate=("turn",)) for s in spans)


def still_seen(placed: Sequence[Placement]) -> list[tuple[int, ...]]:
    """Return, for each placement, the ids of which it saw tokens that do not stand before it now."""
    before: dict[int, list[tuple[int, int]]] = {}
    here: set[tuple[int, int, int]] = set()  # stretches known to stand before: they stay there
    left: list[tuple[int, ...]] = []
    for p in placed:
        gone = []
        for id, _, start, n in p.seen:
            if (id, start, n) in here:
                continue
            if _covers(before.get(id, ()), start, start + n):
                here.add((id, start, n))
            else:
                gone.append(id)
        left.append(tuple(dict.fromkeys(gone)))
        _cover(before.setdefault(int(p.part.id), []), p.part.start, p.part.stop)
    return left


def _cover(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Put ``[start, stop)`` among half-open ranges in order, of which no two touch."""
    first = bisect_left(ranges, start, key=itemgetter(1))
    last = bisect_right(ranges, stop, key=itemgetter(0))
    if first < last:
        start, stop = min(start, ranges[first][0]), max(stop, ranges[last - 1][1])
    ranges[first:last] = [(start, stop)]


def _covers(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Tell whether such ranges hold ``[start, stop)``."""
    at = bisect_right(ranges, start, key=itemgetter(0)) - 1
    return at >= 0 and ranges[at][1] >= stop

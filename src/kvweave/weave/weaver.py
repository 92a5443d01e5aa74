"""Turn a context's parts into rows ready for attention.

`prepare` places what is placed and chooses what to recompute; the loop then computes the chosen
rows together with the literal suffix; `commit` records what the rows hold. Until `commit`, the
context counts as not woven, so an error leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from kvweave.chunk.table import Table
from kvweave.errors import ContextTooLong, InvalidArgument, LoadFailed
from kvweave.run.loop import Request
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.run.sample import Sampling
from kvweave.store.kv import KV, joined
from kvweave.store.shelf import Shelf
from kvweave.weave import gate
from kvweave.weave.deps import Dependence, new_reads
from kvweave.weave.gate import Calibration, Verdict
from kvweave.weave.parts import (
    Part,
    Placement,
    Seen,
    first_change,
    resolve,
    seen_from,
    still_seen,
)
from kvweave.weave.patching import Patcher
from kvweave.weave.plan import How, Plan, Span
from kvweave.weave.repair import Strategy, lookahead_of, rank_of
from kvweave.weave.scores import Scores
from kvweave.weave.slots import padded, ranges, runs
from kvweave.weave.sources import Sources, tokens_of

UNKNOWN = Verdict(torch.empty(0, dtype=torch.int64))


@dataclass(slots=True)
class State:
    """What a context's rows hold."""

    name: str  # unique among the contexts of all namespaces
    rows: KVRows
    keeps: bool = False  # survivors of a prune keep what they saw: their raw KV is kept too
    tenant: str = ""
    woven: list[Placement] = field(default_factory=list)
    own: dict[int, KV] = field(default_factory=dict)  # uid -> raw KV computed in this context
    patches: dict[int, tuple[Tensor, KV]] = field(default_factory=dict)  # uid -> (rows, raw KV)
    known: set[int] = field(default_factory=set)  # uids that were woven here before
    repaired: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [slot]
    max_drift: float | None = None  # nats; over it the gate repairs more


@dataclass(slots=True)
class Woven:
    """A weave whose rows are placed and whose request waits to run."""

    placed: list[Placement]
    plan: Plan
    request: Request
    strategy: Strategy
    slots: Tensor  # all computed rows: the request's, and those the gate computed before it


class Weaver:
    """Weaves contexts of one model from one shelf."""

    def __init__(self, runner: Runner, shelf: Shelf, table: Table) -> None:
        self.runner, self.shelf, self.table = runner, shelf, table
        self.dependence, self.patcher = Dependence(table), Patcher(shelf, table)
        self.sources = Sources(shelf, table)
        self.calibration: Calibration | None = None
        self.rows = "raw"  # how rows of contexts rest in memory
        self._next_key = 0

    def bound(
        self, state: State, strategy: Strategy, share: float, max_drift: float | None
    ) -> None:
        """Set the bound of a context's next weaves. Raises InvalidArgument if nothing can keep it."""
        gate.check_bound(max_drift, self.calibration, strategy.name, share)
        if max_drift is not None and state.keeps:
            raise InvalidArgument("max_drift", "evict keeps what pruned chunks left", "use forget")
        state.max_drift = max_drift

    def plan(self, state: State, parts: Sequence[Part], strategy: Strategy, share: float) -> Plan:
        """Say what a weave would do, without loading or computing anything.

        Rows to repair are counted for the whole budget; a strategy may choose fewer.
        """
        known, peek = state.known, self.sources.peek
        placed = resolve(parts, state.woven, lambda part, seen: peek(part, seen, known))
        placed = self.patcher.patched(placed, strategy)
        counts = [0] * len(placed)
        if strategy.name != "none":
            share = 1.0 if strategy.name == "full" else share
            counts = [round(share * p.ready) * (_repairable(p) and not p.patched) for p in placed]
        return self._explain(placed, counts, strategy.name)

    def prepare(
        self,
        state: State,
        parts: Sequence[Part],
        strategy: Strategy,
        share: float,
        sampling: Sampling | None = None,
    ) -> Woven:
        """Place rows and return the request that computes the rest.

        Chunks that a tier loses or brings too late are prefilled. Raises ContextTooLong,
        OverBudget or CorruptChunk before any row changes.
        """
        self.shelf.busy((int(p.id) for p in parts), state.name)
        while True:
            self.sources.begin(parts, state.known)
            try:
                return self._prepare(state, parts, strategy, share, sampling)
            except LoadFailed as error:
                self.shelf.lost(error)

    def _prepare(
        self,
        state: State,
        parts: Sequence[Part],
        strategy: Strategy,
        share: float,
        sampling: Sampling | None,
    ) -> Woven:
        """Try with what the tiers are said to have. Raises LoadFailed."""
        n_new = sampling.max_tokens if sampling is not None else 0
        loaded: dict[int, KV] = {}
        known, load = state.known, self.sources.load
        placed = resolve(parts, state.woven, lambda part, seen: load(part, seen, known, loaded))
        placed = self.patcher.patched(placed, strategy, loaded)
        n = placed[-1].slot + placed[-1].part.n
        last = placed[-1].position + placed[-1].part.n + n_new
        if last > self.runner.limit:
            raise ContextTooLong(last, self.runner.limit)
        n_rows = n + max(n_new, lookahead_of(strategy))
        own = sum(kv.n_bytes for kv in state.own.values())
        self.shelf.charge(state.name, state.rows.bytes_for(n_rows) + own)
        self.table.touch(p.part.id for p in placed if p.source != "kept")
        keep = first_change(placed)
        if state.keeps:
            _inherit(state, placed)
        kept = [w for w, p in zip(state.woven, placed, strict=False) if p.source == "kept"]
        state.woven = []
        state.rows.truncate(keep)
        state.rows.reserve(n_rows)
        try:
            self._place(state, placed, loaded)
            if state.keeps:
                state.own |= {p.part.uid: loaded[p.part.uid] for p in placed if _only_here(p)}
            return self._request(state, placed, strategy, share, sampling)
        except LoadFailed:
            state.woven = kept
            state.rows.truncate(keep)
            raise

    def _place(self, state: State, placed: list[Placement], loaded: dict[int, KV]) -> None:
        """Write the rows of all parts that are not kept."""
        moving = [p for p in placed if p.source not in ("kept", "none")]
        if not moving:
            return
        begin = moving[0].slot
        device = self.runner.device
        positions = torch.cat([torch.arange(p.position, p.position + p.part.n) for p in placed])
        positions = positions.to(device)
        angles = state.rows.angles(positions[begin:])
        for slot, kvs in runs(moving, state.own, loaded):
            stop = slot + sum(kv.n_tokens for kv in kvs)
            run_angles = {
                layer: (cos[slot - begin : stop - begin], sin[slot - begin : stop - begin])
                for layer, (cos, sin) in angles.items()
            }
            state.rows.place(slot, kvs, positions[slot:stop], run_angles)
        for p in moving if state.patches else ():
            state.rows.settle()
            if p.part.frozen and p.part.uid in state.patches:
                self._patch(state, p, positions)

    def _patch(self, state: State, p: Placement, positions: Tensor) -> None:
        offsets, kv = state.patches[p.part.uid]
        slots = offsets + p.slot
        angles = state.rows.angles(positions[slots.to(positions.device)])
        where = slots.to(state.rows.device)
        for layer, rotation in enumerate(state.rows.rotations):
            state.rows.k[layer].index_copy_(0, where, rotation.apply(kv.k[layer], angles[layer]))
            state.rows.v[layer].index_copy_(0, where, kv.v[layer])

    def _request(
        self,
        state: State,
        placed: list[Placement],
        strategy: Strategy,
        share: float,
        sampling: Sampling | None,
    ) -> Woven:
        tokens = torch.cat(
            [torch.from_numpy(tokens_of(self.table, p.part).astype("int64")) for p in placed]
        )
        tokens = tokens.to(self.runner.device)
        positions = torch.cat([torch.arange(p.position, p.position + p.part.n) for p in placed]).to(
            self.runner.device
        )
        missing = [torch.arange(p.slot + p.ready, p.slot + p.part.n) for p in placed]
        unready = torch.cat(missing)
        scores = Scores(
            self.runner, state.rows, tokens, positions, unready, placed, self.dependence,
            padded(state.repaired[: first_change(placed)], tokens.numel()), lookahead_of(strategy),
        )  # fmt: skip
        verdict = self._choose(state, scores, strategy, share)
        chosen = verdict.chosen
        if unready.numel() == 0 and sampling is not None:  # the logits of the last row are wanted
            chosen = torch.unique(torch.cat([chosen, torch.tensor([tokens.numel() - 1])]))
        todo = torch.unique(torch.cat([chosen, unready]))
        counts = [stop - start for start, stop in ranges(chosen, placed)]
        plan = self._explain(placed, counts, strategy.name, verdict)
        keeps, records = _keeps_raw(state, plan, strategy), getattr(strategy, "records", False)
        again = keeps or records
        if state.rows.pending and (again or not todo.numel()):
            state.rows.settle()
        elif state.rows.pending:  # here, while layers arrive, and where a load that fails is caught
            scores.repair(chosen)
            verdict = replace(verdict, in_place=True)
        first, rest = None, todo
        if verdict.in_place and not again:
            rest = todo[-1:] if sampling is not None else todo[:0]
            first = scores.ends[-1] if sampling is not None and scores.ends else None
        n_new = sampling.max_tokens if sampling is not None else 0
        self._next_key += 1
        at = rest.to(tokens.device)
        request = Request(
            key=self._next_key,
            rows=state.rows,
            tokens=tokens[at],
            slots=rest,
            positions=positions[at],
            raw=self.runner.new_kv(rest.numel() + n_new) if keeps else None,
            sampling=sampling,
            tenant=state.tenant,
            first=first,
        )
        if records:
            request.reads = new_reads(placed, rest.numel(), n_new, self.runner.device)
        return Woven(placed, plan, request, strategy, todo)

    def _choose(self, state: State, scores: Scores, strategy: Strategy, share: float) -> Verdict:
        if not getattr(strategy, "gated", False):
            spans = [p for p in scores.placed if _repairable(p)]
            return Verdict(scores.choose(spans, strategy, share))
        spans = [p for p in scores.placed if p.ready and not p.exact and not p.patched]
        calibration = None if state.keeps else self.calibration
        return gate.run(scores, spans, strategy, share, calibration, state.max_drift)

    def _explain(
        self, placed: list[Placement], counts: list[int], strategy: str, verdict: Verdict = UNKNOWN
    ) -> Plan:
        spans = []
        exact_before = True
        for p, n_repaired, saw in zip(placed, counts, still_seen(placed), strict=True):
            n_prefilled = p.part.n - p.ready
            complete = p.exact or verdict.complete or (strategy == "full" and p.source != "kept")
            exact = exact_before and (complete or p.ready == 0)
            how: How = "prefill" if p.ready == 0 else ("repair" if n_repaired else "reuse")
            if p.exact and p.ready:
                how = "prefix"
            tier = "-" if p.ready == 0 else self.shelf.memory
            if p.source == "canonical":
                tier = self.shelf.tier(p.part.id)
            n_bytes = 0 if p.source in ("kept", "none") else p.ready * self.runner.row_bytes
            placed_now = p.source not in ("kept", "none")
            spans.append(
                Span(
                    p.part.name, int(p.part.id), p.part.n, how, tier, n_bytes, p.position, p.moved,
                    n_repaired, n_prefilled, exact, placed_now, saw, p.patched, p.part.start,
                )
            )  # fmt: skip
            exact_before = exact
        drift = 0.0 if exact_before else verdict.drift
        evidence = verdict.evidence
        return Plan(tuple(spans), strategy, drift, None if evidence is None else asdict(evidence))

    def commit(self, state: State, woven: Woven) -> list[Placement]:
        """Record what the rows hold after the request ran; return the placements."""
        done: list[Placement] = []
        slots, raw, exact_before = woven.slots, woven.request.raw, True
        state.repaired = padded(state.repaired[: first_change(woven.placed)], state.rows.n)
        state.repaired[slots] = True
        spans = ranges(slots, woven.placed)
        for p, span, (start, stop) in zip(woven.placed, woven.plan.spans, spans, strict=True):
            exact_before = exact_before and span.exact
            right = (p.right or stop - start == p.part.n) and (
                start == stop or all(b.right for b in done)
            )
            new = replace(p, ready=p.part.n, exact=exact_before, right=right)
            if state.keeps and (p.patched or _only_here(p)):
                new = replace(new, origin="own")
            if p.source != "kept" and not p.part.frozen:
                state.patches.pop(p.part.uid, None)
            self.dependence.computed(woven.request.reads, done, p, (start, stop))
            if raw is not None and right:
                self.patcher.keep(p, done, woven.strategy, raw.rows(start, stop))
            computed = p.part.n if p.ready == 0 else span.n_prefilled
            if computed and start < stop:
                seen = seen_from(done, p.position) if p.ready == 0 else p.seen
                new = replace(new, origin="own", seen=seen)
                if raw is not None:
                    kv = raw.rows(start, stop)
                    self._remember(state, p, kv, seen if exact_before else None)
            elif span.n_repaired and state.keeps and raw is not None:
                patch = (slots[start:stop] - p.slot, raw.rows(start, stop).clone())
                state.patches[p.part.uid] = patch
            done.append(new)
        state.woven = done
        uids = {p.part.uid for p in done}
        state.known |= uids
        state.own = {uid: kv for uid, kv in state.own.items() if uid in uids}
        state.patches = {uid: patch for uid, patch in state.patches.items() if uid in uids}
        return done

    def extend(
        self, state: State, parts: Sequence[Part], sizes: tuple[int, int], request: Request
    ) -> None:
        """Record generated rows: ``parts`` begin where the header stood.

        ``sizes`` are the header's tokens and the rows computed from there on; what is left (the
        last token, the closing text) waits for the next weave.
        """
        n_head, n_rows = sizes
        if n_head:
            state.woven.pop()
        slot = int(request.slots[-1]) + 1 - n_head
        state.rows.truncate(slot + n_rows)
        last = state.woven[-1] if state.woven else None
        position = last.position + last.part.n if last is not None else 0
        exact = last.exact if last is not None else True
        at = request.tokens.numel() - n_head
        before, right = list(state.woven), all(p.right for p in state.woven)
        for part in parts:
            ready = min(part.n, n_rows)
            seen = seen_from(state.woven, position)
            new = Placement(part, slot, position, "kept", ready, exact, seen, "own", right=right)
            state.woven.append(new)
            if request.reads is not None:
                self.dependence.note(part, 0, request.reads.mass[at : at + ready], before)
            state.known.add(part.uid)
            if state.keeps and ready and request.raw is not None:
                state.own[part.uid] = request.raw.rows(at, at + ready).clone()
            at, n_rows = at + ready, n_rows - ready
            slot, position = slot + part.n, position + part.n

    def _remember(self, state: State, p: Placement, kv: KV, seen: Seen | None) -> None:
        """Keep the raw KV of a part computed in this context where someone may ask for it."""
        if state.keeps:
            before = state.own.get(p.part.uid) if p.ready else None
            whole = kv if before is None else joined([before.rows(0, p.ready), kv])
            state.own[p.part.uid] = whole
        if seen is not None and kv.n_tokens == p.part.n and self.sources.is_whole(p.part):
            self.shelf.put_in_context(int(p.part.id), seen, kv)


def _keeps_raw(state: State, plan: Plan, strategy: Strategy) -> bool:
    """Tell whether somebody wants the raw KV of computed rows: then a request has to compute them,
    also those that a gate computed before."""
    keeps = state.keeps or (rank_of(strategy) > 0 and plan.repaired > 0)
    return keeps or any(s.exact and s.n_prefilled for s in plan.spans)


def _inherit(state: State, placed: Sequence[Placement]) -> None:
    """Give the raw KV of kept rows to the parts that stand there now."""
    for old, p in zip(state.woven, placed, strict=False):
        if p.source != "kept":
            return
        if old.part.uid in state.own:
            state.own[p.part.uid] = state.own[old.part.uid].rows(0, p.ready)
        if old.part.uid in state.patches:
            offsets, kv = state.patches[old.part.uid]
            n = int((offsets < p.part.n).sum())  # they increase
            state.patches[p.part.uid] = (offsets[:n], kv.rows(0, n))


def _only_here(p: Placement) -> bool:
    """Tell whether the KV a part is placed from may not be found again once other parts stand
    before it."""
    return p.source == "exact" or (p.patched and p.source == "canonical")


def _repairable(p: Placement) -> bool:
    return p.source in ("canonical", "own") and not p.exact

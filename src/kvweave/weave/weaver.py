"""Turn a context's parts into rows ready for attention.

`prepare` places what is placed; its request is a job of the loop, in which the strategy looks and
repairs and the rest is computed with the literal suffix; `commit` records what the rows hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from kvweave.chunk.table import Table
from kvweave.errors import ContextTooLong, InvalidArgument, LoadFailed
from kvweave.run.base import NO_SLOTS, Backend, Ints, Observer, Steps, Work
from kvweave.run.loop import Request, new_key
from kvweave.run.sampling import Sampling
from kvweave.store.kv import KV, joined
from kvweave.store.shelf import Shelf
from kvweave.weave.account import Account, charged
from kvweave.weave.approximate import cell_of, promised, suited
from kvweave.weave.calibration import Calibration, check_bound, measured
from kvweave.weave.deps import Dependence, Reads
from kvweave.weave.explaining import Explainer
from kvweave.weave.keeping import left
from kvweave.weave.parts import (
    Part,
    Placement,
    Truth,
    both_seen,
    first_change,
    is_only_here,
    positions_of,
    require_speech,
    seen_from,
    spans_of,
)
from kvweave.weave.passes import Passes, union
from kvweave.weave.patching import Patcher
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Strategy, Wish
from kvweave.weave.shadow import Shadow
from kvweave.weave.sources import Sources, runs, tokens_of
from kvweave.weave.state import KeptRows, State
from kvweave.weave.weaving import Weaving


class Weaver:
    """Weaves contexts of one model from one shelf."""

    def __init__(
        self,
        backend: Backend,
        shelf: Shelf,
        table: Table,
        calibration: Calibration | None = None,
        codec: str = "raw",  # how rows of contexts rest in memory
        shadow: Shadow | None = None,
    ) -> None:
        self.backend, self.shelf, self.table = backend, shelf, table
        self.calibration, self.codec = calibration, codec
        self.shadow = Shadow(backend, shelf) if shadow is None else shadow
        self.dependence, self.patcher = Dependence(table), Patcher(shelf, table)
        self.sources = Sources(shelf, table, backend)
        self.explainer = Explainer(shelf, table, backend.row_bytes, codec)

    def wish(self, state: State, strategy: Strategy, share: float, max_drift: float | None) -> Wish:
        """Return what a weave is asked for. Raises InvalidArgument if nothing can keep the bound."""
        mine = self.shadow.auditor.learner.recipe(state.tenant, share)
        fit, recipe = measured(self.calibration, strategy.measured_as, share, mine)
        check_bound(max_drift, fit, strategy.name, share)
        if max_drift is not None and state.keeps:
            raise InvalidArgument("max_drift", "evict keeps what pruned chunks left", "use forget")
        if max_drift is not None and state.keeper is not None:
            reason = "no bound of the drift is known of rows that are not all there"
            raise InvalidArgument("max_drift", reason, "leave out max_drift, or keep")
        if max_drift is not None and state.thinned:
            raise InvalidArgument("max_drift", "rows of this context were freed", "leave it out")
        if max_drift is not None and state.rows.lossy:
            reason = f"rows kept as {self.codec} are never those of a full prefill"
            raise InvalidArgument("max_drift", reason, 'use rows="raw"')
        loose = state.keeps or state.rows.lossy or state.keeper is not None
        return Wish(share, max_drift, None if loose else fit, recipe)

    def plan(self, state: State, parts: Sequence[Part], strategy: Strategy, share: float) -> Plan:
        """Say what a weave would do, without loading or computing anything.

        Rows to repair are counted for the whole budget; a strategy may choose fewer.
        """
        asked, peek = self.sources.asked(state, parts, strategy), self.sources.peek
        placed = state.resolved(parts, lambda part, seen: peek(part, seen, asked))
        placed = self.patcher.patched(placed, strategy)
        share = {"none": 0.0, "full": 1.0}.get(strategy.name, share)
        counts = [round(share * p.ready) * (p.repairable and not p.patched) for p in placed]
        tiers = {int(p.part.id): self.shelf.tier(p.kv) for p in placed}
        return state.told(self.explainer.plan(state, placed, counts, (strategy.name, tiers)))

    def prepare(
        self,
        state: State,
        parts: Sequence[Part],
        strategy: Strategy,
        wish: Wish,
        asked: tuple[Sampling | None, int] = (None, 0),
    ) -> Weaving:
        """Place rows and return the weave, whose request computes the rest; ``asked`` is an answer's
        sampling, and the tokens that close it. Chunks that a tier loses or brings too late are
        prefilled. Raises ContextTooLong, OverBudget or CorruptChunk before any row changes.
        """
        if asked[0] is not None:
            require_speech(parts)
        if state.keeper is not None and strategy.records:
            reason = "it records reads of rows that a token policy lets go of"
            raise InvalidArgument("repair", reason, "leave out keep")
        weaving = Weaving(parts, strategy, wish, *asked)
        try:
            self._set_out(state, weaving)
        except BaseException:
            self.settle_account(state)
            raise
        weaving.request = Request(
            new_key(), state.rows, self._steps(state, weaving), asked[0], state.tenant
        )
        if state.keeper is not None:
            weaving.request.decoded = lambda: self._decoded(state, weaving.request)
        return weaving

    # ---- placing

    def _set_out(self, state: State, weaving: Weaving) -> None:
        """Decide where rows come from, make room for them, and place them."""
        parts = weaving.parts
        asked, load = self.sources.asked(state, parts, weaving.strategy), self.sources.load
        stands, loaded = [asked.stands.kv(p) for p in parts], dict[int, KV]()
        self.shelf.busy(map(int, stands), state.name)
        tiers = zip(parts, map(self.shelf.tier, stands), strict=True)
        weaving.tiers |= {int(p.id): tier for p, tier in tiers}
        self.sources.begin(parts, asked)
        placed = state.resolved(parts, lambda part, seen: load(part, seen, asked, loaded))
        weaving.thinned = any(kv.kept is not None for kv in loaded.values())
        if weaving.thinned:
            state.require_heads(weaving.wish.max_drift)
        weaving.placed = placed = self.patcher.patched(placed, weaving.strategy, loaded)
        n_rows = self._charge(state, weaving)
        self.table.touch(p.part.id for p in placed if p.source != "kept")
        keep = first_change(placed)
        if state.keeper is not None:
            state.keeper.cut(keep)
        weaving.kept = kept = state.kept.inherited(state.woven, placed)
        state.woven, state.n_right = [], min(state.n_right, keep)
        state.rows.truncate(keep)
        state.rows.reserve(n_rows)
        self._place(state, placed, loaded)
        kept.take(placed, loaded, self.explainer.went, own=state.keeps)

    def _charge(self, state: State, weaving: Weaving) -> int:
        """Account all that the weave will take; return the rows. Raises ContextTooLong, OverBudget."""
        placed, sampling = weaving.placed, weaving.sampling
        n = placed[-1].slots[1]
        n_said = n_new = sampling.max_tokens if sampling is not None else 0
        n_positions = n_said + weaving.n_closing
        if state.keeper is not None:
            n_new = state.keeper.at_once(n_new)
            n_positions = n_new if state.keeper.moves else n_positions
        last = placed[-1].position + placed[-1].part.n + n_positions
        if last > self.backend.limit:
            raise ContextTooLong(last, self.backend.limit)
        n_rows = n + max(n_new, weaving.strategy.draft)
        n_aside = 0 if state.keeper is None else state.keeper.aside(n)
        copied = sum(x.shape.width for x in self.backend.layers[: weaving.strategy.copies])
        room, keep = n_aside * self.backend.row_bytes, first_change(placed)
        room += copied * n_rows * self.backend.dtype.itemsize
        room += state.rows.bytes_for(n_rows) + state.rows.bytes_back(keep)
        n_bytes = state.bytes_for(room, keep, n, n_said)
        if state.keeps or weaving.strategy.rank:
            n_kept = sum(p.ready for p in placed if p.source == "kept" and not p.exact)
            n_bytes += (n - keep + n_kept + n_new) * self.backend.row_bytes
        self.shelf.charge(state.name, n_bytes)
        return n_rows

    def _place(self, state: State, placed: list[Placement], loaded: dict[int, KV]) -> None:
        """Write the rows of all parts that are not kept."""
        moving = [p for p in placed if p.source not in ("kept", "none")]
        if moving:
            exact = next((p.slot for p in moving if not p.exact), None)
            state.rows.place(runs(moving, state.kept.own, loaded), positions_of(placed), exact)

    # ---- computing

    def _steps(self, state: State, weaving: Weaving) -> Steps[Tensor | None]:
        """Compute what is not there; begin again without the chunks that do not arrive."""
        kept = [p for p in weaving.placed if p.source == "kept"]
        failed: set[str] = set()
        while True:
            try:
                found = yield from self._compute(state, weaving)
                if state.keeper is not None:
                    yield from state.keeper.rereading(state.rows, self.tokens(weaving.placed))
                    pinned = [p for p in weaving.placed if self.table.get(p.part.id).pinned]
                    account = self._account(state, weaving.request)
                    state.keeper.woven(state.rows, pinned, weaving.request, account)
                return found
            except LoadFailed as error:
                if str(error) in failed:
                    raise  # it is not asked for any more, and fails again
                failed.add(str(error))
                self.shelf.lost(error)
                state.woven = kept
                self._set_out(state, weaving)

    def _compute(self, state: State, weaving: Weaving) -> Steps[Tensor | None]:
        placed, strategy, sampling = weaving.placed, weaving.strategy, weaving.sampling
        if weaving.thinned:  # the plan and the repair ask which rows are gone
            yield Work(state.rows, NO_SLOTS, NO_SLOTS, NO_SLOTS, waits=True)
        for p in placed:
            if (redone := state.redone_of(p)) is not None:
                state.rows.put(redone[0] + p.slot, redone[1])
        tokens = self.tokens(placed)
        n, positions = len(tokens), positions_of(placed)
        missing = [np.arange(p.slot + p.ready, p.slots[1]) for p in placed]
        passes = Passes(
            self.backend, state.rows, tokens, positions, np.concatenate(missing), placed,
            self.dependence, state.repaired_until(first_change(placed), n),
            again=state.keeps or strategy.records or strategy.rank > 0,
            lossy=bool(weaving.kept.lossy) or state.thinned, keeper=state.keeper,
        )  # fmt: skip
        wish = suited(weaving.wish, state, lambda: self.explainer.bare(state, weaving))
        verdict = yield from strategy.repair(passes, wish)
        chosen = np.setdiff1d(verdict.chosen, passes.left)
        end = np.array([n - 1])
        if sampling is not None and n - 1 not in passes.left:  # its logits are wanted
            chosen = union(chosen, end)
        weaving.computed = rest = union(chosen, passes.left)
        weaving.ahead = passes.ahead
        weaving.early = np.setdiff1d(union(passes.early, passes.ahead), rest)
        repaired = np.setdiff1d(union(chosen, passes.ahead), passes.unready)
        counts = [stop - start for start, stop in spans_of(placed, repaired)]
        how = strategy.name, weaving.tiers
        request, n_new = weaving.request, 0 if sampling is None else sampling.max_tokens
        plan = self.explainer.plan(state, placed, counts, how, verdict, weaving.early, n_new)
        weaving.plan, keeper = self._promise(state, weaving, plan), state.keeper
        n_new = n_new if keeper is None else 0
        observer: Observer | None = None
        if not verdict.in_place or passes.again:
            weaving.raw = self._room_for_raw(state, weaving, len(rest) + n_new)
        elif sampling is None or verdict.end is not None:
            return verdict.end
        else:
            rest = end
        if strategy.records:
            weaving.reads = Reads(
                placed, len(rest), n_new, len(self.backend.layers), self.backend.device
            )
        request.raw, request.n_raw, request.observer = weaving.raw, len(rest), weaving.reads
        if keeper is not None and rest is weaving.computed:
            observer = keeper.observing(len(rest), weaving.reads)
        want = np.array([len(rest) - 1]) if sampling is not None else NO_SLOTS
        if not len(rest):
            state.rows.settle()
            return None
        logits = yield Work(
            state.rows, tokens[rest], rest, positions[rest], want, weaving.raw,
            weaving.reads if observer is None else observer,
        )  # fmt: skip
        return logits[-1] if sampling is not None else None

    def tokens(self, placed: Sequence[Placement]) -> Ints:
        """Return the token of each slot."""
        return np.concatenate([tokens_of(self.table, p.part).astype(np.int64) for p in placed])

    def _room_for_raw(self, state: State, weaving: Weaving, n: int) -> KV | None:
        """Return room for unrotated KV of what is computed where somebody wants it: a context that
        keeps it, a patch, or the next context in which the same text is exact."""
        plan = weaving.plan
        assert plan is not None
        if state.keeps or (weaving.strategy.rank > 0 and plan.repaired > 0):
            return self.backend.new_kv(n)  # accounted since the weave began
        if any(s.exact and s.n_prefilled for s in plan.spans):
            placed, sampling = weaving.placed, weaving.sampling
            end, n_said = placed[-1].slots[1], 0 if sampling is None else sampling.max_tokens
            now = state.bytes_for(state.rows.n_bytes, first_change(placed), end, n_said)
            if charged(self.shelf, state.name, now + n * self.backend.row_bytes):
                return self.backend.new_kv(n)
        return None

    def _promise(self, state: State, weaving: Weaving, plan: Plan) -> Plan:
        """Return the plan with what audits have found of such answers."""
        weaving.cell = None
        if plan.drift != 0 and self.shadow.in_use:  # else nobody asks for it
            bare = self.explainer.bare(state, weaving)  # as `repairing` has it
            weaving.cell = cell_of(bare, weaving.strategy, weaving.wish, state)
        promise = self.shadow.auditor.promise(weaving.cell)
        return replace(promised(plan, promise), alarm=weaving.alarm)

    # ---- recording

    def commit(self, state: State, weaving: Weaving) -> None:
        """Record what the rows hold after the request ran."""
        done: list[Placement] = []
        raw, slots, kept = weaving.raw, weaving.computed, weaving.kept
        assert weaving.plan is not None, "the request has not prepared"
        spans, looked = spans_of(weaving.placed, slots), spans_of(weaving.placed, weaving.early)
        for p, span, (start, stop), (first, last) in zip(
            weaving.placed, weaving.plan.spans, spans, looked, strict=True
        ):
            n_prefilled, whole = p.part.n - p.ready, stop - start == p.part.n
            right = (p.right and p.source != "none") or whole
            right = right and (start == stop or all(b.right for b in done)) and first == last
            truth = Truth.STALE if not right else Truth.PATCHED if p.patched else Truth.RIGHT
            truth = Truth.EXACT if span.exact else truth
            new = replace(p, ready=p.part.n, truth=truth, due=weaving.leaves(p))
            if state.keeps and (p.patched or is_only_here(p)):
                new = replace(new, origin="own")
            if p.source != "kept" and state.redone_of(p) is None:  # they are of other rows
                kept.redone.pop(p.part.uid, None)
            if whole:
                kept.lossy.pop(p.part.uid, None)
            self.dependence.computed(weaving.reads, done, p, (start, stop))
            if raw is not None and right and not state.thinned:
                self.patcher.keep(p, done, weaving.strategy, raw.rows(start, stop))
            if n_prefilled:
                seen = seen_from(done, p.position) if p.ready == 0 else p.seen
                new = replace(new, origin="own", seen=seen)
            if raw is not None and stop > start:
                tail = stop - n_prefilled
                if n_prefilled:
                    self._remember(state, kept, raw.rows(tail, stop), new)
                if tail > start and state.keeps:
                    now = seen_from(done, p.position)
                    new = replace(new, seen=now if whole else both_seen(new.seen, now))
                    kept.redo(p.part.uid, slots[start:tail] - p.slot, raw.rows(start, tail))
            done.append(new)
        end = weaving.placed[-1].slots[1]
        state.repaired = state.repaired_until(first_change(weaving.placed), end)
        state.repaired[union(slots, weaving.ahead)] = True
        state.remember(done, kept)
        self.settle_account(state)

    def extend(
        self, state: State, parts: Sequence[Part], sizes: tuple[int, int], weaving: Weaving
    ) -> None:
        """Record generated rows: ``parts`` begin where the header stood.

        ``sizes`` are the header's tokens and the rows computed from there on; what is left (the
        last token, the closing text) waits for the next weave.
        """
        n_head, n_rows = sizes
        woven, kept = state.woven[: len(state.woven) - bool(n_head)], state.kept.copy()
        slot = weaving.placed[-1].slots[1] - n_head
        state.rows.truncate(slot + n_rows)
        last = woven[-1] if woven else None
        position = last.position + last.part.n if last is not None else 0
        best = Truth.RIGHT if all(p.right for p in woven) else Truth.STALE
        exact = not (state.rows.lossy or state.thinned) and (last is None or last.exact)
        at, before = weaving.request.n_raw - n_head, list(woven)
        for part in parts:
            ready = min(part.n, n_rows)
            seen, truth = seen_from(woven, position), Truth.EXACT if exact else best
            woven.append(Placement(part, slot, position, "kept", ready, truth, seen, "own"))
            if weaving.reads is not None:
                self.dependence.note(part, 0, weaving.reads.of(at, at + ready), before)
            if state.keeps and ready and weaving.raw is not None:
                kept.own[part.uid] = weaving.raw.rows(at, at + ready).clone()
            at, n_rows = at + ready, n_rows - ready
            slot, position = slot + part.n, position + part.n
        state.remember(woven, kept)
        self.settle_account(state)

    def extend_left(self, state: State, parts: Sequence[Part], n_rows: int) -> None:
        """Record the rows of ``parts``, where all else of a context closed up behind an answer."""
        state.rows.truncate(n_rows)
        state.remember(left(parts, n_rows), state.kept.only(()))
        state.repaired = state.repaired_until(0, n_rows)
        self.settle_account(state)

    def _decoded(self, state: State, request: Request) -> None:
        keeper, rows, account = state.keeper, state.rows, self._account(state, request)
        if keeper is not None and keeper.decoded(rows, request, account):
            for _ in range(2):  # the second time what was given back is not charged any more
                account.reserve(rows.n + keeper.ahead(request))

    def _account(self, state: State, request: Request) -> Account:
        return Account(self.shelf, state, request, self.backend.dtype.itemsize)

    def settle_account(self, state: State) -> None:
        """Count what a context takes now that nothing is under way."""
        self.shelf.charge(state.name, state.n_bytes)

    def _remember(self, state: State, kept: KeptRows, kv: KV, p: Placement) -> None:
        """Keep the raw KV of a part's last rows, computed here, where someone may ask for it."""
        if state.keeps:
            n = p.part.n - kv.n_tokens
            before = kept.own.get(p.part.uid) if n else None
            whole = kv.clone() if before is None else joined([before.rows(0, n), kv])
            kept.own[p.part.uid] = whole
        home = state.rows.positions[0] == 0  # behind a gap it would not be exact elsewhere
        if p.exact and home and kv.n_tokens == p.part.n and self.sources.is_whole(p.part):
            self.shelf.put_in_context(int(p.part.id), p.seen, kv)

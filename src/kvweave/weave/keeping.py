"""What a token policy does to the rows of one context: watch, choose, free.

::

    prompt    the last pass is watched -> choice        rows of each head go, their memory with them
    decode    every so many tokens     -> choice        (`kvzip`: they are read again before)
    moving    (`streaming`) rows of all heads go, the others close up and stand from position 0 on

A layer that sees a window only frees what no later query sees, whatever the policy: no answer misses
it. An edit does, which has rows computed in front of that; then all rows are placed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import ContextTooLong, OverBudget, OverQuota
from kvweave.keep.tokens.base import LayerView, Need, require_rows
from kvweave.keep.tokens.kvzip import KVzip, Replayed
from kvweave.keep.tokens.sizes import bytes_at, sizes, whole_bytes
from kvweave.keep.tokens.spec import Keep
from kvweave.keep.tokens.watch import WIDTH
from kvweave.run.base import ALL, NO_SLOTS, Backend, Ints, LayerInfo, Observer, Rows, Steps, Work
from kvweave.run.below import BELOW
from kvweave.run.loop import Request
from kvweave.run.packed import among
from kvweave.run.upload import up
from kvweave.weave.observers import Observers
from kvweave.weave.parts import Part, Placement, Truth, first_change
from kvweave.weave.plan import Shed
from kvweave.weave.rereading import read_again, replays, reread_rows
from kvweave.weave.room import Room


def runs_of(numbers: Ints) -> list[tuple[int, int]]:
    """Return increasing ``numbers`` as half-open ranges."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, cuts)]


def left(parts: Sequence[Part], n_rows: int) -> list[Placement]:
    """Return where ``parts`` stand when all but them has closed up; the first ``n_rows`` of their
    tokens have rows, which saw more than what stands before them."""
    found, slot = [], 0
    for part in parts:
        ready = max(0, min(part.n, n_rows - slot))
        truth = Truth.STALE if ready else Truth.RIGHT
        found.append(Placement(part, slot, slot, "kept", ready, truth, (), "own"))
        slot += part.n
    return found


def n_left(request: Request) -> int:
    """Return how many tokens ``request`` decodes at most from now on."""
    n = 0 if request.sampling is None else request.sampling.max_tokens
    return max(0, n - len(request.out))


class Keeper:
    """A token policy at work on the rows of one context."""

    def __init__(self, keep: Keep, backend: Backend) -> None:
        require_rows(backend.layers)
        self.keep, self.backend = keep, backend
        self.watch = keep.policy.watch(backend.layers, backend.device)
        self.pinned: Ints = NO_SLOTS  # slots
        self.moved = False  # slots are not the tokens' numbers any more
        self.gone = False  # rows that are there saw rows that closed up
        self._alive: Ints = NO_SLOTS  # number of the token of each slot, when slots moved last
        self._next = 0  # number of the token behind
        self._since = 0  # tokens decoded since the last choice
        self._seen = 0  # rows whose attention or queries were shown
        self._said: Ints = NO_SLOTS  # tokens [slot] of the prompt, where they are read again
        self._unread = 0  # of the newest rows, those that were to be read again and were not
        self._counted, self._lost = 0.0, 0.0  # in the last choice

    # ---- before rows are computed

    def fits(self, n: int) -> bool:
        """Tell whether of ``n`` rows none has to go, or to rest in fewer bits."""
        return self.spares(n) and not self._short(n)

    def spares(self, n: int) -> bool:
        """Tell whether of ``n`` rows none has to go."""
        slid = any(info.mask != ALL for info in self.backend.layers) and not self.moves
        least = len(self.backend.layers) - 1  # the last one gets least
        return not slid and not self.keep.policy.splits and sum(self._sizes(n, least)) >= n

    def sees(self, rows: Rows, placed: Sequence[Placement]) -> bool:
        """Tell whether rows computed behind those of ``placed`` that stay, and the last one of these,
        find all rows that their windows reach."""
        stay = first_change(placed)
        return self.moved or not stay or min(stay, rows.n - 1) >= self.whole_from(rows)

    def whole_from(self, rows: Rows) -> int:
        """Return the first slot from which on each query finds the rows that its windows reach."""
        slot, positions = 0, rows.positions[: rows.n]
        for layer, info in enumerate(self.backend.layers if rows.n_freed else ()):
            firsts, kept = info.mask.first(positions), rows.kept(layer)
            if firsts is None or not all(map(len, kept)):
                continue
            gone = max(int(own[0]) for own in kept)
            if gone:
                slot = max(slot, int(np.searchsorted(firsts, positions[gone - 1], "right")))
        return slot

    @staticmethod
    def _seen_from(rows: Rows, info: LayerInfo) -> int:
        """Return the first slot that the last row sees in a layer."""
        positions = rows.positions[: rows.n]
        first = info.mask.first(positions[-1:]) if rows.n else None
        return 0 if first is None else int(np.searchsorted(positions, first[0]))

    def _short(self, n: int) -> bool:
        """Tell whether of ``n`` rows some do not rest as they are, for want of a budget."""
        return self._sizes(n, len(self.backend.layers) - 1)[0] < n

    @property
    def moves(self) -> bool:
        """Whether rows close up where others went, so that positions do not run out."""
        return self.keep.policy.moves

    def at_once(self, n_new: int) -> int:
        """Return how many of ``n_new`` decoded rows there are at most before some go."""
        return min(n_new, self.keep.every)

    def aside(self, n: int) -> int:
        """Return how many rows are needed besides ``n`` while a prompt is read again."""
        policy = self.keep.policy
        if not isinstance(policy, KVzip) or not self._short(n):
            return 0
        return n + reread_rows(policy, self.backend, n)

    @property
    def n_bytes(self) -> int:
        """Bytes of what is known of the rows."""
        return 0 if self.watch is None else self.watch.n_bytes

    def room_for(self, n: int, n_new: int) -> int:
        """Return the bytes of rows, at most, while ``n_new`` tokens are decoded behind ``n`` rows of
        which all but those a choice leaves are gone."""
        said = self._next + max(0, n - len(self._alive)) if self.moved else n
        after = said + n_new - self.at_once(n_new)
        infos, size = self.backend.layers, self.backend.dtype.itemsize
        row = sum(whole_bytes(info, size, self.moves) for info in infos)
        return bytes_at(self.keep, infos, after, size) + self.at_once(n_new) * row

    def bytes_for(self, rows: Rows, stay: int, n: int, n_new: int) -> int:
        """Return those there will be with ``n_new`` tokens decoded behind ``n`` rows, at most, of which
        those before slot ``stay`` are as they are now."""
        if self.watch is None:
            return 0
        kept = (own for layer in range(len(self.backend.layers)) for own in rows.kept(layer))
        most = max(int(np.searchsorted(own, stay)) for own in kept)
        held = most + n - stay + self.at_once(n_new)
        wide = max(WIDTH, self.backend.dtype.itemsize) // WIDTH
        return max(self.n_bytes, wide * self.watch.tally.bytes_for(n + n_new, held))

    def copy(self) -> Keeper:
        """Return one for a copy of the rows."""
        twin = copy(self)
        twin.watch = deepcopy(self.watch)
        return twin

    def cut(self, n: int) -> None:
        """Rows from slot ``n`` on will be others."""
        self.moved, self._alive, self._next, self._since = False, NO_SLOTS, 0, 0
        self.gone = self.gone and n > 0
        self._counted = self._lost = 0.0
        self._seen *= n > 0
        if self.watch is not None:
            self.watch.compact(np.arange(n))

    def observing(self, n: int, other: Observer | None = None) -> Observer | None:
        """Return who watches a pass over ``n`` rows besides ``other``: a choice comes behind it."""
        if self.watch is None:
            return other
        self.watch.until, self.watch.decoding = n, False
        self._seen += n
        return self.watch if other is None else Observers([other, self.watch])

    def rereading(self, rows: Rows, tokens: Ints) -> Steps[None]:
        """Have ``tokens`` [slot] of ``rows`` read again behind a copy of them, where the policy goes
        by that. Raises ContextTooLong, LoadFailed."""
        policy, n = self.keep.policy, rows.n
        if not isinstance(policy, KVzip) or self.watch is None:
            return
        self._said, self._unread = tokens, n
        if not self._short(n):
            return
        first = int(rows.positions[n - 1]) + 1
        again = replays(policy, self.backend, first, tokens)
        tally, twin = cast(Replayed, self.watch.tally), rows.clone()
        for replay in again:
            slots = np.arange(n, n + len(replay.tokens))
            twin.reserve(int(slots[-1]) + 1)
            tally.read(replay)
            self.watch.until = 0
            try:
                yield Work(twin, replay.tokens, slots, slots - n + first, observer=self.watch)
            finally:
                tally.read(None)
                twin.truncate(n)
        self._unread = 0

    # ---- behind them

    def woven(self, rows: Rows, pinned: Sequence[Placement], request: Request, room: Room) -> None:
        """The rows of a prompt are there, and ``request`` decodes behind them, or nothing does."""
        slots = [np.arange(*p.slots) for p in pinned]
        self.pinned = np.concatenate(slots) if slots else NO_SLOTS
        if not self.moves:
            self._free(rows, room, self.ahead(request))
        elif request.sampling is not None:
            self._move(rows)
        if self.watch is not None:
            both = None if request.observer is None else Observers([request.observer, self.watch])
            request.observer = both or self.watch
        request.raw = None  # what is decoded behind is never exact
        rows.reserve(rows.n + self.ahead(request), exact=True)  # of all rows more was accounted
        self._set_out(request.n_raw)

    def decoded(self, rows: Rows, request: Request, room: Room) -> bool:
        """A token was decoded; return whether rows may have gone, and room for more is due.

        Raises LoadFailed, NoSpace, StoreError.
        """
        self._since += 1
        self._seen += self.watch is not None
        self._unread += bool(self.keep.policy.needs & Need.REPLAY)
        if self._since < self.keep.every:
            return False
        self._since = 0
        if self.moves:
            request.n_rows -= self._move(rows)
        else:
            self._read_again(rows, request.out, room)
            self._free(rows, room, self.ahead(request))
        self._set_out(request.n_raw + len(request.out))
        return True

    def _read_again(self, rows: Rows, out: list[int], room: Room) -> None:
        """Have what was not read yet read again behind ``rows``, the last of which are of ``out``.
        Where there are no positions or no memory for that, it stays unread: see `_safe`."""
        policy, n = self.keep.policy, rows.n
        if not isinstance(policy, KVzip) or self.watch is None or not self._short(n):
            return
        first, tokens = int(rows.positions[n - 1]) + 1, np.concatenate((self._said, out))
        try:
            again = list(replays(policy, self.backend, first, tokens, n - self._unread))
            room.reserve(n + max(len(each.tokens) for each in again))
        except (ContextTooLong, OverBudget, OverQuota):
            return
        read_again(self.backend, rows, tokens, self.watch, again)
        self._unread = 0

    def ahead(self, request: Request) -> int:
        """Return how many rows at most ``request`` decodes before the next choice."""
        return self.at_once(n_left(request))

    def numbers(self, n: int) -> Ints:
        """Return the number of the token of each of ``n`` slots, in the order of all tokens."""
        if not self.moved:
            return np.arange(n)
        more = np.arange(self._next, self._next + max(0, n - len(self._alive)))
        return np.concatenate((self._alive[:n], more))

    def shed(self, rows: Rows) -> Shed | None:
        """Return what is gone of all rows there were since slot 0 was placed; None: nothing is."""
        heads = sum(info.shape.k_heads for info in self.backend.layers)
        n_tokens = int(self.numbers(rows.n)[-1]) + 1 if rows.n else 0
        gone = rows.n_freed + (n_tokens - rows.n) * heads
        if not gone and not rows.forms:
            return None
        lost = self._lost / self._counted if self._counted else None
        looks = bool(self.keep.policy.needs & (Need.ATTENTION | Need.QUERIES))
        seen = self._seen if looks else None
        return Shed(str(self.keep), n_tokens * heads, int(gone), lost, seen, rows.forms or None)

    # ---- inside

    def _target(self, n: int) -> int:
        return self._sizes(n, 0)[0]

    def _sizes(self, n: int, layer: int) -> list[int]:
        return sizes(self.keep, self.backend.layers, n, layer, self.backend.dtype.itemsize)

    def _set_out(self, n: int) -> None:
        """Set out for the next choice, ``n`` rows having been computed."""
        if self.watch is not None:
            self.watch.chosen()
            self.watch.until, self.watch.decoding = n + self.keep.every, True

    def _safe(self, view: LayerView, n: int, target: int) -> Tensor:
        """Return the rows [head, row] that stay whatever they are worth: sinks, pins, the newest, and
        what ought to have been read again, up to half of what stays."""
        sinks, newest = self.keep.protected(target)
        newest = max(newest, min(self._unread, target // 2))
        safe = (view.slots < sinks) | (view.slots >= n - newest)
        if len(self.pinned):
            safe |= torch.isin(view.slots, up(self.pinned, view.slots.device))
        return safe & view.there

    def _free(self, rows: Rows, room: Room, ahead: int) -> None:
        """Free what the policy lets go of in each layer and head; ``ahead`` rows are to come."""
        n, layers = rows.n, self.backend.layers
        counts = bool(self.keep.policy.needs & (Need.ATTENTION | Need.REPLAY))
        self._counted = self._lost = 0.0
        for layer, info in enumerate(layers):
            kept = rows.kept(layer)
            if info.mask != ALL:
                seen = self._seen_from(rows, info)  # the last one may be computed again
                if any(len(slots) and slots[0] < seen for slots in kept):
                    left = [slots[np.searchsorted(slots, seen) :] for slots in kept]
                    rows.keep(layer, left, ahead)
                continue
            mine = self._sizes(n, layer)
            if all(len(slots) <= mine[0] for slots in kept) and not self.keep.policy.splits:
                continue
            view = self._view(rows, layer, kept)
            scores, whole = self.keep.policy.worth(view)
            safe = self._safe(view, n, mine[0])
            if whole is not None and self.keep.policy.exceeds:
                if room.may_take(sum(map(len, rows.below(layer))), info):
                    safe |= whole[:, None] & view.there
                whole = None
            chosen, coded = self.keep.divide(view, scores, mine, safe, n, whole)
            if counts:
                self._count(view, scores, chosen)
            if sum(map(len, chosen)) < sum(map(len, kept)):
                rows.keep(layer, chosen, ahead)
            for form, slots in coded.items():
                if form == BELOW:
                    slots = room.below(layer, slots, view.info, len(coded) > 1)
                rows.code(layer, form, slots, ahead)

    def _count(self, view: LayerView, scores: Tensor, chosen: Sequence[Ints]) -> None:
        """Count what the rows are worth that go."""
        scores = scores.float().clamp_min(0)
        scores = torch.where(torch.isfinite(scores) & view.there, scores, 0)
        slots = view.slots.cpu().numpy()
        stays = np.stack([among(a, b) for a, b in zip(slots, chosen, strict=True)])
        self._counted += float(scores.sum())
        self._lost += float(scores[torch.from_numpy(~stays).to(scores.device)].sum())

    def _move(self, rows: Rows) -> int:
        """Let go of rows everywhere and close up; return how many went."""
        numbers = self.numbers(rows.n)
        after = int(numbers[-1]) + 1
        target = self._target(after)
        if rows.n <= target:
            return 0
        slots = torch.arange(rows.n, device=self.backend.device)[None]
        positions = up(rows.positions[: rows.n], self.backend.device)[None]
        there = torch.ones_like(slots, dtype=torch.bool)
        view = LayerView(0, self.backend.layers[0], slots, there, positions)
        safe = self._safe(view, rows.n, target)
        (kept,) = self.keep.choose(view, self.keep.policy.scores(view), target, safe)
        gone = rows.n - len(kept)
        rows.move(kept, np.arange(len(kept)))
        self.moved, self._alive, self._next, self.gone = True, numbers[kept], after, True
        self.pinned = np.flatnonzero(np.isin(kept, self.pinned))
        if self.watch is not None:
            self.watch.compact(kept)
        return gone

    def _view(self, rows: Rows, layer: int, kept: Sequence[Ints]) -> LayerView:
        """Return what the policy may look at of a layer."""
        info, device, policy = self.backend.layers[layer], self.backend.device, self.keep.policy
        most = max(map(len, kept))
        slots = np.zeros((len(kept), most), np.int64)
        there = np.zeros(slots.shape, bool)
        for head, own in enumerate(kept):
            slots[head, : len(own)], there[head, : len(own)] = own, True
        positions = up(rows.positions[slots], device)
        keys = values = None
        if policy.needs & Need.KEYS:
            keys, values = rows.packed(layer)
        return LayerView(
            layer, info, up(slots, device), up(there, device), positions, keys, values, self.watch,
        )  # fmt: skip

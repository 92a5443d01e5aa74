"""Rows of a layer of which each kv head keeps its own: what is freed takes no memory.

::

    slot             0    1    2    3    4 |  5    6   ...
    head 0 keeps     0    .    2    .    4 |  room for what comes next, in every head
    head 1 keeps     .    1    .    3    4 |

Heads that keep as many rows each stand in one tensor, and a query behind all that was freed sees the
same number of rows of each: one attention for all heads. Rows that are worth less may rest in fewer
bits (`run/packed.py`); attention gets them back a layer at a time, before the others. Or they rest
below memory (`run/below.py`), and no query sees them until they are back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Ints
from kvweave.run.below import BELOW, BelowRows
from kvweave.run.heads import HeadRows, Heads, tail_of, where
from kvweave.run.lanes import lanes_of
from kvweave.run.layers import At, LayerRows, RawRows, span_of
from kvweave.run.packed import ORDER, CodedHead, CodedLevel, among, less, shared
from kvweave.run.rotary import Angles, Rotation
from kvweave.run.upload import up


class ThinnedRows(LayerRows):
    """Rows of one layer, each head's own; slots ``[n, capacity)`` have not been written."""

    def __init__(
        self,
        heads: Heads,
        n: int,
        capacity: int,
        levels: Sequence[CodedLevel] = (),
        below: BelowRows | None = None,
    ) -> None:
        self.n, self.capacity = n, capacity
        self.below = below if below is not None and below.n else None
        self.levels = [level for level in levels if level.n]  # in fewer and fewer bits
        self._hold(heads)

    def _hold(self, heads: Heads) -> None:
        self._heads, self.heads = heads, heads.each
        self._shown: dict[bool, Ints] = {}  # slots of all rows, and so where some are in lanes
        # from this slot on every head has all, as they were computed
        self.tail = max((tail_of(head.slots, self.capacity) for head in heads.each), default=0)
        self.k, self.v = heads.k, heads.v  # [head, row, dim], where heads have as many rows each

    @classmethod
    def of(cls, rows: RawRows, n: int, slots: Sequence[Ints] | None = None) -> ThinnedRows:
        """Copy the ``n`` rows of a layer, or of each head those of its ``slots``."""
        every, room = np.arange(rows.capacity), np.arange(n, rows.capacity)
        whole = [HeadRows(every, k, v) for k, v in zip(rows.k, rows.v, strict=True)]
        kept = [every[:n]] * len(rows.k) if slots is None else slots
        made = Heads(whole).kept([np.concatenate((each, room)) for each in kept])
        return cls(made, n, rows.capacity)

    @property
    def n_freed(self) -> int:
        freed = sum(self.capacity - len(head.slots) for head in self.heads)
        return freed - sum(self.forms.values())

    @property
    def forms(self) -> dict[str, int]:
        """Forms in which rows rest that are not as they were computed, and how many do."""
        found = {level.form: level.n for level in self.levels}
        return found if self.below is None else found | {BELOW: self.below.n}

    def kept(self) -> list[Ints]:
        """Return the slots in use that each head keeps, in whatever form."""
        found = self._raw()
        if not self.forms:
            return found
        for head, own in enumerate(found):
            kept = np.zeros(self.n, bool)
            for slots in (own, *(level.slots[head] for level in self.levels)):
                kept[slots] = True
            if self.below is not None:
                kept |= self.below.there[head, : self.n]
            found[head] = np.flatnonzero(kept)
        return found

    def _raw(self) -> list[Ints]:
        return [head.slots[: np.searchsorted(head.slots, self.n)] for head in self.heads]

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, row, dim] of the slots in use that each head keeps; behind
        a head's last one stands anything."""
        kept = self.kept()
        most = max(map(len, kept))
        if self.k is not None and self.v is not None and not self.forms:
            return self.k[:, :most], self.v[:, :most]
        first = self.heads[0]
        k, v = (t.new_empty(len(kept), most, t.shape[1]) for t in (first.k, first.v))
        for head, slots in enumerate(kept):
            for own, keys, values in self._everywhere(head):
                to = up(np.searchsorted(slots, own), k.device)
                k[head, to], v[head, to] = keys, values
            k[head, len(slots) :], v[head, len(slots) :] = 0, 0
        return k, v

    def _everywhere(self, head: int) -> Iterator[tuple[Ints, Tensor, Tensor]]:
        """Yield the slots in use that a head keeps in some place, keys and values [row, dim]."""
        yield self._unsorted(head, 0, self.n)
        if self.below is not None:
            own = self.below.slots(head)
            yield own, *self.below.take(head, own)

    def gone(self) -> Ints:
        kept = np.zeros(self.n, bool)
        for slots in self.kept():
            kept[slots] = True
        return np.flatnonzero(~kept)

    @property
    def n_bytes(self) -> int:
        levels = sum(level.n_bytes for level in self.levels)
        return levels + sum(head.n_bytes for head in self.heads)

    def bytes_at(self, capacity: int) -> int:
        more = capacity - self.capacity
        return self.n_bytes + sum(more * head.row_bytes for head in self.heads)

    def only(self, slots: Sequence[Ints], ahead: int = 0) -> ThinnedRows:
        """Return of each head those of its ``slots`` in use, and the room there is, or as `_with` says."""
        kept = [own[among(own, x)] for own, x in zip(self._raw(), slots, strict=True)]
        below = None if self.below is None else self.below.only(slots)
        return self._with(kept, [level.only(slots) for level in self.levels], below, ahead)

    def _with(
        self,
        raw: Sequence[Ints],
        levels: Sequence[CodedLevel],
        below: BelowRows | None,
        ahead: int = 0,
    ) -> ThinnedRows:
        """Return rows of which ``raw`` rest as they are, with the room there is; with ``ahead`` with room for
        so many more, as far as others went: they need not be copied again for it."""
        before, wanted = self._raw(), self.capacity
        if ahead and below is None:
            freed = (sum(map(len, before)) - sum(map(len, raw))) // len(before)
            wanted = min(self.n + ahead, self.capacity + freed)
        if wanted == self.capacity and all(map(np.array_equal, before, raw)):
            return ThinnedRows(self._heads, self.n, self.capacity, levels, below)
        room = np.arange(self.n, wanted)
        made = self._heads.kept([np.concatenate((kept, room)) for kept in raw])
        return ThinnedRows(made, self.n, wanted, levels, below)

    def parted(self, slots: Sequence[Ints]) -> ThinnedRows:
        """Return these rows with each head's ``slots``, which it keeps, below memory and all others
        in it. Raises NoSpace, StoreError."""
        old = self.below
        was = [np.zeros(0, np.int64) if old is None else old.slots(i) for i in range(len(slots))]
        down = [less(some, own) for some, own in zip(slots, was, strict=True)]
        back = [less(own, some) for some, own in zip(slots, was, strict=True)]
        if not any(map(len, (*down, *back))):
            return self
        rows = [self._of(head, some) for head, some in enumerate(down)]
        if old is None:
            one = self.heads[0].k, self.heads[0].v
            old = BelowRows.empty(one, len(self.heads), self.capacity, one[0].device)
        below = old.without(back).put(down, rows)
        levels = [level.without(down) for level in self.levels]
        pairs = zip(self._raw(), down, back, strict=True)
        raw = [np.sort(np.concatenate((less(own, gone), more))) for own, gone, more in pairs]
        made = self._with(raw, levels, below)
        for i, some in enumerate(back):
            made.heads[i].write(some, *old.take(i, some))
        return made

    def coded(self, form: str, slots: Sequence[Ints], ahead: int = 0) -> ThinnedRows:
        """Return these rows with each head's ``slots``, which it keeps, in ``form``; those that are
        in it or in one of fewer bits stay as they are. Room as `_with` says."""
        at, levels = ORDER.index(form), {level.form: level for level in self.levels}
        wanted = [np.asarray(some) for some in slots]
        for level in self.levels:
            if ORDER.index(level.form) >= at:
                wanted = [less(a, b) for a, b in zip(wanted, level.slots, strict=True)]
        if not any(map(len, wanted)):
            return self
        rows = [self._of(head, some) for head, some in enumerate(wanted)]
        made = CodedLevel.of(form, wanted, [k for k, _ in rows], [v for _, v in rows])
        for other in self.levels:
            if ORDER.index(other.form) < at:
                levels[other.form] = other.without(wanted)
        levels[form] = levels[form].joined(made) if form in levels else made
        raw = [less(a, b) for a, b in zip(self._raw(), wanted, strict=True)]
        below = None if self.below is None else self.below.without(wanted)
        some = [levels[name] for name in ORDER if name in levels]
        return self._with(raw, some, below, ahead)

    def _of(self, head: int, slots: Ints) -> tuple[Tensor, Tensor]:
        """Return keys and values [slot, dim] of some slots that a head keeps, increasing."""
        one = self.heads[head]
        k, v = (t.new_empty(len(slots), t.shape[1]) for t in (one.k, one.v))
        for level in (None, *self.levels):
            own = one.slots if level is None else level.slots[head]
            rows, given = shared(own, slots)
            if len(rows):
                rests: HeadRows | CodedHead = one if level is None else level.of_head(head)
                to = where(given, k.device)
                k[to], v[to] = rests.at(rows)
        if self.below is not None:
            given = np.flatnonzero(self.below.there[head, slots])
            to = where(given, k.device)
            k[to], v[to] = self.below.take(head, slots[given])
        return k, v

    def _unsorted(self, head: int, begin: int, stop: int) -> tuple[Ints, Tensor, Tensor]:
        """Return which of slots ``[begin, stop)`` a head has in memory, keys and values [row, dim]:
        level by level, and then those that rest as they are."""
        one = self.heads[head]
        first, last = (int(i) for i in np.searchsorted(one.slots, (begin, stop)))
        slots, keys, values = [one.slots[first:last]], [one.k[first:last]], [one.v[first:last]]
        for level in reversed(self.levels):
            own = level.of_head(head)
            rows = slice(*(int(i) for i in np.searchsorted(own.slots, (begin, stop))))
            k, v = own.at(rows)
            slots, keys, values = [own.slots[rows], *slots], [k, *keys], [v, *values]
        if not self.levels:
            return slots[0], keys[0], values[0]
        return np.concatenate(slots), torch.cat(keys), torch.cat(values)

    def less(self, head: int, slots: Ints) -> ThinnedRows:
        """Return these rows without some of one head."""
        kept = self.kept()
        kept[head] = np.setdiff1d(kept[head], slots)
        return self.only(kept)

    def grown(self, capacity: int, n: int) -> ThinnedRows:
        n = min(n, self.n)
        room = np.arange(n, capacity)
        used = (head.slots[: np.searchsorted(head.slots, n)] for head in self.heads)
        made = self._heads.kept([np.concatenate((own, room)) for own in used])
        first = [np.arange(n)] * len(self.heads)
        below = None if self.below is None else self.below.grown(capacity, n)
        levels = self.levels if n == self.n else [level.only(first) for level in self.levels]
        return ThinnedRows(made, n, capacity, levels, below)

    def cut(self, n: int) -> ThinnedRows:
        if n >= self.n:
            return self
        if n < self.tail:  # what was freed behind is room again
            return self.grown(self.capacity, n)
        self.n = n
        return self

    def write(self, at: At, keys: Tensor, values: Tensor) -> None:
        self.n = max(self.n, int(at.slots[-1]) + 1)
        span = span_of(at.slots) if at.slots[0] >= self.tail else None
        if span is not None and self.k is not None and self.v is not None:
            less = self.capacity - self.k.shape[1]
            rows = slice(span.start - less, span.stop - less)
            self.k[:, rows], self.v[:, rows] = keys.transpose(0, 1), values.transpose(0, 1)
            return
        for i, head in enumerate(self.heads):
            head.write(at.slots, keys[:, i], values[:, i])
        if at.slots[0] < self.tail:
            self.levels = [level.rewritten(at.slots, keys, values) for level in self.levels]
            self._write_below(at, keys, values)

    def _write_below(self, at: At, keys: Tensor, values: Tensor) -> None:
        if self.below is None:
            return
        slots, rows = [], []
        for head in range(len(self.heads)):
            given = np.flatnonzero(np.isin(at.slots, self.below.slots(head)))
            some = up(given, keys.device)
            slots.append(at.slots[given])
            rows.append((keys[some, head], values[some, head]))
        if any(map(len, slots)):
            self.below = self.below.put(slots, rows)

    def place(
        self, span: slice, rotation: Rotation, keys: Tensor, angles: Angles, values: Tensor
    ) -> None:
        if span.start < self.tail:  # freed rows come back
            wanted = np.arange(span.start, span.stop)
            self._hold(self._heads.kept([np.union1d(x.slots, wanted) for x in self.heads]))
            gone = [wanted] * len(self.heads)
            left = [level.without(gone) for level in self.levels]
            self.levels = [level for level in left if level.n]
            below = None if self.below is None else self.below.without(gone)
            self.below = below if below is not None and below.n else None
        super().place(span, rotation, keys, angles, values)

    def seen(self, at: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, slot, dim] of some slots, zeros where they are freed."""
        slots = np.arange(at.start, at.stop) if isinstance(at, slice) else at.cpu().numpy()
        first = self.heads[0]
        k, v = (t.new_zeros(len(self.heads), len(slots), t.shape[1]) for t in (first.k, first.v))
        for head in range(len(self.heads)):
            for own, keys, values in self._everywhere(head):
                _, rows, to = np.intersect1d(own, slots, True, return_indices=True)
                there, some = up(to, k.device), up(rows, k.device)
                k[head, there], v[head, there] = keys[some], values[some]
        return k, v

    def seen_by(self, head: int, begin: int, stop: int) -> tuple[Ints, Tensor, Tensor]:
        """Return which of slots ``[begin, stop)`` a head has in memory, in any order, its keys and
        values [1, row, dim]."""
        slots, keys, values = self._unsorted(head, begin, stop)
        return slots, keys[None], values[None]

    def seen_together(self, stop: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [head, row, dim] of all slots before ``stop``, a slot behind all
        that was freed, those before them in any order; None where heads keep more or fewer than
        each other."""
        raw = self.raw_together(stop)
        if raw is None or not self.levels:
            return raw
        found = [level.together() for level in self.levels]
        coded = [both for both in found if both is not None]
        if len(coded) < len(found):
            return None
        return torch.cat([k for k, _ in (*coded, raw)], 1), torch.cat(
            [v for _, v in (*coded, raw)], 1
        )

    def raw_together(self, stop: int) -> tuple[Tensor, Tensor] | None:
        """Return the same of the rows that rest as they are."""
        if self.k is None or self.v is None or stop <= self.tail:
            return None
        rows = slice(0, stop - self.capacity + self.k.shape[1])
        return self.k[:, rows], self.v[:, rows]

    def raw_apart(self, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Return the same head by head, keys and values [1, row, dim] of as many as each keeps."""
        assert stop > self.tail, "rows before others that are not there"
        cuts = [(head, stop - self.capacity + len(head.slots)) for head in self.heads]
        return [(head.k[None, :n], head.v[None, :n]) for head, n in cuts]

    @property
    def coded_together(self) -> list[CodedLevel]:
        """The levels, where heads have as many rows in each; none otherwise."""
        even = all(len({len(own) for own in level.slots}) == 1 for level in self.levels)
        return self.levels if even else []

    def slots_together(self, n: int, laned: bool = False) -> Tensor:
        """Return [head, row] the slots of the first ``n`` rows that `seen_together` shows; ``laned``: of coded
        rows as they stand in `lanes_of` them, and behind these, in front of those of a head that has fewer, 0."""
        if laned not in self._shown:
            self._shown[laned] = self._all_slots(laned)
        return up(self._shown[laned][:, :n], self.heads[0].k.device)

    def _all_slots(self, laned: bool) -> Ints:
        raw, own = self._heads.slots, [head.slots for head in self.heads]
        if laned:
            most, coded = max(map(len, own)), lanes_of(self.levels).slots(self.levels)
            behind = np.stack([np.pad(slots, (most - len(slots), 0)) for slots in own])
            return np.concatenate((coded, behind), 1)
        assert raw is not None, "heads that keep more or fewer than each other"
        in_bits = [np.stack(level.slots) for level in self.levels]
        return np.concatenate([*in_bits, raw], 1) if in_bits else raw

    def check(self, n: int) -> None:
        super().check(n)
        assert self.n <= n, f"{self.n} slots in use of {n} rows"
        for head in self.heads:
            assert bool((np.diff(head.slots) > 0).all()), "slots do not increase"
            room = head.slots[np.searchsorted(head.slots, self.n) :]
            assert len(room) == self.capacity - self.n, "room that is not there"
            assert len(head.k) == len(head.v) == len(head.slots), "rows that no slot has"
        for level in self.levels:
            assert level.n == len(level.k.whole) == level.v.n, f"{level.form}: rows of no slot"
            assert level.n == level.k.n, f"{level.form}: rows of no grid"
        for i, slots in enumerate(self.kept()):
            several = sum(len(level.slots[i]) for level in self.levels)
            several += 0 if self.below is None else len(self.below.slots(i))
            assert len(slots) == several + len(self._raw()[i]), "a row in two forms"
            assert not len(slots) or slots[-1] < self.n, "a coded row behind all"

"""Which of N units are free: allocation of runs of units, counted exactly.

Holes lie in bins by size, eight to each power of two (the classes of TLSF: Masmano and others,
"TLSF: a new dynamic memory allocator for real-time systems", 2004, section 3), so that a hole that
is large enough is found by one look at a bit mask. A freed extent is first kept as it is, for the
next request of exactly its size, which for KV of one model is the usual one; it is merged with the
holes beside it when a request finds nothing, or when `MAX_KEPT` are waiting::

    allocate(n)    kept[n] -> bin of n, a few looks -> any bin above -> merge, again
    free           kept[n].append: no search, no merging

Units belong to regions (segment files, memory segments); no extent crosses the border of two. Not
thread-safe: the owner's lock serialises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

MAX_KEPT = 512  # extents freed but not merged; merging one costs 2 us, the owner's lock is held
LOOKS = 8  # holes of the same class that are tried before a larger class is split


def _class_of(n: int) -> int:
    """Return the bin of a hole of ``n`` units: sizes below 16 have their own."""
    if n < 16:
        return n
    shift = n.bit_length() - 4
    return (shift << 3) + (n >> shift)


class Extents:
    """A space of units in regions; offsets count over all regions and are never given twice."""

    def __init__(self) -> None:
        self.n_units = 0
        self.free_units = 0
        self._end = 0
        self._regions: dict[int, int] = {}  # start -> units
        self._taken: dict[int, int] = {}  # start -> units
        self._holes: dict[int, int] = {}  # start -> units
        self._start_by_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0  # bit c: bin c has holes
        self._kept: dict[int, list[int]] = {}  # units -> starts
        self._n_kept = 0

    def grow(self, n: int, taken: Sequence[tuple[int, int]] = ()) -> int:
        """Add a region of ``n`` units and return its start.

        ``taken`` are runs (start within the region, units) that are not free, by start. Raises
        ValueError if they overlap or leave the region.
        """
        runs, end = [], 0
        for offset, units in taken:
            if offset < end or units < 1 or offset + units > n:
                raise ValueError(f"run {offset}+{units} overlaps another or leaves {n} units")
            runs.append((end, offset - end))
            end = offset + units
        start = self._end
        self._regions[start] = n
        self._end += n
        self.n_units += n
        for hole, units in [*runs, (end, n - end)]:
            if units:
                self._add_hole(start + hole, units)
                self.free_units += units
        for offset, units in taken:
            self._taken[start + offset] = units
        return start

    def retire(self, start: int) -> None:
        """Take away a region that is wholly free. Raises ValueError if it is not."""
        self.merge()
        n = self._regions[start]
        if self._holes.get(start) != n:
            raise ValueError(f"the region at {start} is in use")
        self._remove_hole(start)
        del self._regions[start]
        self.n_units -= n
        self.free_units -= n

    def allocate(self, n: int, align: int = 1) -> int | None:
        """Take ``n`` units at a multiple of ``align``, and return where; None if nothing fits."""
        if n < 1:
            raise ValueError(f"{n} units")
        offset = self._from_kept(n, align)
        if offset is None:
            offset = self._from_holes(n, align)
        if offset is None and self._n_kept:
            self.merge()
            offset = self._from_holes(n, align)
        if offset is not None:
            self._taken[offset] = n
            self.free_units -= n
        return offset

    def free(self, offset: int, n: int) -> None:
        """Give back an extent. Raises ValueError if it is not one that is taken."""
        if self._taken.get(offset) != n:
            raise ValueError(f"{offset}+{n} is not taken")
        del self._taken[offset]
        self.free_units += n
        kept = self._kept.get(n)
        if kept is None:
            self._kept[n] = [offset]
        else:
            kept.append(offset)
        self._n_kept += 1
        if self._n_kept > MAX_KEPT:
            self.merge()

    def claim(self, start: int) -> int:
        """Take the whole hole at ``start`` and return its units; KeyError if there is none."""
        n = self._holes[start]
        self._remove_hole(start)
        self._taken[start] = n
        self.free_units -= n
        return n

    def holes(self) -> Iterator[tuple[int, int]]:
        """Return (start, units) of every hole, merged, in any order."""
        self.merge()
        return iter(list(self._holes.items()))

    def is_free(self, start: int) -> bool:
        """Say whether nothing of the region at ``start`` is taken, as far as `merge` knows."""
        return self._holes.get(start) == self._regions[start]

    def taken(self) -> dict[int, int]:
        """Return the units of every extent that is taken, by start."""
        return dict(self._taken)

    @property
    def taken_units(self) -> int:
        return self.n_units - self.free_units

    @property
    def largest_hole(self) -> int:
        """Units of the largest hole; 0 if there is none."""
        self.merge()
        top = self._bins[self._mask.bit_length() - 1] if self._mask else ()
        return max((self._holes[start] for start in top), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free units outside the largest hole, 0 to 1."""
        return 1 - self.largest_hole / self.free_units if self.free_units else 0.0

    def check_integrity(self) -> None:
        """Raise AssertionError unless extents and holes tile every region, and the sums agree."""
        pieces = [(start, n, "taken") for start, n in self._taken.items()]
        pieces += [(start, n, "hole") for start, n in self._holes.items()]
        pieces += [(start, n, "kept") for n, starts in self._kept.items() for start in starts]
        pieces.sort()
        ends = {start + n for start, n in self._regions.items()}
        at = None
        for start, n, what in pieces:
            assert start in self._regions if at is None else start == at, f"{what} {start}+{n}"
            at = None if start + n in ends else start + n
        assert at is None, f"nothing is known of what begins at {at}"
        free = sum(n for _, n, what in pieces if what != "taken")
        assert free == self.free_units, f"{free} units are free, {self.free_units} counted"
        assert sum(n for _, n, _ in pieces) == sum(self._regions.values()) == self.n_units
        assert self._n_kept == sum(map(len, self._kept.values()))
        binned = {start: c for c, starts in self._bins.items() for start in starts}
        assert binned == {start: _class_of(n) for start, n in self._holes.items()}
        assert self._mask == sum(1 << c for c, starts in self._bins.items() if starts)
        assert self._start_by_end == {start + n: start for start, n in self._holes.items()}

    def _from_kept(self, n: int, align: int) -> int | None:
        kept = self._kept.get(n)
        if not kept or kept[-1] % align:
            return None
        self._n_kept -= 1
        return kept.pop()

    def _from_holes(self, n: int, align: int) -> int | None:
        start = self._find(n, align)
        if start is None:
            return None
        length = self._holes[start]
        self._remove_hole(start)
        offset = start + -start % align
        if offset > start:
            self._insert(start, offset - start)
        if offset + n < start + length:
            self._insert(offset + n, start + length - offset - n)
        return offset

    def _find(self, n: int, align: int) -> int | None:
        """Return the start of a hole that ``n`` aligned units fit into."""
        first, sure = _class_of(n), _class_of(n + align - 1)
        for start in islice(reversed(self._bins.get(first, {})), LOOKS):
            if -start % align + n <= self._holes[start]:
                return start
        above = self._mask >> (sure + 1)
        if above:
            lowest = sure + (above & -above).bit_length()
            return next(reversed(self._bins[lowest]))
        for c in range(first, sure + 1):
            for start in self._bins.get(c, ()):
                if -start % align + n <= self._holes[start]:
                    return start
        return None

    def merge(self) -> None:
        """Make holes of what was freed."""
        for n, starts in self._kept.items():
            for start in starts:
                self._add_hole(start, n)
        self._kept.clear()
        self._n_kept = 0

    def _add_hole(self, start: int, n: int) -> None:
        """Add a hole, grown by the holes beside it that are of the same region."""
        end = start + n
        if end in self._holes and end not in self._regions:
            n += self._remove_hole(end)
        before = self._start_by_end.get(start)
        if before is not None and start not in self._regions:
            n += self._remove_hole(before)
            start = before
        self._insert(start, n)

    def _insert(self, start: int, n: int) -> None:
        self._holes[start] = n
        self._start_by_end[start + n] = start
        c = _class_of(n)
        bin = self._bins.get(c)
        if bin is None:
            bin = self._bins[c] = {}
        bin[start] = None
        self._mask |= 1 << c

    def _remove_hole(self, start: int) -> int:
        n = self._holes.pop(start)
        del self._start_by_end[start + n]
        c = _class_of(n)
        bin = self._bins[c]
        del bin[start]
        if not bin:
            self._mask &= ~(1 << c)
        return n

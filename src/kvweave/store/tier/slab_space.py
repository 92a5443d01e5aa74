"""The space of a slab: segment files, which pages of them are free, and what goes back to the disk.

A segment that is wholly free is unlinked; of one that is more than half free, large holes are given
back to the filesystem (FALLOC_FL_PUNCH_HOLE). Both happen in `Space.trim`, off everybody's path.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from kvweave.store.tier.base import PAGE
from kvweave.store.tier.extents import Extents
from kvweave.store.tier.slab_load import file_name
from kvweave.store.tier.slab_segments import Segment

PUNCH_FROM = 1 << 20  # bytes of the smallest hole worth a system call of 3 ms
PUNCH_ABOVE = 0.5  # share of a segment that is free
RESERVE = 16 << 20  # bytes of the disk that are left to the index: without room nothing is freed
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Space:
    """Pages in segments; thread-safe, and no lock is held while the disk works."""

    def __init__(self, directory: Path, capacity: int, segment: int, direct: bool) -> None:
        """``capacity`` and ``segment`` in bytes."""
        self.directory = directory
        self.n_punched = 0  # bytes
        self._capacity = capacity // PAGE
        self._segment = segment // PAGE
        self._direct = direct
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._extents = Extents()
        self._segments: dict[int, Segment] = {}  # by the start of its extents
        self._starts: list[int] = []
        self._numbers = itertools.count(1)
        self._can_punch = True

    def restore(
        self, segments: Sequence[tuple[Segment, list[tuple[int, int]]]], next_number: int
    ) -> None:
        """Begin with files of which the runs (page, pages) are taken."""
        self._numbers = itertools.count(next_number)
        for segment, taken in segments:
            self._add(segment, taken)

    def _add(self, segment: Segment, taken: Sequence[tuple[int, int]] = ()) -> None:
        segment.start = self._extents.grow(segment.n_pages, taken)
        self._segments[segment.start] = segment
        self._starts.append(segment.start)

    def allocate(self, n_pages: int) -> tuple[Segment, int] | None:
        """Take pages, of a new segment if need be: (segment, page); None if there is no room.

        Raises OSError when a file cannot be made, but not when the disk is full.
        """
        found = self._allocate(n_pages)
        if found is None:
            with self._growing:
                found = self._allocate(n_pages)
                if found is None and self._grow(n_pages):
                    found = self._allocate(n_pages)
        return found

    def _allocate(self, n_pages: int) -> tuple[Segment, int] | None:
        with self._lock:
            offset = self._extents.allocate(n_pages)
            if offset is None:
                return None
            segment = self._segment_of(offset)
            return segment, offset - segment.start

    def _segment_of(self, offset: int) -> Segment:
        return self._segments[self._starts[bisect_right(self._starts, offset) - 1]]

    def _grow(self, n_pages: int) -> bool:
        """Add a segment, a smaller one if the disk is nearly full."""
        disk = os.statvfs(self.directory)
        on_disk = (disk.f_bavail * disk.f_frsize - RESERVE) // PAGE
        left = min(self._capacity - self._extents.n_units, on_disk)
        size = min(max(self._segment, n_pages), left)
        while size >= n_pages:
            number = next(self._numbers)
            path = self.directory / file_name(number)
            try:
                segment = Segment.create(path, number, size, direct=self._direct)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                size //= 2
                continue
            with self._lock:
                self._add(segment)
            return True
        return False

    def free(self, segment: Segment, page: int, n_pages: int) -> None:
        """Give pages back."""
        with self._lock:
            self._extents.free(segment.start + page, n_pages)

    @property
    def n_bytes(self) -> int:
        return self._extents.taken_units * PAGE

    @property
    def file_bytes(self) -> int:
        return self._extents.n_units * PAGE

    def taken(self) -> dict[tuple[int, int], int]:
        """Return the pages of each extent that is taken, by segment number and page."""
        with self._lock:
            self._extents.check_integrity()
            assert self._extents.n_units <= self._capacity
            found = {}
            for offset, n in self._extents.taken().items():
                segment = self._segment_of(offset)
                found[segment.number, offset - segment.start] = n
            return found

    def stats(self) -> dict[str, float]:
        """Return bytes, segments and fragmentation."""
        with self._lock:
            return {
                "capacity": self._capacity * PAGE,
                "taken": self.n_bytes,
                "files": self.file_bytes,
                "segments": len(self._segments),
                "buffered": sum(not s.direct for s in self._segments.values()),
                "largest_hole": self._extents.largest_hole * PAGE,
                "fragmentation": self._extents.fragmentation,
                "punched": self.n_punched,
            }

    def trim(self, keep: int = 0) -> None:
        """Unlink segments that are wholly free, but ``keep``; punch holes into half-empty ones."""
        with self._lock:
            self._extents.merge()
            free = [s for s in self._segments.values() if self._extents.is_free(s.start)][keep:]
            for segment in free:
                self._extents.retire(segment.start)
                del self._segments[segment.start]
                self._starts.remove(segment.start)
            inside: dict[Segment, dict[int, int]] = {s: {} for s in self._segments.values()}
            for start, n in self._extents.holes():
                inside[self._segment_of(start)][start] = n
        for segment in free:
            segment.close()
            segment.path.unlink(missing_ok=True)
        for segment, found in inside.items():
            if sum(found.values()) > PUNCH_ABOVE * segment.n_pages:
                self._punch(segment, found)

    def _punch(self, segment: Segment, holes: dict[int, int]) -> None:
        """Give large holes' blocks back to the filesystem, where that was not done yet."""
        done = segment.punched
        segment.punched = {start: n for start, n in holes.items() if done.get(start) == n}
        for start, n in holes.items():
            if n * PAGE < PUNCH_FROM or start in segment.punched or not self._can_punch:
                continue
            with self._lock:
                try:
                    n = self._extents.claim(start)  # so that nobody writes there meanwhile
                except KeyError:
                    continue  # somebody does
            self._can_punch = segment.punch((start - segment.start) * PAGE, n * PAGE)
            with self._lock:
                self._extents.free(start, n)
                self.n_punched += n * PAGE * self._can_punch
            segment.punched[start] = n

    def close(self, left_open: frozenset[Segment] = frozenset()) -> None:
        """Close all files but those that somebody reads or writes."""
        for segment in self._segments.values():
            if segment not in left_open:
                segment.close()

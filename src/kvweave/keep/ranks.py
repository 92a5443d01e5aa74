"""What policies are made of: a queue that knows its bytes, and keys in the order of a rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

_Entry = tuple[float, int, int]  # rank, serial number, key

COMPACT = 64  # entries below which stale ones are left alone


class Queue:
    """Keys with their bytes, first in first out."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, key: int) -> bool:
        return key in self.sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def push(self, key: int, n_bytes: int) -> None:
        """Put ``key`` at the end, wherever it was before."""
        self.pop(key)
        self.sizes[key] = n_bytes
        self.n_bytes += n_bytes

    def pop(self, key: int) -> int:
        """Take ``key`` out and return its bytes; 0 when it is not here."""
        n_bytes = self.sizes.pop(key, 0)
        self.n_bytes -= n_bytes
        return n_bytes

    def trim(self, n_bytes: int) -> None:
        """Take the oldest out until at most ``n_bytes`` are left."""
        while self.sizes and self.n_bytes > n_bytes:
            self.pop(next(iter(self.sizes)))

    def check_integrity(self) -> None:
        """Raise AssertionError when the bytes are not those of the keys."""
        assert self.n_bytes == sum(self.sizes.values()), "bytes of a queue"


class Ranks:
    """Keys by rank, lowest first; of equal ranks the one set first.

    A heap whose outdated entries are left in it and skipped.
    """

    def __init__(self) -> None:
        self._current: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: int) -> bool:
        return key in self._current

    def __getitem__(self, key: int) -> float:
        return self._current[key][0]

    def set(self, key: int, rank: float) -> None:
        """Give ``key`` a rank."""
        self._serial += 1
        entry = (rank, self._serial, key)
        self._current[key] = entry
        heappush(self._heap, entry)
        self._compact()

    def pop(self, key: int) -> None:
        """Take ``key`` out; unknown keys are ignored."""
        self._current.pop(key, None)
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0]:
            heappop(self._heap)
        self._compact()

    def __iter__(self) -> Iterator[int]:
        """Yield keys in order; the first k cost O(k log k), besides what is outdated."""
        heap, current = self._heap, self._current
        front = [(heap[0], 0)] if heap else []
        while front:
            entry, at = heappop(front)
            if current.get(entry[2]) == entry:
                yield entry[2]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(front, (heap[child], child))

    def _compact(self) -> None:
        if len(self._heap) > COMPACT and len(self._heap) > 2 * len(self._current):
            self._heap = list(self._current.values())
            heapify(self._heap)

    def check_integrity(self) -> None:
        """Raise AssertionError when a key is missing in the heap."""
        entries = set(self._heap)
        assert all(entry in entries for entry in self._current.values()), "a key without entry"
        assert all(key == entry[2] for key, entry in self._current.items()), "an entry's key"

"""A tier in memory of a fixed size: values lie in segments that are page-locked where CUDA is.

::

    segment   anonymous mmap, whole pages, added when nothing fits and the capacity allows it
    value     one extent of 64-byte units; from 4 KiB on it begins at a page, so that disks can
              read straight into it and out of it
    view      a memoryview of a value's own memory; the extent is free when the value is deleted
              or replaced *and* the last view, slice of a view or tensor over one is gone

`put` and `get` copy. `view` and `allocate` do not: ``allocate`` gives memory to write, and
``commit`` makes it the value.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, Put, checked
from kvweave.store.tier.buffers import Bytes, address, copy_in, copy_out
from kvweave.store.tier.extents import Extents
from kvweave.store.tier.keys import check_key, n_bytes_of, outside

UNIT = 64  # bytes: a cache line
SEGMENT = 64 << 20  # bytes: registering them with CUDA takes some ms
LATE = Outcome("late", "the deadline has passed")


class _Held:
    """A value's extent, and who uses its memory now."""

    __slots__ = ("array", "gone", "n_copying", "offset", "units", "views")

    def __init__(self, array: Bytes, offset: int, units: int) -> None:
        self.array = array
        self.offset = offset  # units, over all segments
        self.units = units
        self.n_copying = 0
        self.views: dict[int, weakref.ref[Bytes]] = {}
        self.gone = False


class _Segment:
    """Memory of its own; unregistered and unmapped when nothing uses it any more."""

    def __init__(self, start: int, n_bytes: int, pin: bool) -> None:
        self.start = start
        self.n_bytes = n_bytes
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
        self.is_pinned = pin and _register(self.memory)
        if self.is_pinned:
            weakref.finalize(self.memory, _unregister, address(self.memory))


class Arena:
    """Values in memory, up to ``capacity`` bytes; what does not fit is ``full``."""

    name = "ram"

    def __init__(self, capacity: int, *, segment: int = SEGMENT, pin: bool | None = None) -> None:
        """``pin``: page-lock memory for copies to a GPU; by default where there is CUDA."""
        if capacity < 1 or segment < 1:
            raise InvalidArgument("capacity", f"{capacity} bytes in segments of {segment}")
        self.capacity = capacity
        self.segment = -(-segment // PAGE) * PAGE
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._lock = threading.Lock()
        self._extents = Extents()
        self._segments: list[_Segment] = []
        self._held: dict[str, _Held] = {}
        self._reserved: dict[str, _Held] = {}
        # A view may die anywhere, also in the middle of what holds the lock.
        self._numbers = itertools.count()
        self._dead: deque[tuple[_Held, int]] = deque()
        self._leaving: set[_Held] = set()

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        for put in puts:
            check_key(put.key)
        return [self._put(put, deadline) for put in puts]

    def _put(self, put: Put, deadline: float | None) -> Outcome:
        if deadline is not None and time.monotonic() >= deadline:
            return LATE
        n = n_bytes_of(put.data)
        with self._lock:
            held = self._take(n)
            if held is None:
                return Outcome("full", f"{put.key}: no room for {n} bytes, {self._room()}")
        copy_in(put.data, held.array)
        with self._lock:
            self._publish(put.key, held)
        return DONE

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        return [self._get(get, deadline) for get in gets]

    def _get(self, get: Get, deadline: float | None) -> Outcome:
        with self._lock:
            held = self._held.get(get.key)
            if held is None:
                return Outcome("missing", f"{get.key} is not here")
            bad = outside(get, held.array.size)
            if bad is not None:
                return bad
            if deadline is not None and time.monotonic() >= deadline:
                return LATE
            held.n_copying += 1
        try:
            copy_out(held.array[get.offset :], get.into)
        finally:
            with self._lock:
                held.n_copying -= 1
                if held.gone:
                    self._free_unused(held)
        return checked(get)

    def view(self, key: str) -> memoryview | None:
        """Return a value's own memory, read-only; None when it is not there.

        The bytes stay what they are as long as the view, a slice of it or a tensor over it lives.
        """
        check_key(key)
        with self._lock:
            held = self._held.get(key)
            return None if held is None else self._export(held).toreadonly()

    def allocate(self, key: str, n: int) -> memoryview | None:
        """Return ``n`` writable bytes that `commit` will make the value of ``key``.

        None when there is no room, or when somebody else fills memory for that key now. Until
        `commit` or `abandon` the bytes count as taken, and what was stored under the key stays.
        """
        check_key(key)
        with self._lock:
            held = None if key in self._reserved else self._take(n)
            if held is None:
                return None
            self._reserved[key] = held
            return self._export(held)

    def commit(self, key: str) -> None:
        """Make what was allocated the value of ``key``. Raises InvalidArgument if nothing was."""
        with self._lock:
            held = self._reserved.pop(key, None)
            if held is None:
                raise InvalidArgument("key", f"nothing was allocated for {key!r}")
            self._publish(key, held)

    def abandon(self, key: str) -> None:
        """Let go of what was allocated; it is reused when its memoryview is gone too."""
        with self._lock:
            held = self._reserved.pop(key, None)
            if held is not None:
                self._let_go(held)

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                held = self._held.pop(key, None)
                if held is not None:
                    self._let_go(held)

    def size(self, key: str) -> int | None:
        held = self._held.get(key)
        return None if held is None else held.array.size

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._held))

    @property
    def n_bytes(self) -> int:
        with self._lock:
            self._reap()
            return self._extents.taken_units * UNIT

    def stats(self) -> dict[str, float]:
        """Return bytes (capacity, mapped, pinned, taken, largest hole), values and fragmentation."""
        with self._lock:
            self._reap()
            return {
                "capacity": self.capacity,
                "mapped": self._extents.n_units * UNIT,
                "pinned": sum(s.n_bytes for s in self._segments if s.is_pinned),
                "taken": self._extents.taken_units * UNIT,
                "values": len(self._held),
                "reserved": len(self._reserved),
                "deleted_in_use": len(self._leaving),
                "largest_hole": self._extents.largest_hole * UNIT,
                "fragmentation": self._extents.fragmentation,
            }

    def check_integrity(self) -> None:
        with self._lock:
            self._reap()
            self._extents.check_integrity()
            known = [*self._held.values(), *self._reserved.values(), *self._leaving]
            assert len(known) == len(set(known)), "an extent is held twice"
            found = {held.offset: held.units for held in known}
            taken = self._extents.taken()
            assert found == taken, f"values take {found}, extents {taken}"
            assert all(held.gone == (held in self._leaving) for held in known)
            mapped = sum(segment.n_bytes for segment in self._segments)
            assert mapped == self._extents.n_units * UNIT <= -(-self.capacity // PAGE) * PAGE

    def close(self) -> None:
        """Forget everything; memory that a view still shows goes back when the view dies."""
        with self._lock:
            self._held.clear()
            self._reserved.clear()
            self._leaving.clear()
            self._dead.clear()
            self._segments.clear()
            self._extents = Extents()

    def _take(self, n: int) -> _Held | None:
        """Return memory for ``n`` bytes, from a new segment if it must be; None if full."""
        self._reap()
        units = max(1, -(-n // UNIT))
        align = PAGE // UNIT if n >= PAGE else 1
        offset = self._extents.allocate(units, align)
        if offset is None and self._grow(units * UNIT):
            offset = self._extents.allocate(units, align)
        if offset is None:
            return None
        segment = next(s for s in reversed(self._segments) if s.start <= offset)
        at = (offset - segment.start) * UNIT
        return _Held(segment.memory[at : at + n], offset, units)

    def _grow(self, n_bytes: int) -> bool:
        """Add a segment that ``n_bytes`` fit into, if the capacity allows one."""
        left = -(-self.capacity // PAGE) * PAGE - self._extents.n_units * UNIT
        wanted = max(self.segment, -(-n_bytes // PAGE) * PAGE)
        n = min(wanted, left)
        if n < n_bytes or n < 1:
            return False
        segment = _Segment(0, n, self._pin)
        segment.start = self._extents.grow(n // UNIT)
        self._segments.append(segment)
        return True

    def _publish(self, key: str, held: _Held) -> None:
        old = self._held.get(key)
        self._held[key] = held
        if old is not None:
            self._let_go(old)

    def _let_go(self, held: _Held) -> None:
        held.gone = True
        self._leaving.add(held)
        self._free_unused(held)

    def _free_unused(self, held: _Held) -> None:
        if not held.n_copying and not held.views and held in self._leaving:
            self._leaving.remove(held)
            self._extents.free(held.offset, held.units)

    def _export(self, held: _Held) -> memoryview:
        """Return memory whose last user's end is noticed."""
        array = held.array.view()  # an object of its own: all made from it keeps it alive
        number = next(self._numbers)
        held.views[number] = weakref.ref(array, lambda _: self._dead.append((held, number)))
        return memoryview(array)  # type: ignore[arg-type]

    def _reap(self) -> None:
        """Free what died since."""
        while self._dead:
            held, number = self._dead.popleft()
            held.views.pop(number, None)
            if held.gone:
                self._free_unused(held)

    def _room(self) -> str:
        free = self.capacity - self._extents.taken_units * UNIT
        return f"{free} of {self.capacity} are free, {self._extents.largest_hole * UNIT} in a piece"


def _register(memory: Bytes) -> bool:
    """Page-lock memory for CUDA; False if that cannot be done."""
    if not torch.cuda.is_available():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(address(memory), memory.size, 0)) == 0


def _unregister(where: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(where)  # type: ignore[no-untyped-call]

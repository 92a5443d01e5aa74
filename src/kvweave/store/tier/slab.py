"""The disk tier: values in large preallocated files, found through an index in SQLite.

::

    DIR/seg-000001.slab   extents of 4 KiB pages: a header page, the value, zeros to the page's end
    DIR/slab.sqlite       which value lies where (`kvweave.store.tier.slab_rows`)
    DIR/slab.lock         held with flock by the process that has it open

    put       extent -> header and value written -> known in memory -> row committed soon,
              or for durable ones: segment synced, row committed and synced, then it returns
    delete    forgotten in memory at once -> row's removal committed soon, and synced
              -> when no reader is left: extent free, may be written again

So a row never names bytes that are another value's, and a reader that has begun ends with the bytes
it began with. What is deleted cannot come back after `flush`; before it, a crash may bring it back.
A power cut can take values that were not durable, and leave rows of some: the first read of each
value after opening verifies its header, and the callers' checksums the rest.

Reads and writes go past the page cache (O_DIRECT), into the callers' memory where it is aligned
(`kvweave.store.tier.slab_segments`); deadlines: `kvweave.store.tier.slab_reads`.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from kvweave.errors import InvalidArgument
from kvweave.store.tier import slab_header, slab_load
from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, Put, checked
from kvweave.store.tier.buffers import Run, address, runs
from kvweave.store.tier.keys import check_key, n_bytes_of, outside
from kvweave.store.tier.locked import hold, let_go
from kvweave.store.tier.slab_reads import LATE, Reading, ReadThreads, look_at_clock, verified
from kvweave.store.tier.slab_rows import Change, Extent, SlabIndex, pages_of
from kvweave.store.tier.slab_segments import WHOLE, pieces, scratch
from kvweave.store.tier.slab_space import NO_ROOM, Space

SEGMENT = 1 << 30  # bytes
PATIENCE = 10.0  # seconds that closing waits for readers and writers
LOST = (errno.EIO, errno.ENXIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG)  # for good
CLOSED = Outcome("failed", "the tier is closed")


class Slab:
    """Values on a local disk, in files of up to ``capacity`` bytes together."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        capacity: int,
        *,
        segment: int = SEGMENT,
        direct: bool = True,
        strict: bool = False,
    ) -> None:
        """Open or make the directory.

        ``direct``: go past the page cache where the filesystem can. ``strict``: reads with a
        deadline end at it even if the disk hangs, for the price of a copy. Raises InvalidArgument
        when another process has it, and StoreError when the index cannot be read.
        """
        if capacity < PAGE or segment < PAGE:
            raise InvalidArgument("capacity", f"{capacity} bytes in segments of {segment}")
        self.directory = directory
        self._strict = strict
        directory.mkdir(parents=True, exist_ok=True)
        self._hold = hold(directory / "slab.lock")
        self._lock = threading.Lock()
        self._index: dict[str, Extent] = {}
        self._leaving: set[Extent] = set()  # gone, but a row names them or somebody reads them
        self._writing: set[Extent] = set()
        self._n_leases = 0
        self._n_straight = 0
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._pool = ReadThreads()
        self._space = Space(directory, capacity, segment, direct)
        try:
            self._rows = SlabIndex(directory / "slab.sqlite", self._committed, lambda: self.trim(1))
            self._load(direct)
        except BaseException:
            if hasattr(self, "_rows"):
                self._rows.close()
            let_go(self._hold)
            raise

    def _load(self, direct: bool) -> None:
        """Find again what the rows say; rows that cannot be true are dropped."""
        found = slab_load.load(self.directory, self._rows.load(), direct=direct)
        self._space.restore(found.segments, found.next_number)
        self._index = found.slots
        self._seqs = itertools.count(found.next_seq)
        self._counts["dropped"] = len(found.dropped)
        for key in found.dropped:
            self._rows.change(key, None, None)

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        for put in puts:
            check_key(put.key)
        memory = [runs(put.data) for put in puts]
        outcomes: list[Outcome] = []
        placed: list[tuple[int, Extent, Extent | None]] = []
        for i, (put, data) in enumerate(zip(puts, memory, strict=True)):
            written = self._write(put, data, deadline)
            if isinstance(written, Extent):
                placed.append((i, written, self._publish(put.key, written)))
            outcomes.append(DONE if isinstance(written, Extent) else written)
        if durable and placed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            why = self._rows.flush(left)
            if why:
                bad = LATE if why == LATE.why else Outcome("failed", why)
                for i, slot, before in reversed(placed):
                    if self._take_back(puts[i].key, slot, before):
                        outcomes[i] = bad
        self._count("put", outcomes)
        return outcomes

    def _write(self, put: Put, memory: list[Run], deadline: float | None) -> Extent | Outcome:
        """Write a value to pages of its own that nothing names yet."""
        slot: Extent | None = None
        try:
            slot = self._allocate(n_bytes_of(put.data), deadline)
            if slot is None:
                return Outcome("full", f"{put.key}: no room for {n_bytes_of(put.data)} bytes")
            self._write_to(slot, put.key, memory, deadline)
        except OSError as error:
            if slot is not None:
                self._discard(slot)
            if isinstance(error, TimeoutError):
                return LATE
            return Outcome("full" if error.errno in NO_ROOM else "failed", f"{put.key}: {error}")
        return slot

    def _write_to(self, slot: Extent, key: str, memory: list[Run], deadline: float | None) -> None:
        """Write header and value. Raises OSError, TimeoutError at the deadline."""
        hashed = xxhash.xxh3_64()
        for run in memory:
            hashed.update(run.array(0, run.n).data)
        with scratch(PAGE) as header:
            header.data[: slab_header.SIZE] = slab_header.pack(
                key, slot.seq, slot.n, hashed.intdigest()
            )
            whole = [Run(address(header), PAGE, (header,)), *memory]
            for position, parts in pieces(slot.page * PAGE, whole, WHOLE):
                look_at_clock(deadline)
                slot.segment.write(position, parts)

    def _allocate(self, n: int, deadline: float | None) -> Extent | None:
        """Return pages for ``n`` bytes; waits for commits that would free some."""
        look_at_clock(deadline)
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, CLOSED.why)
        n_pages = pages_of(n)
        found = self._space.allocate(n_pages)
        if found is None and self._leaving:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._rows.flush(left):
                found = self._space.allocate(n_pages)
        if found is None:
            return None
        with self._lock:
            slot = Extent(*found, n, next(self._seqs), True)
            self._writing.add(slot)
            return slot

    def _publish(self, key: str, slot: Extent) -> Extent | None:
        """Make a written slot the value of ``key``; return the one it replaces."""
        with self._lock:
            self._writing.discard(slot)
            before = self._index.get(key)
            self._index[key] = slot
            self._forget(key, slot, before)
            return before

    def _forget(self, key: str, now: Extent | None, before: Extent | None) -> None:
        if before is not None:
            before.gone = True
            self._leaving.add(before)
        self._rows.change(key, now, before)

    def _take_back(self, key: str, slot: Extent, before: Extent | None) -> bool:
        """Undo `_publish` if that can be done; False if the value turns out to be durable."""
        with self._lock:
            if before is not None and before.loose:
                return False  # the commit came through after all
            if self._index.get(key) is not slot:
                return True
            if before is None:
                del self._index[key]
            else:
                before.gone = False
                self._leaving.discard(before)
                self._index[key] = before
            self._forget(key, before, slot)
            return True

    def _discard(self, slot: Extent) -> None:
        """Free a slot that nothing has named yet."""
        with self._lock:
            self._writing.discard(slot)
        self._space.free(slot.segment, slot.page, slot.n_pages)

    def _committed(self, changes: Sequence[Change]) -> None:
        """What is gone, and no row will name again, is free as soon as nobody reads it."""
        with self._lock:
            for change in changes:
                for slot in (change.now, change.before):
                    if slot is not None:
                        slot.queued -= 1
                        if slot.gone and not slot.queued:
                            slot.loose = True
                            self._free_unused(slot)

    def _free_unused(self, slot: Extent) -> None:
        if slot.loose and not slot.leases:
            self._leaving.remove(slot)
            self._space.free(slot.segment, slot.page, slot.n_pages)

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        if deadline is None and len(gets) == 1:
            outcome = self._get_straight(gets[0])
            if outcome is not None:
                return [outcome]
        for get in gets:
            check_key(get.key)
        memory = [runs(get.into) for get in gets]
        with self._lock:
            found = [self._begin(get, into) for get, into in zip(gets, memory, strict=True)]
        readings = [each for each in found if isinstance(each, Reading)]
        if readings:
            self._pool.read(readings, deadline, self._strict)
        for reading in readings:
            if reading.torn or getattr(reading.error, "errno", None) in LOST:
                self._drop(reading.get.key, reading.slot)
        outcomes = [each.outcome or LATE if isinstance(each, Reading) else each for each in found]
        self._count("get", outcomes, sum(reading.bounced for reading in readings))
        return outcomes

    def _get_straight(self, get: Get) -> Outcome | None:
        """Read whole pages into one buffer by one system call; None if that is not the case.

        Some 4 us on top of it; the other way takes 30 us, half of what the disk does for 64 KiB.
        """
        key, offset, into, sums = get
        if len(into) != 1 or offset % PAGE:
            return None
        n = into[0].nbytes
        with self._lock:
            slot = self._index.get(key)
            if slot is None or not slot.checked or n % PAGE or n > WHOLE:
                return None
            if not 0 <= offset <= slot.n - n or not slot.segment.direct:
                return None
            slot.leases += 1
            self._n_leases += 1
        try:
            got = os.preadv(slot.segment.file, into, (slot.page + 1) * PAGE + offset)
        except Exception:
            got = -1  # misaligned memory, or a broken disk: the other way finds out
        with self._lock:
            slot.leases -= 1
            self._n_leases -= 1
            if slot.loose:
                self._free_unused(slot)
            self._n_straight += got == n
        if got != n:
            return None
        return DONE if sums is None else checked(get)

    def _begin(self, get: Get, into: list[Run]) -> Reading | Outcome:
        """Lease the slot for a read, or say why there is nothing to read."""
        slot = self._index.get(get.key)
        if slot is None:
            return Outcome("missing", f"{get.key} is not here")
        bad = outside(get, slot.n)
        if bad is not None:
            return bad
        slot.leases += 1
        self._n_leases += 1
        return Reading(get, into, slot, self._end)

    def _end(self, slot: Extent) -> None:
        with self._lock:
            slot.leases -= 1
            self._n_leases -= 1
            if slot.loose:
                self._free_unused(slot)

    def _drop(self, key: str, slot: Extent) -> None:
        """Let go of a value that cannot be read."""
        with self._lock:
            if self._index.get(key) is slot:
                del self._index[key]
                self._counts["dropped"] += 1
                self._forget(key, None, slot)

    def delete(self, keys: Iterable[str]) -> None:
        index, change, leaving = self._index, self._rows.change, self._leaving
        for key in keys:
            with self._lock:
                slot = index.pop(key, None)
                if slot is not None:
                    slot.gone = True
                    leaving.add(slot)
                    change(key, None, slot)

    def flush(self) -> str:
        """Wait until every put and delete so far is on the disk; return "" or why it is not."""
        return self._rows.flush()

    def verify(self, key: str) -> Outcome:
        """Read a whole value and compare it with its header, which names its checksum."""
        check_key(key)
        with self._lock:
            slot = self._index.get(key)
            if slot is None:
                return Outcome("missing", f"{key} is not here")
            slot.leases += 1
            self._n_leases += 1
        try:
            return verified(key, slot)
        finally:
            self._end(slot)

    def size(self, key: str) -> int | None:
        slot = self._index.get(key)
        return None if slot is None else slot.n

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._index))

    @property
    def n_bytes(self) -> int:
        return self._space.n_bytes

    def stats(self) -> dict[str, float]:
        """Return values, bytes, segments, fragmentation, and outcomes by ``put_`` and ``get_``."""
        with self._lock:
            leaving = sum(slot.n_pages for slot in self._leaving) * PAGE
            mine = {"values": len(self._index), "leaving": leaving, **self._counts}
            mine["get_straight"] = self._n_straight
        return {**mine, **self._space.stats()}

    def _count(self, what: str, outcomes: Sequence[Outcome], bounced: int = 0) -> None:
        with self._lock:
            self._counts.update(f"{what}_{outcome.state}" for outcome in outcomes)
            self._counts["bounced"] += bounced

    def trim(self, keep: int = 0) -> None:
        """Unlink segments that are wholly free, but ``keep``; punch holes into half-empty ones.

        Happens by itself when something was deleted and nothing has changed for a second.
        """
        self._space.trim(keep)

    def check_integrity(self) -> None:
        why = self._rows.flush()
        assert not why, why
        with self._lock:
            known = [*self._index.values(), *self._leaving, *self._writing]
            found = {(slot.segment.number, slot.page): slot.n_pages for slot in known}
            assert len(found) == len(known), "two values share an extent"
            taken = self._space.taken()
            assert found == taken, f"values take {found}, extents {taken}"
            rows = {row[0]: row[1:] for row in self._rows.load()}
            wanted = {k: (s.segment.number, s.page, s.n, s.seq) for k, s in self._index.items()}
            assert rows == wanted, f"rows {rows}, index {wanted}"

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + PATIENCE
        while (self._n_leases or self._writing) and time.monotonic() < end:
            time.sleep(0.005)
        self._pool.close()
        self._rows.close()
        with self._lock:
            known = [*self._leaving, *self._index.values(), *self._writing]
            used = {slot.segment for slot in known if slot.leases or slot in self._writing}
            self._index.clear()
        self._space.close(frozenset(used))
        let_go(self._hold)

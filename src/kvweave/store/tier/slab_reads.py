"""Reads of a slab: cut into pieces, shared by a few threads, ended by a deadline.

Without a deadline the caller reads too, helped by the pool when there is more than one piece. With
one, only the pool reads, and at the deadline the call ends: pieces that no thread has begun are
dropped, and the call waits for those in flight, because the disk writes into the caller's memory.
A piece is 1 MiB at most, so that is a millisecond, unless the disk hangs; then at most as many
calls as the pool has threads hang with it, and all others are late in time, for their pieces never
begin. ``strict`` does away with that too: what has a deadline is read into memory of ours and
copied (some 0.1 CPU seconds per GB), so a call never waits for a disk.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import xxhash

from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, checked
from kvweave.store.tier.buffers import Bytes, Run, address
from kvweave.store.tier.slab_header import fault, payload_sum
from kvweave.store.tier.slab_rows import Extent
from kvweave.store.tier.slab_segments import PIECE, WHOLE, aligned, pieces, scratch

N_THREADS = 4
LATE = Outcome("late", "the deadline has passed")


def look_at_clock(deadline: float | None) -> None:
    """Raise TimeoutError when the deadline has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(errno.ETIMEDOUT, LATE.why)


class Reading:
    """One `Get` of a slot that is leased for it; ``outcome`` is None until it is there."""

    def __init__(
        self, get: Get, memory: list[Run], slot: Extent, ended: Callable[[Extent], None]
    ) -> None:
        self.get = get
        self.memory = memory
        self.slot = slot
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.torn = ""
        self.bounced = 0
        self._header = None if slot.checked else aligned(PAGE)
        self._ended = ended
        self.n_left = 0

    def work(self, size: int) -> list[tuple[int, list[Bytes]]]:
        """Return pieces of ``size`` bytes to read: (byte of the segment, memory)."""
        memory = self.memory
        payload = (self.slot.page + 1) * PAGE
        position = payload + self.get.offset
        found: list[tuple[int, list[Bytes]]] = []
        if self._header is not None:
            header = Run(address(self._header), PAGE, (self._header,))
            if self.get.offset == 0:  # it lies in front: one read does both
                memory, position = [header, *memory], payload - PAGE
            else:
                found += pieces(payload - PAGE, [header], size)
        found += pieces(position, memory, size)
        self.n_left = len(found)
        return found

    def judge(self) -> Outcome:
        """Say how it went, now that all pieces are there."""
        if self.error is not None:
            return Outcome("failed", f"{self.get.key}: {self.error}")
        if self._header is not None:
            slot = self.slot
            self.torn = fault(self._header.tobytes(), self.get.key, slot.seq, slot.n)
            if self.torn:
                return Outcome("missing", f"{self.get.key}: {self.torn}")
            slot.checked = True
        return checked(self.get)

    def end(self) -> None:
        """Give the lease back: nobody reads the slot for this any more."""
        self._ended(self.slot)


def verified(key: str, slot: Extent) -> Outcome:
    """Read a whole leased slot and compare it with its header."""
    start, hashed = slot.page * PAGE, xxhash.xxh3_64()
    try:
        with scratch(PIECE) as space:
            slot.segment.read(start, [space[:PAGE]])
            page = space[:PAGE].tobytes()
            why = fault(page, key, slot.seq, slot.n)
            if why:
                return Outcome("wrong", f"{key}: {why}")
            for at in range(0, slot.n, PIECE):
                part = space[: min(PIECE, slot.n - at)]
                slot.segment.read(start + PAGE + at, [part])
                hashed.update(part.data)
    except OSError as error:
        return Outcome("failed", f"{key}: {error}")
    if hashed.intdigest() != payload_sum(page):
        return Outcome("wrong", f"{key}: the checksum of the value differs")
    return DONE


class ReadBatch:
    """The pieces of one batch and who is at work on them."""

    def __init__(self, readings: Sequence[Reading], size: int, copies: bool) -> None:
        self._copies = copies  # read into our memory, then copy
        self._work = deque(
            (reading, position, memory)
            for reading in readings
            for position, memory in reading.work(size)
        )
        self.n_pieces = len(self._work)
        self._changed = threading.Condition()
        self._n_writing = 0  # threads that may write into the caller's memory now
        self._n_open = self.n_pieces  # pieces not read yet
        self._over = False
        for reading in readings:
            if not reading.n_left:
                reading.outcome = reading.judge()
                reading.end()

    def help(self) -> None:
        """Read pieces until none is left."""
        while True:
            with self._changed:
                if self._over or not self._work:
                    return
                reading, position, memory = self._work.popleft()
                self._n_writing += not self._copies
            self._read(reading, position, memory)

    def _read(self, reading: Reading, position: int, memory: list[Bytes]) -> None:
        try:
            if self._copies:
                self._read_and_copy(reading, position, memory)
            else:
                reading.bounced += reading.slot.segment.read(position, memory)
        except Exception as error:  # whatever it is: the caller waits for this thread
            reading.error = error
        with self._changed:
            reading.n_left -= 1
            is_last = reading.n_left == 0
            judges = is_last and not self._over
            if judges and self._copies:
                self._n_writing += 1
        # Checksums are taken here, outside the lock, by whoever read last: several at once.
        outcome = reading.judge() if judges else None
        if is_last:
            reading.end()
        with self._changed:
            if outcome is not None and not self._over:
                reading.outcome = outcome
            self._n_open -= 1
            self._n_writing -= judges if self._copies else 1
            if self._over or not self._n_open:
                self._changed.notify_all()

    def _read_and_copy(self, reading: Reading, position: int, memory: list[Bytes]) -> None:
        shift, n = position % PAGE, sum(map(len, memory))
        with scratch(shift + n) as space:
            reading.bounced += n
            reading.slot.segment.read(position, [space[shift : shift + n]])
            with self._changed:
                if self._over:
                    return
                self._n_writing += 1
            at = shift
            for part in memory:
                np.copyto(part, space[at : at + len(part)])
                at += len(part)
            with self._changed:
                self._n_writing -= 1
                if self._over:
                    self._changed.notify_all()

    def wait(self, deadline: float | None) -> None:
        """Return when all is read, or at the deadline; the caller's memory is left alone then."""
        with self._changed:
            while self._n_open:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            self._over = True
            dropped = [reading for reading, _, _ in self._work]
            self._work.clear()
            while self._n_writing:
                self._changed.wait()
            for reading in dropped:
                reading.n_left -= 1
            ended = {reading for reading in dropped if reading.n_left == 0}
        for reading in ended:
            reading.end()


class ReadThreads:
    """Threads that read; started by the first batch."""

    def __init__(self, n_threads: int = N_THREADS) -> None:
        self._n = n_threads
        self._calls: SimpleQueue[ReadBatch | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def read(self, readings: Sequence[Reading], deadline: float | None, strict: bool) -> None:
        """Set the outcome of every reading."""
        if deadline is not None and time.monotonic() >= deadline:
            for reading in readings:
                reading.outcome = LATE
                reading.end()
            return
        if deadline is None:
            call = ReadBatch(readings, WHOLE, copies=False)
        else:
            call = ReadBatch(readings, PIECE, copies=strict)
        helpers = min(self._n, call.n_pieces) - (deadline is None)
        if helpers > 0:
            self._start()
            for _ in range(helpers):
                self._calls.put(call)
        if deadline is None:
            call.help()
        call.wait(deadline)
        for reading in readings:
            reading.outcome = reading.outcome or LATE

    def close(self) -> None:
        """End the threads when they have done what they are at."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def _start(self) -> None:
        with self._starting:
            while len(self._threads) < self._n:
                thread = threading.Thread(target=self._serve, name="kvweave-slab", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.help()

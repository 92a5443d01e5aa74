"""Segment files of a slab, read and written past the page cache where that can be done.

O_DIRECT wants offsets, lengths and addresses that are multiples of the page. `plan` divides a range
so that all that can go straight between the file and the caller's memory does, and only pages that
are shared or misaligned go through a buffer of ours, in the same system call::

    file     |....hhhh|bbbbbbbb|bbbbbbbb|ttt.....|        one preadv
    memory   window     caller's memory   window          then the windows' parts are copied

A filesystem that refuses O_DIRECT (EINVAL) is read and written through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvweave.store.tier.base import PAGE
from kvweave.store.tier.buffers import Bytes, Run, address

PIECE = 1 << 20  # bytes of one read with a deadline, which waits for those that have begun
WHOLE = 4 << 20  # bytes of one read without a deadline, and of one write
MAX_BUFFERS = 1024  # of one preadv: IOV_MAX on Linux
O_DIRECT = getattr(os, "O_DIRECT", 0)
PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

_Call = Callable[..., int]  # os.preadv or os.pwritev

_NOTHING: Bytes = np.empty(0, np.uint8)
_libc = ctypes.CDLL(None, use_errno=True)


class Segment:
    """One open file of whole pages."""

    def __init__(self, path: Path, number: int, *, direct: bool = True) -> None:
        """Open an existing file."""
        self.path = path
        self.number = number
        self.start = -1  # of its extents
        self._closing = threading.Lock()
        self.punched: dict[int, int] = {}  # holes that were given back to the filesystem
        self.direct = bool(O_DIRECT) and direct
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.file = os.open(path, flags | (O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.file, self.direct = os.open(path, flags), False
        self.n_pages = os.fstat(self.file).st_size // PAGE

    @classmethod
    def create(cls, path: Path, number: int, n_pages: int, *, direct: bool = True) -> Segment:
        """Make a file with its space reserved. Raises OSError, ENOSPC among them; leaves nothing."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                os.posix_fallocate(file, 0, n_pages * PAGE)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.ftruncate(file, n_pages * PAGE)
            os.fsync(file)
            _sync_directory(path.parent)
            return cls(path, number, direct=direct)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def read(self, position: int, arrays: Sequence[Bytes]) -> int:
        """Fill the arrays, one after the other, from ``position`` on.

        Returns the bytes that went through a buffer of ours. Raises OSError; a file that ends is
        EIO.
        """
        if not self.direct:
            _transfer(os.preadv, self.file, position, list(arrays))
            return 0
        if _is_aligned(position, arrays) and self._direct(os.preadv, position, arrays, _NOTHING):
            return 0
        elements, copies, n = plan(position, arrays)
        with scratch(n) as memory:
            if not self._direct(os.preadv, position, elements, memory):
                return self.read(position, arrays)
            for at, part in copies:
                np.copyto(part, memory[at : at + part.size])
        return n

    def write(self, position: int, arrays: Sequence[Bytes]) -> None:
        """Write the arrays from ``position``, a page's start, on; the last page ends with zeros."""
        if not self.direct:
            _transfer(os.pwritev, self.file, position, list(arrays))
            return
        if _is_aligned(position, arrays) and self._direct(os.pwritev, position, arrays, _NOTHING):
            return
        elements, copies, n = plan(position, arrays)
        with scratch(n) as memory:
            if copies:
                at, part = copies[-1]
                memory[at + part.size : n] = 0
            for at, part in copies:
                np.copyto(memory[at : at + part.size], part)
            if not self._direct(os.pwritev, position, elements, memory):
                self.write(position, arrays)

    def _direct(
        self, call: _Call, position: int, elements: Sequence[Bytes | int], memory: Bytes
    ) -> bool:
        """Transfer past the page cache; False if this filesystem turns out not to do that."""
        buffers, at = [], 0
        for element in elements:
            if isinstance(element, int):
                buffers.append(memory[at : at + element])
                at += element
            else:
                buffers.append(element)
        try:
            _transfer(call, self.file, position // PAGE * PAGE, buffers)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._go_buffered()
            return False
        return True

    def _go_buffered(self) -> None:
        """From now on use the page cache, in the same open file: other threads are using it."""
        self.direct = False
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~O_DIRECT)

    def sync(self) -> None:
        """Wait until what was written would survive a power cut."""
        with self._closing:
            if self.file >= 0:
                os.fdatasync(self.file)

    def punch(self, position: int, n: int) -> bool:
        """Give the blocks of a range back to the filesystem; False if it cannot."""
        offset, length = ctypes.c_longlong(position), ctypes.c_longlong(n)
        return int(_libc.fallocate(self.file, PUNCH, offset, length)) == 0

    def close(self) -> None:
        """Close the file; doing it twice does nothing."""
        with self._closing:
            if self.file >= 0:
                os.close(self.file)
                self.file = -1


def _is_aligned(position: int, arrays: Sequence[Bytes]) -> bool:
    """Say whether all of a transfer can go straight, without a plan."""
    return not position % PAGE and not any(len(a) % PAGE or address(a) % PAGE for a in arrays)


def plan(
    position: int, arrays: Sequence[Bytes]
) -> tuple[list[Bytes | int], list[tuple[int, Bytes]], int]:
    """Divide a transfer that begins at byte ``position`` of a file.

    Returns what lies in the file one after the other from the page of ``position`` on (memory of
    the caller, or the bytes of a window), the parts of the windows that are the caller's (offset
    in all windows together, memory), and the bytes of all windows.
    """
    elements: list[Bytes | int] = []
    copies: list[tuple[int, Bytes]] = []
    used, window = 0, -1  # where the open window begins in the file

    def through_window(at: int, part: Bytes) -> None:
        nonlocal window
        if window < 0:
            window = at // PAGE * PAGE
        copies.append((used + at - window, part))

    def close(at: int) -> None:
        nonlocal used, window
        if window >= 0:
            n = -(-at // PAGE) * PAGE - window
            elements.append(n)
            used, window = used + n, -1

    for array in arrays:
        n = len(array)
        head = min(-position % PAGE, n) if (address(array) - position) % PAGE == 0 else n
        body = (n - head) // PAGE * PAGE
        if head:
            through_window(position, array[:head])
        if body:
            close(position + head)
            elements.append(array[head : head + body])
        if head + body < n:
            through_window(position + head + body, array[head + body :])
        position += n
    close(position)
    return elements, copies, used


def pieces(position: int, memory: Sequence[Run], size: int) -> Iterator[tuple[int, list[Bytes]]]:
    """Cut a transfer at multiples of the page, into about ``size`` bytes each."""
    n_bytes = sum(run.n for run in memory)
    if n_bytes <= size - position % PAGE:
        if n_bytes:
            yield position, [run.array(0, run.n) for run in memory]
        return
    parts: list[Bytes] = []
    start, room = position, size - position % PAGE
    for run in memory:
        at = 0
        while at < run.n:
            n = min(room, run.n - at)
            parts.append(run.array(at, n))
            at, room = at + n, room - n
            if room == 0:
                yield start, parts
                start += sum(map(len, parts))
                parts, room = [], size
    if parts:
        yield start, parts


def _transfer(call: _Call, file: int, position: int, buffers: list[Bytes]) -> None:
    """Read or write all of the buffers; raise OSError, EIO where a file ends too early."""
    while buffers:
        now = buffers[:MAX_BUFFERS]
        n = call(file, now, position)
        if n <= 0:
            raise OSError(errno.EIO, "the file ends too early")
        position += n
        while buffers and n >= buffers[0].size:
            n -= buffers.pop(0).size
        if n:
            buffers[0] = buffers[0][n:]


def _sync_directory(directory: Path) -> None:
    """Make a file that is new in it survive a power cut."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


_scratch: deque[Bytes] = deque(maxlen=8)
_SCRATCH = WHOLE + 2 * PAGE


def aligned(n: int) -> Bytes:
    """Return ``n`` zeros that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, -(-n // PAGE) * PAGE), np.uint8)[:n]


@contextmanager
def scratch(n: int) -> Iterator[Bytes]:
    """Lend ``n`` bytes that begin at a page."""
    if n == 0:
        yield np.empty(0, np.uint8)
        return
    try:
        memory = _scratch.pop() if n <= _SCRATCH else aligned(n)
    except IndexError:
        memory = aligned(_SCRATCH)
    try:
        yield memory[:n]
    finally:
        if memory.size == _SCRATCH:
            _scratch.append(memory)

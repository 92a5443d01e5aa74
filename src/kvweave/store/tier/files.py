"""Files of values: made whole under a name that is free, read past the page cache where that can be."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from kvweave.errors import MANY_OPEN
from kvweave.store.pages import buffer
from kvweave.store.tier.base import PAGE, Get, Outcome
from kvweave.store.tier.buffers import Bytes, Run, copy_in, runs

PIECE = 4 << 20  # bytes of one write, between two looks at the clock
REQUEST = 1 << 20  # bytes of one read, likewise
O_DIRECT = getattr(os, "O_DIRECT", 0)
O_TMPFILE = getattr(os, "O_TMPFILE", 0)
NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
PROC = "/proc/self/fd"
HAS_PROC = os.path.isdir(PROC)


class OpenFile:
    """An open file; closed when nobody reads it any more."""

    def __init__(self, path: str, direct: bool) -> None:
        self.fds: list[int] = []  # past the page cache if it is ``direct``; then through it
        self.direct = direct and bool(O_DIRECT) and HAS_PROC
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self.fds.append(os.open(path, flags | (O_DIRECT if self.direct else 0)))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.fds.append(os.open(path, flags))
            self.direct = False
        self.n = os.fstat(self.fds[0]).st_size

    def cached(self) -> int:
        """Return the same file opened through the page cache, whatever its name stands for now."""
        if not self.direct:
            return self.fds[0]
        if len(self.fds) == 1:
            self.fds.append(os.open(f"{PROC}/{self.fds[0]}", os.O_RDONLY | os.O_CLOEXEC))
        return self.fds[1]

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)


@dataclass(slots=True, eq=False)
class Pending:
    """A read of a batch: its outcome once there is one, and of how many pieces it still waits."""

    get: Get
    outcome: Outcome | None = None
    left: int = 0
    is_starved: bool = False
    """It failed as too many files were open."""

    def fail(self, error: OSError) -> None:
        """Note why, unless there is an outcome already."""
        if self.outcome is None:
            self.outcome = Outcome("failed", f"{self.get.key}: {error}")
            self.is_starved = error.errno in MANY_OPEN

    def ranges(self, file: OpenFile) -> list[FileRange]:
        """Return what to read of its file. Raises BufferError."""
        found, at = list[FileRange](), self.get.offset
        for run in runs(self.get.into):
            if not run.is_writable:  # the system is told an address, and writes whatever is there
                raise BufferError(f"{self.get.key}: a buffer to read into is read-only")
            for start in range(0, run.n, REQUEST):
                found.append(
                    FileRange(self, file, run, start, min(REQUEST, run.n - start), at + start)
                )
            at += run.n
        return found


class FileRange:
    """A part of a run to be read by one request, as `kvweave.store.tier.aio` wants it."""

    def __init__(
        self, of: Pending, file: OpenFile, run: Run, start: int, n: int, position: int
    ) -> None:
        self.of, self.file, self.run, self.start, self.n = of, file, run, start, n
        self.position = position
        aligned = not (run.address + start | position | n) % PAGE
        self.fd = file.fds[0] if aligned and file.direct else -1

    def read(self, done: int) -> None:
        """Read from ``done`` on. Raises OSError; a file that ends is EIO."""
        part = self.run.array(self.start, self.n)
        fd = self.file.cached() if self.fd < 0 or done % PAGE else self.fd
        while done < part.size:
            n = os.preadv(fd, [part[done:].data], self.position + done)
            if n == 0:
                raise OSError(errno.EIO, "the file is shorter than it was")
            done += n
            if done % PAGE:
                fd = self.file.cached()


class NewFile:
    """A file that has no name until `link` gives it one; what is not linked is gone.

    Where that cannot be done (network file systems) it is called ``~`` and something random first.
    """

    def __init__(self, directory: Path, direct: bool) -> None:
        """Raises OSError."""
        self._temporary: Path | None = None
        self._direct = direct
        flags = os.O_RDWR | os.O_CLOEXEC
        if O_TMPFILE and HAS_PROC:
            try:
                self.fd = os.open(directory, flags | O_TMPFILE, 0o600)
                return
            except OSError as error:
                if error.errno not in NO_TMPFILE:
                    raise
        self._temporary = directory / f"~{uuid4().hex}"
        self.fd = os.open(self._temporary, flags | os.O_CREAT | os.O_EXCL, 0o600)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def write(self, data: list[Run], deadline: float | None) -> None:
        """Write everything through aligned memory. Raises OSError, TimeoutError at the deadline."""
        n = sum(run.n for run in data)
        window = buffer(min(PIECE, taken(n)))
        space = np.frombuffer(window, np.uint8)
        direct = self._direct and _set_direct(self.fd)
        at = 0
        for pieces in _windows(data, len(space)):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            size = sum(map(len, pieces))
            copy_in([piece.data for piece in pieces], space[:size])
            padded = taken(size) if direct else size
            space[size:padded] = 0
            _write_all(self.fd, window[:padded], at)
            at += size
        if direct and at % PAGE:
            os.ftruncate(self.fd, n)

    def link(self, path: Path) -> bool:
        """Give the file its name; False if that is taken. Raises OSError."""
        try:
            if self._temporary is not None:
                os.link(self._temporary, path)
            else:
                # with a src_dir_fd Python calls linkat, which follows the link; link does not
                source = f"{PROC}/{self.fd}"
                os.link(source, path, src_dir_fd=self.fd, follow_symlinks=True)
        except FileExistsError:
            return False
        return True


def taken(n: int) -> int:
    """Return the bytes that a file of ``n`` takes."""
    return -(-n // PAGE) * PAGE


def _windows(data: list[Run], n: int) -> Iterator[list[Bytes]]:
    """Cut runs into groups of ``n`` bytes, the last one of what is left."""
    group: list[Bytes] = []
    left = n
    for run in data:
        at = 0
        while at < run.n:
            size = min(left, run.n - at)
            group.append(run.array(at, size))
            at, left = at + size, left - size
            if left == 0:
                yield group
                group, left = [], n
    if group:
        yield group


def _set_direct(file: int) -> bool:
    """Have an open file written past the page cache; False where that cannot be done."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | O_DIRECT)
    except OSError:
        return False
    return bool(O_DIRECT)


def _write_all(file: int, data: memoryview, position: int) -> None:
    done = 0
    while done < data.nbytes:
        n = os.pwrite(file, data[done:], position + done)
        if n % PAGE and done + n < data.nbytes:  # a short write: what follows is not aligned
            n -= n % PAGE
        if n <= 0:
            raise OSError(errno.EIO, "the disk takes no more")
        done += n

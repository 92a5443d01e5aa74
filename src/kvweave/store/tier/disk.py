"""The disk tier: one file for each value, read and written past the page cache where that can be done.

::

    DIR/KEY.kv          the value's bytes and nothing else
    DIR/~HOST-PID-N     being written, where files without a name cannot be made (`fsck` removes them)
    DIR/owner.json      whose it is (`kvweave.store.tier.owner`)

A value is written to a file without a name, synced if it is to be durable, and linked to its name,
which fails where that is taken: it appears whole, once, whoever writes at the same time. What else
lies in the directory is never touched. Nothing is remembered but sizes, so several processes may
use one directory. Blocking: what must end at a deadline whatever the device does is
`kvweave.store.tier.guarded`'s.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvweave.errors import StoreError
from kvweave.store.pages import buffer
from kvweave.store.tier.base import DONE, LATE, PAGE, Get, Outcome, Put, checked
from kvweave.store.tier.buffers import Bytes, Run, copy_in, runs
from kvweave.store.tier.keys import check_key, is_key, n_bytes_of, outside
from kvweave.store.tier.owner import Claim

SUFFIX = ".kv"
PIECE = 4 << 20  # bytes of one system call, between two looks at the clock
OPEN = 128  # files kept open for reading
MAX_BUFFERS = 1024  # of one preadv: IOV_MAX on Linux
O_DIRECT = getattr(os, "O_DIRECT", 0)
O_TMPFILE = getattr(os, "O_TMPFILE", 0)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = Outcome("failed", "the tier is closed")


class _File:
    """An open file; closed when nobody reads it any more."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.direct = direct and bool(O_DIRECT)
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.fd, self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        self.n = os.fstat(self.fd).st_size

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Disk:
    """Values as files of one directory, up to ``capacity`` bytes."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        capacity: int | None = None,
        *,
        shared: bool = False,
        direct: bool = True,
        claimed: Claim | None = None,
    ) -> None:
        """Open or make the directory; ``claimed`` is let go of when it is closed.

        ``direct``: go past the page cache where that can be done. Raises StoreError.
        """
        self._claim = claimed
        self.directory, self.capacity, self.shared = directory, capacity, shared
        self._direct = direct
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._unnamed = bool(O_TMPFILE)
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._n_bytes = 0  # of values, and of what is being written
        self._closed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._recount()
        except OSError as error:
            raise StoreError(f"cannot open {directory}: {error}", path=str(directory)) from error

    def path(self, key: str) -> Path:
        """Return the file of a value."""
        return self.directory / f"{key}{SUFFIX}"

    # ---- writing

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        for put in puts:
            check_key(put.key)
        outcomes = [self._put(put, durable, deadline) for put in puts]
        if durable and any(o.state in ("done", "exists") for o in outcomes):
            why = self._sync_directory()
            if why:  # a name that may not be on the disk is taken back: nobody relies on it
                for put, outcome in zip(puts, outcomes, strict=True):
                    if outcome.ok:
                        self._remove(put.key)
                bad = Outcome("failed", why)
                return [bad if o.state in ("done", "exists") else o for o in outcomes]
        return outcomes

    def _put(self, put: Put, durable: bool, deadline: float | None) -> Outcome:
        if self._closed:
            return CLOSED
        n, path = n_bytes_of(put.data), self.path(put.key)
        if path.exists():
            return self._exists(path, durable)
        if not self._reserve(n):
            return Outcome("full", f"{put.key}: {n} bytes do not fit into {self.capacity}")
        done = False
        try:
            file, temporary = self._create()
            try:
                self._write(file, runs(put.data), n, deadline)
                if durable:
                    os.fsync(file)
                done = self._link(file, temporary, path)
            finally:
                os.close(file)
                if temporary is not None:
                    temporary.unlink(missing_ok=True)
        except TimeoutError:
            return LATE
        except OSError as error:
            return Outcome("full" if error.errno in NO_ROOM else "failed", f"{put.key}: {error}")
        finally:
            if not done:
                self._count(-_taken(n))
        return DONE if done else self._exists(path, durable)

    def _exists(self, path: Path, durable: bool) -> Outcome:
        """Somebody has created it; have it on the disk too, if that is wanted."""
        try:
            if durable:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        except OSError as error:
            return Outcome("failed", f"{path.name}: {error}")
        return Outcome("exists", f"{path.stem} is there already")

    def _create(self) -> tuple[int, Path | None]:
        """Return a new file, and its name if it has one."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if self._unnamed:
            try:
                return os.open(self.directory, flags | O_TMPFILE, 0o600), None
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
                if not self.directory.is_dir():
                    raise
                self._unnamed = False
        name = f"~{socket.gethostname()}-{os.getpid()}-{next(self._numbers)}"
        temporary = self.directory / name
        return os.open(temporary, flags | os.O_CREAT | os.O_EXCL, 0o600), temporary

    def _write(self, file: int, data: list[Run], n: int, deadline: float | None) -> None:
        """Write everything through aligned memory. Raises OSError, TimeoutError at the deadline."""
        window = buffer(min(PIECE, _taken(n)))
        space = np.frombuffer(window, np.uint8)
        direct = self._direct and _set_direct(file)
        at = 0
        for pieces in _windows(data, len(space)):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            size = sum(map(len, pieces))
            copy_in([piece.data for piece in pieces], space[:size])
            padded = _taken(size) if direct else size
            space[size:padded] = 0
            _write_all(file, window[:padded], at)
            at += size
        if direct and at % PAGE:
            os.ftruncate(file, n)

    def _link(self, file: int, temporary: Path | None, path: Path) -> bool:
        """Give the file its name; False if that is taken."""
        try:
            if temporary is not None:
                os.link(temporary, path)
            else:
                # with a src_dir_fd Python calls linkat, which follows the link; link does not
                os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file, follow_symlinks=True)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if temporary is None and not Path("/proc/self/fd").exists():
                self._unnamed = False  # the next one is written under a name
            raise
        return True

    def _sync_directory(self) -> str:
        """Have names on the disk; return "" or why they may not be."""
        try:
            opened = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        except OSError as error:
            return f"{self.directory}: {error}"
        return ""

    # ---- reading

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        return [self._get(get, deadline) for get in gets]

    def _get(self, get: Get, deadline: float | None) -> Outcome:
        if self._closed:
            return CLOSED
        try:
            file = self._opened(get.key)
            bad = outside(get, file.n)
            if bad is not None:
                return bad
            at = get.offset
            for run in runs(get.into):
                for start in range(0, run.n, PIECE):
                    if deadline is not None and time.monotonic() >= deadline:
                        return LATE
                    self._read(file, get.key, run, start, at + start)
                at += run.n
        except FileNotFoundError:
            return Outcome("missing", f"{get.key} is not here")
        except OSError as error:
            self._forget(get.key)
            return Outcome("failed", f"{get.key}: {error}")
        return checked(get)

    def _read(self, file: _File, key: str, run: Run, start: int, position: int) -> None:
        """Fill one piece of a run. Raises OSError; a file that ends is EIO."""
        part = run.array(start, min(PIECE, run.n - start))
        if file.direct and (run.address + start | position | part.size) % PAGE:
            file = _File(self.path(key), False)  # pages are shared with others: through the cache
        done = 0
        while done < part.size:
            n = os.preadv(file.fd, [part[done:].data], position + done)
            if n == 0:
                raise OSError(errno.EIO, "the file is shorter than it was")
            done += n
            if done % PAGE and done < part.size and file.direct:
                file = _File(self.path(key), False)

    def _opened(self, key: str) -> _File:
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        made = _File(self.path(key), self._direct)
        with self._lock:
            self._open[key] = made
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        return made

    def _forget(self, key: str) -> None:
        with self._lock:
            self._open.pop(key, None)

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        for key in keys:
            check_key(key)
        return [self._look(key) for key in keys]

    def _look(self, key: str) -> int | Outcome:
        if self._closed:
            return CLOSED
        try:
            return self.path(key).stat().st_size
        except FileNotFoundError:
            return Outcome("missing", f"{key} is not here")
        except OSError as error:
            return Outcome("failed", f"{key}: {error}")

    # ---- going

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        for key in keys:
            check_key(key)
        return [self._remove(key) for key in keys]

    def _remove(self, key: str) -> Outcome:
        if self._closed:
            return CLOSED
        self._forget(key)
        path = self.path(key)
        try:
            n = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return DONE
        except OSError as error:
            return Outcome("failed", f"{key}: {error}")
        self._count(-_taken(n))
        return DONE

    def keys(self) -> Iterator[str]:
        return iter([key for key, _ in self.sizes()])

    def sizes(self) -> list[tuple[str, int]]:
        """Return keys with the bytes of their values. Raises StoreError."""
        try:
            with os.scandir(self.directory) as entries:
                return [
                    (entry.name.removesuffix(SUFFIX), entry.stat().st_size)
                    for entry in entries
                    if entry.name.endswith(SUFFIX) and is_key(entry.name.removesuffix(SUFFIX))
                ]
        except OSError as error:
            raise StoreError(f"cannot list {self.directory}: {error}") from error

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def _recount(self) -> None:
        taken = sum(_taken(n) for _, n in self.sizes())
        with self._lock:
            self._n_bytes = taken

    def _reserve(self, n: int) -> bool:
        for _ in range(2):
            with self._lock:
                if self.capacity is None or self._n_bytes + _taken(n) <= self.capacity:
                    self._n_bytes += _taken(n)
                    return True
            self._recount()  # others may have made room
        return False

    def _count(self, n: int) -> None:
        with self._lock:
            self._n_bytes += n

    def check_integrity(self) -> None:
        if not self.shared:
            taken = sum(_taken(n) for _, n in self.sizes())
            assert taken == self._n_bytes, f"files take {taken} bytes, counted {self._n_bytes}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._open.clear()
        if self._claim is not None:
            self._claim.close()


def _taken(n: int) -> int:
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

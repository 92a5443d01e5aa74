"""A tier of one file per value, for looking at with ``ls``: slower than the slab, easy to debug.

::

    DIR/KEY.kv          the value's bytes and nothing else
    DIR/~N.part         being written; left behind only by a crash, removed on opening
    DIR/files.lock      held with flock by the process that has it open

A value appears by rename, so it is whole or missing after the death of the process; after a power
cut only ``durable`` ones are sure to be. Reads go through the page cache. A deadline is looked at
between pieces of 1 MiB, in the caller's thread: a disk that hangs makes the call wait for it.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, Put, checked
from kvweave.store.tier.keys import check_key, n_bytes_of, outside
from kvweave.store.tier.locked import hold, let_go

SUFFIX = ".kv"
PIECE = 1 << 20  # bytes read or written between two looks at the clock
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LATE = Outcome("late", "the deadline has passed")


def _taken(n: int) -> int:
    """Return the bytes that a file of ``n`` takes."""
    return -(-n // PAGE) * PAGE


class FileTier:
    """Values as files of one directory, up to ``capacity`` bytes."""

    name = "files"

    def __init__(self, directory: Path, capacity: int | None = None) -> None:
        """Open or make the directory; raise InvalidArgument when another process has it."""
        self.directory = directory
        self.capacity = capacity
        directory.mkdir(parents=True, exist_ok=True)
        self._hold = hold(directory / "files.lock")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sizes: dict[str, int] = {}
        self._taken = 0
        for entry in os.scandir(directory):
            if entry.name.startswith("~"):
                os.unlink(entry.path)
            elif entry.name.endswith(SUFFIX):
                self._sizes[entry.name.removesuffix(SUFFIX)] = entry.stat().st_size
        self._taken = sum(map(_taken, self._sizes.values()))

    def path(self, key: str) -> Path:
        """Return the file of a value."""
        return self.directory / f"{key}{SUFFIX}"

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        for put in puts:
            check_key(put.key)
        outcomes = [self._put(put, durable, deadline) for put in puts]
        if durable and any(outcome.ok for outcome in outcomes):
            try:
                _sync(self.directory)
            except OSError as error:
                return [Outcome("failed", str(error)) if o.ok else o for o in outcomes]
        return outcomes

    def _put(self, put: Put, durable: bool, deadline: float | None) -> Outcome:
        n = n_bytes_of(put.data)
        temporary = self.directory / f"~{next(self._numbers)}.part"
        if not self._reserve(put.key, n):
            return Outcome("full", f"{put.key}: {n} bytes do not fit into {self.capacity}")
        try:
            with temporary.open("xb", buffering=0) as file:
                for piece in _pieces(put.data):
                    if deadline is not None and time.monotonic() >= deadline:
                        raise TimeoutError
                    _write(file.fileno(), piece)
                if durable:
                    os.fsync(file.fileno())
            with self._lock:  # rename and index agree on which of two writers was last
                temporary.replace(self.path(put.key))
                self._taken -= _taken(self._sizes[put.key]) if put.key in self._sizes else 0
                self._sizes[put.key] = n
        except OSError as error:
            with self._lock:
                self._taken -= _taken(n)
            _remove(temporary)
            if isinstance(error, TimeoutError) and error.errno is None:
                return LATE
            return Outcome("full" if error.errno in NO_ROOM else "failed", f"{put.key}: {error}")
        return DONE

    def _reserve(self, key: str, n: int) -> bool:
        """Count ``n`` bytes as taken if they fit beside what is there, the old value included."""
        with self._lock:
            if self.capacity is not None and self._taken + _taken(n) > self.capacity:
                return False
            self._taken += _taken(n)
            return True

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        return [self._get(get, deadline) for get in gets]

    def _get(self, get: Get, deadline: float | None) -> Outcome:
        if get.key not in self._sizes:
            return Outcome("missing", f"{get.key} is not here")
        try:
            with self.path(get.key).open("rb", buffering=0) as file:
                bad = outside(get, os.fstat(file.fileno()).st_size)
                if bad is not None:
                    return bad
                position = get.offset
                for piece in _pieces(get.into):
                    if deadline is not None and time.monotonic() >= deadline:
                        return LATE
                    position += _read(file.fileno(), piece, position)
        except FileNotFoundError:
            self._forget(get.key)
            return Outcome("missing", f"{get.key} is not here any more")
        except OSError as error:
            return Outcome("failed", f"{get.key}: {error}")
        if deadline is not None and time.monotonic() >= deadline:
            return LATE
        return checked(get)

    def _forget(self, key: str) -> None:
        """Leave out of the index what has no file any more."""
        with self._lock:
            if key in self._sizes and not self.path(key).exists():
                self._taken -= _taken(self._sizes.pop(key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._lock:
                if key not in self._sizes:
                    continue
                self._taken -= _taken(self._sizes.pop(key))
                _remove(self.path(key))

    def size(self, key: str) -> int | None:
        return self._sizes.get(key)

    def keys(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._sizes))

    @property
    def n_bytes(self) -> int:
        return self._taken

    def check_integrity(self) -> None:
        with self._lock:
            files = {p.name: p.stat().st_size for p in self.directory.glob(f"*{SUFFIX}")}
            found = {name.removesuffix(SUFFIX): size for name, size in files.items()}
            assert found == self._sizes, f"files {found}, index {self._sizes}"
            wanted = sum(map(_taken, found.values()))
            assert wanted == self._taken, f"files take {wanted} bytes, counted {self._taken}"

    def close(self) -> None:
        let_go(self._hold)


def _pieces(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        flat = buffer.cast("B")
        for start in range(0, flat.nbytes, PIECE):
            yield flat[start : start + PIECE]


def _write(file: int, piece: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.write(file, piece[done:])


def _read(file: int, piece: memoryview, position: int) -> int:
    """Fill ``piece`` from ``position`` on and return its bytes; raise OSError if the file ends."""
    done = 0
    while done < piece.nbytes:
        n = os.preadv(file, [piece[done:]], position + done)
        if n == 0:
            raise OSError(errno.EIO, "the file is shorter than it was")
        done += n
    return done


def _remove(path: Path) -> None:
    """Remove a file if that is possible; opening the tier again removes what is left."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def _sync(directory: Path) -> None:
    """Make renames in a directory survive a power cut."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
